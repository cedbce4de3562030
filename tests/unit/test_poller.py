"""The looks of a poller, the worker that it wakes, and the decisions of a supervisor about its processes."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

import sqlq
from sqlq.config.constants import RESCUE_MS
from sqlq.store.workers import workers
from sqlq.worker.ipc.parent import SharedMemory
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.supervise import child as child_module
from sqlq.worker.supervise import supervisor
from sqlq.worker.supervise.child import FAILED_STARTS, MAX_PAUSE_SECONDS, Child, RestartPolicy, Stage
from sqlq.worker.supervise.heartbeat import HELPERS, Dispatcher
from sqlq.worker.wait import poller
from tests.kit import for_each, wait_until


def test_a_watchdog_counts_no_time_when_the_supervisor_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the machine slept: then no child could give a sign of life."""
    now, killed = [100.0], list[int]()
    monkeypatch.setattr(supervisor, "monotonic", lambda: now[0])
    child: Any = SimpleNamespace(
        worker="w",
        has_reported=False,
        stuck=None,
        is_silent=False,
        sign=0.0,
        silent=0.0,
        box=SimpleNamespace(last_sign=lambda: 1.0, running=list),
        process=SimpleNamespace(pid=1, kill=lambda: killed.append(1)),
    )
    heartbeat: Any = SimpleNamespace(worker_stuck=lambda worker, stuck: None)
    dog = supervisor.Watchdog(heartbeat, WorkerOptions(processes=1, lease_ms=30_000, grace_ms=0))
    dog.look([child], is_whole=True)
    now[0] += 3_600
    dog.look([child], is_whole=True)
    assert not killed
    for _ in range(int(supervisor.SILENT_SECONDS)):
        now[0] += 1
        dog.look([child], is_whole=True)
    assert killed == [1]


@pytest.mark.parametrize(
    ("since_jobs", "hosts", "seconds"),
    [
        *((-0.1, 1, 0.25), (0.0, 1, 0.1), (10.0, 1, 0.1), (60.0, 1, 0.6), (60.0, 20, 12.0)),
        (float("inf"), 1, float("inf")),
    ],
)
def test_a_host_without_notifications_polls_ever_more_rarely_after_jobs(
    since_jobs: float, hosts: int, seconds: float
) -> None:
    assert poller.seconds_without_notifications(since_jobs, hosts) == pytest.approx(seconds)


@pytest.mark.parametrize("hosts", [24, 1_000])
def test_a_few_of_many_hosts_claim_at_once_and_others_within_the_interval(hosts: int) -> None:
    assert {poller.drawn(few) for few in (1, 2, poller.WINNERS) for _ in range(100)} == {0.0}
    random.seed(7)
    rounds = [[poller.drawn(hosts) for _ in range(hosts)] for _ in range(200)]
    went = [waits.count(0.0) for waits in rounds]
    assert 2 < sum(went) / len(went) < 4, "about three, whatever their number"
    assert max(went) <= 15
    assert max(map(max, rounds)) <= poller.IDLE_POLL_SECONDS
    first_look = [min(wait for wait in waits if wait) for waits in rounds]
    assert sorted(first_look)[150] < 0.01, "when nobody went, or had room, another looks some ms later"


HINTS: dict[str, tuple[list[tuple[str, float]], tuple[float, float]]] = {
    "one host": ([("hint", 5.0)], (5.0, 5.0)),
    "two hints": ([("hint", 5.0), ("hint", 4.0)], (4.0, 5.0)),
    "many hosts": ([("hint", 4.5), ("backs off", 4.5)], (4.5, 4.75)),
    "backs off to a later look": ([("backs off", 4.9)], (inf, 5.0)),
    "a later hint is for jobs that the look has seen": ([("hint", 6.0), ("looked", 5.0)], (inf, 8.0)),
    # it may have overtaken its COMMIT, so that the look finds nothing
    "a hint during a look stays": ([("hint", 5.0), ("looked", 5.0)], (5.0, 8.0)),
    "sent": ([("hint", 5.0), ("sent", 5.0)], (inf, 5.0)),
}
"""Events at their times, and when a worker is then sent and the poller looks. Its first look is at 5."""


@for_each("name", HINTS)
def test_a_notification_counts_until_a_later_look_or_a_worker_is_sent(name: str) -> None:
    events, expected = HINTS[name]
    agenda = poller.Agenda(look_at=5.0)
    for event, moment in events:
        match event:
            case "hint" | "backs off":
                agenda.expect(moment, 0.0 if event == "hint" else 0.25)
            case "looked":
                agenda.plan_next_look(moment, moment + 3.0)
            case "sent":
                agenda.send_at = inf
    assert (agenda.send_at, agenda.look_at) == expected


@for_each(("hosts", "least", "most"), [(1, 1_000, 1_000), (10, 1_000, 1_000), (1_000, 4, 20)])
def test_many_hosts_share_the_looks_for_maintenance(hosts: int, least: int, most: int) -> None:
    random.seed(7)
    assert least <= sum(poller.looks_for_services(hosts) for _ in range(1_000)) <= most


class Noted(services.PolledService):
    """A service that notes its turns, and has the next one when it is called."""

    activity = "noting"
    turns = 0
    wait: float | None = None

    def turn(self) -> float | None:
        self.turns += 1
        return self.wait


def test_a_polled_service_runs_when_a_poll_has_found_work() -> None:
    silent: list[bool] = []
    noted = Noted(sqlq.App("sqlite://").database, is_watched=lambda: not silent)
    rhythm = RESCUE_MS / 1000 * services.MIN_RHYTHM_SHARE
    assert noted.run() >= rhythm
    assert noted.turns == 0
    noted.calls += 1
    noted.wait = 0.0  # there is more to do
    assert noted.run() == 0.0
    noted.wait = None
    assert [noted.run() >= rhythm for _ in range(2)] == [True, True]
    assert noted.turns == 2
    silent.append(True)  # nobody looks
    noted.run()
    noted.run()
    assert noted.turns == 4


SIGHTS = {
    "nobody looks": (None, None, (False, False, False)),
    "the own poller looks": (None, 1.0, (True, False, False)),
    "the supervisor looks": (1.0, None, (True, True, True)),
    "it has just fallen silent": (poller.TRUSTED_SECONDS + 0.1, None, (False, False, True)),
    "the own poller takes over": (poller.STAND_BY_SECONDS + 0.1, None, (False, False, False)),
    "the own poller has taken over": (poller.STAND_BY_SECONDS + 0.1, 1.0, (True, False, False)),
}
"""For how long the supervisor and the own poller have been silent. Then whether a poller looks, whether it is
the supervisor's, and whether the own one stands by."""


@for_each("name", SIGHTS)
def test_the_own_poller_and_the_worker_itself_follow_a_silent_supervisor(name: str) -> None:
    by_supervisor, own, expected = SIGHTS[name]
    now = [1_000.0]
    supervision: Any = SimpleNamespace(is_alone=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poller, "monotonic", lambda: now[0])
        looked_at = -inf if by_supervisor is None else now[0] - by_supervisor
        supervision.last_poll = lambda: looked_at
        now[0] -= poller.STAND_BY_SECONDS
        last_look = poller.LastLook(supervision)
        assert last_look.stands_by(), "the supervisor's may be about to begin"
        now[0] += poller.STAND_BY_SECONDS
        if own is not None:
            now[0] -= own
            last_look.note()
            now[0] += own
        assert (last_look.is_recent(), last_look.supervisor_looks(), last_look.stands_by()) == expected


# -- whom a supervisor sends ---------------------------------------------------------------------------------


class Sent(Child):
    """A child without a process, which notes that it was sent."""

    stage = Stage.WORKING

    def __init__(self, name: str, sent: list[str], *, running: int = 0, slots: int = 10) -> None:
        self.worker, self.slots = name, slots
        self.sent = sent
        self.told: list[dict[str, Any]] = []
        self.link: Any = SimpleNamespace(offer=lambda **message: self.told.append(message))
        self.box, fd = SharedMemory.create()
        os.close(fd)
        for id in range(running):
            self.box.started((id + 1, 1))
        self.box.pulse()

    def send(self) -> None:
        self.sent.append(self.worker or "")
        self.sent_at = time.monotonic()


class Host(Dispatcher):
    """The dispatcher of such children, all but those of another database."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.sent: list[str] = []
        keeper: Any = SimpleNamespace(knows=lambda worker: worker != "elsewhere")
        super().__init__(lambda: self.added, keeper)

    def add(self, name: str, **options: int) -> Any:
        self.added.append(Sent(name, self.sent, **options))
        return self.added[-1]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    for child in host.added:
        child.box.close()


def test_a_notification_wakes_the_worker_with_a_free_slot_and_fewest_jobs(host: Host) -> None:
    host.add("full", running=2, slots=2)
    host.add("busy", running=3)
    last = host.add("less busy", running=1)
    host.send()
    for stage in (Stage.LEAVING, Stage.RETIRING):
        last.stage = stage
        host.send()
    assert host.sent == ["less busy", "busy", "busy"]


def test_another_worker_is_woken_when_the_last_is_late(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LATE_SECONDS", 0.0)
    for name in ("a", "b"):
        host.add(name)
    host.send()
    host.send()
    assert sorted(host.sent) == ["a", "b"]


def test_other_workers_are_woken_in_turn_when_one_finds_too_many_jobs(host: Host) -> None:
    first, *_ = [host.add(name) for name in ("first", "a", "b", "c", "d")]
    for _ in range(2):
        host.more(first)
    assert len(host.sent) == 2 * HELPERS
    assert {*host.sent} == {"a", "b", "c", "d"}


def test_a_dead_worker_does_not_block_the_wake_of_others(host: Host) -> None:
    """The caller may have an older list of the children."""
    gone = Child([sys.executable, "-c", ""], lambda child, message: None, {})
    wait_until(lambda: gone.end() is not None, what="its process ending")
    gone.stage, gone.worker, gone.slots = Stage.WORKING, "gone", 4
    first = host.add("first")
    host.added.append(gone)
    host.add("alive")
    gone.close()
    host.more(first)
    assert "alive" in host.sent


def test_a_later_worker_is_notified_of_the_end_of_a_pause(host: Host) -> None:
    first = host.add("first")
    host.publish(workers.Requests(all_paused=True))
    second = host.add("second")
    for _ in range(2):
        host.publish(workers.Requests(all_paused=False))
    assert first.told == [{"all_paused": True}, {"all_paused": False}]
    assert second.told == [{"all_paused": False}]


def test_a_worker_in_another_database_is_not_watched(host: Host) -> None:
    """Where its engine leads elsewhere than its URL, what the supervisor sees is not what it would see."""
    here, elsewhere = host.add("here"), host.add("elsewhere")
    host.publish(workers.Requests())
    assert here.box.last_poll() > 0 >= elsewhere.box.last_poll()
    host.send()
    assert host.sent == ["here"]


# -- how many processes start --------------------------------------------------------------------------------


CASES = {
    "it had nothing more to do": (Stage.WORKING, 0, True, True, 0, 0),
    "it has logged why it cannot go on": (Stage.WORKING, 1, True, True, 0, 1),
    "a handler called os._exit(0)": (Stage.WORKING, 0, False, False, 1, 0),
    "it was killed": (Stage.WORKING, -9, False, False, 1, 0),
    "it was killed after its last message": (Stage.WORKING, -9, True, False, 1, 0),
    "an operator stopped it": (Stage.RETIRING, 0, True, True, 0, 0),
    "it was killed while it retired": (Stage.RETIRING, -9, False, False, 1, 0),
    "another has its place": (Stage.LEAVING, 0, True, True, 1, 0),
    "it was killed while it left": (Stage.LEAVING, -9, False, False, 1, 0),
}
"""One of two processes has ended: its stage, its status, and whether it had sent its last message. Then
whether that was in good order, how many are missing beside the other, and the exit code so far."""


@for_each("name", CASES)
def test_a_place_is_filled_again_unless_its_process_ended_in_good_order(name: str) -> None:
    stage, status, has_reported, in_good_order, missing, code = CASES[name]
    restarts = RestartPolicy(2)
    assert restarts.missing([Stage.WORKING, stage]) == (stage is Stage.LEAVING)
    restarts.ready()
    assert restarts.ended(stage, status, has_reported=has_reported) == in_good_order
    assert (restarts.missing([Stage.WORKING]), restarts.code) == (missing, code)
    assert not restarts.is_hopeless


def test_all_processes_are_missing_at_first_and_none_when_all_start() -> None:
    restarts = RestartPolicy(3)
    assert [restarts.missing([Stage.STARTING] * number) for number in range(4)] == [3, 2, 1, 0]


@for_each("status", [1, 2])
def test_no_other_process_starts_when_the_first_has_logged_why_it_cannot(status: int) -> None:
    restarts = RestartPolicy(2)
    restarts.failed(status, 100.0)
    assert (restarts.is_hopeless, restarts.code) == (True, status)


@for_each(("status", "any_ready"), [(-9, False), (1, True), (3, False)])
def test_failed_starts_follow_ever_later_until_the_supervisor_gives_up(status: int, any_ready: bool) -> None:
    restarts = RestartPolicy(2)
    if any_ready:
        restarts.ready()
    waits = [restarts.failed(status, 100.0) for _ in range(FAILED_STARTS - 1)]
    assert waits == [0.5, 1.0, 2.0, 4.0]
    assert max(waits) <= MAX_PAUSE_SECONDS
    assert restarts.start_at == 104.0
    assert not restarts.is_hopeless
    restarts.failed(status, 104.0)
    assert (restarts.is_hopeless, restarts.code) == (True, 1)


def test_a_process_at_work_ends_a_row_of_failed_starts() -> None:
    restarts = RestartPolicy(2)
    for _ in range(3 * FAILED_STARTS):
        restarts.failed(-9, 100.0)
        restarts.ready()
    assert not restarts.is_hopeless


ROLLS = {
    "none is outdated": ([Stage.WORKING, Stage.WORKING], 0),
    "one is missing": ([Stage.WORKING], 1),
    "both are outdated": ([Stage.OUTDATED, Stage.OUTDATED], 1),
    "the next one starts": ([Stage.OUTDATED, Stage.OUTDATED, Stage.STARTING], 0),
    "one is replaced": ([Stage.WORKING, Stage.LEAVING, Stage.OUTDATED], 1),
    "one died, and the other is outdated": ([Stage.OUTDATED], 1),
    "all are replaced": ([Stage.WORKING, Stage.WORKING, Stage.LEAVING, Stage.LEAVING], 0),
}


@for_each("name", ROLLS)
def test_outdated_processes_are_replaced_one_after_the_other(name: str) -> None:
    stages, number = ROLLS[name]
    assert RestartPolicy(2).to_start(stages) == number


def test_starts_that_fail_end_no_process_that_works() -> None:
    restarts = RestartPolicy(2)
    restarts.ready()
    waits = [restarts.failed(1, 100.0, others=True) for _ in range(3 * FAILED_STARTS)]
    assert not restarts.is_hopeless
    assert waits[-1] == MAX_PAUSE_SECONDS
    restarts.failed(1, 100.0)
    assert restarts.is_hopeless, "the last one is gone"
