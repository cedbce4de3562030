"""One attempt in a worker: it starts only while it may, ends in time, and leaves nothing in memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

import sqlq
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Failed, Released
from sqlq.worker.attempt import call
from sqlq.worker.attempt import progress as progress_writer
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.run.lease import Deadlines
from tests.kit import wait_until


def test_a_job_released_before_it_began_does_not_start() -> None:
    """A slot may take up its job after the worker has released it: another worker may run it by then."""
    ran: list[str] = []
    task = sqlq.App("sqlite://").task(name="t", max_attempts=1)(lambda: ran.append("charged"))
    attempt = Attempt(ClaimedJob(1, 1, "default", "t", '{"args": []}', 1, 1), task, float("inf"))
    attempt.cancel()
    assert (type(call.execute(attempt)), ran) == (Released, [])


def test_a_forgotten_attempt_keeps_no_locals_of_its_handler() -> None:
    class Thing: ...

    things: list[weakref.ref[Thing]] = []

    def fails() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise ValueError("no")

    task = sqlq.App("sqlite://").task(name="t", max_attempts=1)(fails)
    attempt = Attempt(ClaimedJob(1, 1, "default", "t", "{}", 1, 1), task, float("inf"))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        assert isinstance(call.execute(attempt), Failed)
        assert things[0]() is not None, "the exception has the frames"
        attempt.forget()
        assert things[0]() is None
    finally:
        if was_enabled:
            gc.enable()


def test_progress_keeps_up_when_many_jobs_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was noted while the last batch was written goes with the next one."""
    monkeypatch.setattr(progress_writer, "EVERY_SECONDS", 0.0)
    batches: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def hand_over(jobs: Any) -> None:
        batches.append(len(jobs))
        begun.set()
        go_on.wait(30)

    pace = progress_writer.Pace(hand_over)
    pace.note(SimpleNamespace(right=(0, 1)))  # type: ignore[arg-type]
    assert begun.wait(30)
    for id in range(1, 2_501):
        pace.note(SimpleNamespace(right=(id, 1)))  # type: ignore[arg-type]
    go_on.set()
    wait_until(lambda: sum(batches) == 2_501, what="all handed over")
    pace.close()
    assert batches == [1, 2_500]


# -- deadlines -----------------------------------------------------------------------------------------------


def running(id: int, *, timeout_ms: int | None = None) -> Attempt:
    claimed = ClaimedJob(id, 1, "q", "t", "{}", 1, 3, timeout_ms=timeout_ms)
    return Attempt(claimed, None, float("inf"), Target())


def test_only_a_handler_past_its_timeout_counts_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlq.worker.run.lease.OVERDUE_SECONDS", 0.0)
    stuck: list[int] = []
    ended, goes_on, cancelled = (running(id, timeout_ms=ms) for id, ms in ((1, 1), (2, 1), (3, 200)))
    for job in (ended, goes_on, cancelled):
        job.mark_started()
    ended.ended = True
    with closing(Deadlines(lambda job: stuck.append(job.id))) as deadlines:
        deadlines.start()
        deadlines.watch([ended, goes_on, cancelled])
        deadlines.request_stop(cancelled)
        wait_until(lambda: 3 in stuck, timeout=30, what="the one that goes on past its timeout")
    assert (stuck, cancelled.timed_out) == ([2, 3], True)


def test_a_cancel_after_the_loop_is_closed_blocks_nothing() -> None:
    """It comes from a thread that has others to see to as well."""

    async def meanwhile() -> Callable[[], object]:
        return call._canceller()

    job = running(1)
    job.on_cancel(asyncio.run(meanwhile()))
    job.cancel()
    assert job.stop_requested
