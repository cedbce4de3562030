"""Subprocesses for one job at a time: which are kept for the next job, and which are killed."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from sqlq.config.constants import MAX_RELEASES
from sqlq.model.outcome import Finished, Outcome, Released, Retried, SelfCompleted
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.run import isolated
from sqlq.worker.run.executor import Executor
from sqlq.worker.run.isolated import NOT_STARTED_MS
from tests.kit import run_isolated, wait_until
from tests.kit.isolated import DEAF, HANGS, ISOLATE, Spawned


@pytest.fixture
def spawned() -> Iterator[type[Spawned]]:
    made: list[Spawned] = []

    class Noted(Spawned):
        def __init__(self, *program: str, **options: Any) -> None:
            super().__init__(*program, **options)
            made.append(self)

    yield Noted
    for each in made:
        each.isolates.close()


def test_a_job_that_needs_its_own_process_gets_an_unused_one(spawned: type[Spawned]) -> None:
    some = spawned()
    assert some.run() == Finished()
    assert some.run(alone=True) == Finished()
    assert len(some.processes) == 2
    wait_until(lambda: some.ended() == [False, True], timeout=30, what="the process of one job having ended")
    assert some.run() == Finished()
    assert some.run() == Finished()
    assert some.ended() == [False, True], "the other one is kept"


def test_few_subprocesses_start_at_a_time(spawned: type[Spawned]) -> None:
    some = spawned(at_a_time=2)
    first, *others = [some.job() for _ in range(3)]
    assert [some.isolates.let_in(job) for job in (first, *others)] == [True, True, False]
    some.isolates.let_out(first)
    assert some.isolates.let_in(others[-1])


@pytest.mark.parametrize("says", [b"no JSON\n", b'{"outcome": {"is": "of another release"}}\n'])
def test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost(
    spawned: type[Spawned], says: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    some = spawned(ISOLATE.replace("link.send(outcome=", f"link._socket.sendall({says!r}); dict(a="))
    lost = some.run()
    assert isinstance(lost, SelfCompleted)
    assert isinstance(lost.otherwise, Retried)
    assert lost.otherwise.reason == "worker_lost"
    assert "job 1: what its process says cannot be read; the process is killed" in caplog.text
    assert some.ended() == [True]


def test_a_job_is_due_at_once_when_its_process_dies_and_later_when_it_dies_again(
    spawned: type[Spawned],
) -> None:
    some = spawned(ISOLATE.replace("link.send(outcome=", "sys.exit(3); dict(a="))
    ends: list[Any] = [some.run(attempts=attempts) for attempts in (1, 2)]
    assert [type(end.otherwise) for end in ends] == [Retried, Retried]
    assert ends[0].otherwise.delay_ms == 0
    assert ends[1].otherwise.delay_ms > 0


def test_a_job_is_not_released_for_ever_when_its_subprocess_fails_to_start(spawned: type[Spawned]) -> None:
    some = spawned("raise SystemExit(3)")
    assert some.run() == Released(NOT_STARTED_MS)
    assert isinstance(some.run(releases=MAX_RELEASES), Retried)


def test_a_subprocess_that_hangs_at_its_start_is_killed_and_its_job_released(
    spawned: type[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "START_SECONDS", 0.1)
    some = spawned(HANGS)
    assert some.run() == Released(NOT_STARTED_MS)
    assert some.ended() == [True]


def test_a_process_that_has_begun_in_time_is_not_killed_for_its_start(spawned: type[Spawned]) -> None:
    some = spawned(ISOLATE.replace("(began=True)", "(began=True), link.receive()"))

    class Begun(Attempt):
        def mark_started(self) -> None:
            super().mark_started()
            (isolate,) = some.isolates._all
            some.isolates._kill_hanging(isolate, self)  # as the timer that fires now
            isolate.link.send(go=True)

    assert some.run(kind=Begun) == Finished()
    assert some.ended() == [False]


def test_a_job_is_not_released_for_ever_when_no_subprocess_can_start(spawned: type[Spawned]) -> None:
    def none(fd: int) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    some = spawned()
    some.spawn = none
    assert some.run() == Released(NOT_STARTED_MS)
    assert isinstance(some.run(releases=MAX_RELEASES), Retried)


def test_no_slot_waits_while_a_subprocess_starts(spawned: type[Spawned]) -> None:
    some, may_start, outcomes = spawned(at_a_time=2), threading.Event(), SimpleQueue[Outcome]()
    starting = threading.Semaphore(0)
    spawn = some.spawn

    def slow(fd: int) -> Any:
        starting.release()
        assert may_start.wait(30)
        return spawn(fd)

    some.spawn = slow
    executors = executor(10, some, outcomes)
    executors.offer([some.job()])
    assert starting.acquire(timeout=30)
    coroutines = [some.job() for _ in range(4)]
    for job in coroutines:
        job.isolated, job.is_async = False, True
    offering = threading.Thread(target=executors.offer, args=([some.job(), *coroutines],))
    offering.start()
    for _ in coroutines:  # of an unknown task
        assert isinstance(outcomes.get(timeout=10), Retried | Released)
    may_start.set()
    assert [outcomes.get(timeout=30) for _ in range(2)] == [Finished()] * 2
    offering.join()
    executors.close()
    wait_until(lambda: some.ended() == [True, True])


def test_a_cancel_waits_for_no_subprocess_that_does_not_read(spawned: type[Spawned]) -> None:
    """The job fills the pipe almost, so that the cancel has no room."""
    some = spawned(DEAF.replace("link.receive()", ""))
    running = some.job()
    running.claimed = running.claimed._replace(payload="x" * 215_000)
    slot = threading.Thread(target=run_isolated, args=(some.isolates, running))
    slot.start()
    wait_until(lambda: running.started, what="the job sent")
    cancelling = threading.Thread(target=running.cancel)
    cancelling.start()
    cancelling.join(10)
    waited = cancelling.is_alive()
    some.isolates.close()
    slot.join(30)
    assert not waited


def executor(slots: int, some: Spawned, outcomes: SimpleQueue[Outcome]) -> Executor:
    return Executor(slots, lambda _: None, lambda _, end: outcomes.put(end), lambda: True, some.isolates)


def test_an_error_of_the_pool_costs_no_slot(spawned: type[Spawned], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(running: Attempt, *_: object) -> Outcome:
        raise SystemExit

    some, outcomes = spawned(), SimpleQueue[Outcome]()
    monkeypatch.setattr(some.isolates, "execute", raises)
    executors = executor(1, some, outcomes)
    executors.offer([some.job()])
    assert isinstance(outcomes.get(timeout=30), Retried)
    executors.close()


class Killable(Attempt):
    """Keeps what would kill it, as a heartbeat does that is just about to."""

    def mark_started(self) -> None:
        super().mark_started()
        self.seen = self.kill


def test_a_late_kill_does_not_end_the_next_job(spawned: type[Spawned]) -> None:
    some = spawned()
    first: Any = some.job(kind=Killable)
    assert run_isolated(some.isolates, first) == Finished()
    first.seen()
    assert some.run() == Finished()
    assert len(some.processes) == 1, "one after the other in the same process"
