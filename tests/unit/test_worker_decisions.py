"""The decisions of a worker's loop, as a table: an event, and the action that follows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sqlq.model.job import ClaimedJob
from sqlq.worker import decide
from sqlq.worker.claim import claimer as claims
from sqlq.worker.claim.claimer import Pace, ScanCursor
from sqlq.worker.lifecycle.stop import Bounds
from sqlq.worker.options import WorkerOptions
from sqlq.worker.settle.settle import Recovery
from sqlq.worker.threads.loop import OFTEN
from tests.kit import for_each

FIVE = decide.Claim(5)
LAST = decide.Claim(5, is_last=True)
FULL = decide.Turn(running=5, waiting=4)
DRAIN = {"drain": True}
SMALL = {"max_rss": 2_000_000}
IDLE = {"max_idle_ms": 100}
TEN = {"max_jobs": 10}


@pytest.mark.parametrize(
    ("event", "options", "action"),
    [
        # a turn: claim, or wait
        (decide.Turn(), {}, decide.Claim(5)),
        (decide.Turn(running=3), {}, decide.Claim(2)),
        (decide.Turn(running=5), {}, decide.AwaitRoom(0)),
        (FULL, {}, decide.AwaitRoom(2)),
        (decide.Turn(can_settle=False), {}, decide.Act.AWAIT_SETTLING),
        (decide.Turn(paused=True), {}, decide.Act.PAUSE),
        (decide.Turn(paused=True), DRAIN, decide.Act.PAUSE),
        # a process that has grown is replaced, though it is paused
        (
            decide.Turn(resident=3_000_000, paused=True),
            SMALL,
            decide.Retire("it has 3 MB in use, more than 2 MB"),
        ),
        (decide.Turn(resident=2_000_000), SMALL, decide.Claim(5)),
        (decide.Turn(resident=3_000_000), {}, decide.Claim(5)),
        # one for which nothing comes is not
        (decide.Turn(idle_ms=100), IDLE, decide.Retire("nothing has come for long", replace=False)),
        (decide.Turn(idle_ms=99), IDLE, decide.Claim(5)),
        (decide.Turn(idle_ms=1e9), {}, decide.Claim(5)),
        # the number of its jobs
        (decide.Turn(claimed=8), TEN, decide.Claim(2)),
        (decide.Turn(claimed=10, running=5), TEN, decide.Retire("it has had its number of jobs")),
        (decide.Turn(claimed=10, running=5, waiting=1), TEN, decide.AwaitRoom(0)),
        (decide.Turn(claimed=10, can_settle=False), TEN, decide.Retire("it has had its number of jobs")),
        # an answered claim
        (decide.Claimed(FIVE, 5), {}, decide.Act.REPORT_MORE),
        (decide.Claimed(FIVE, 4), {}, decide.Act.AWAIT_WORK),
        (decide.Claimed(FIVE, 0, was_idle=True), {}, decide.Act.AWAIT_WORK),
        # a drain ends when a claim after all that frees jobs has found nothing
        (decide.Claimed(FIVE, 5), DRAIN, decide.Act.REPORT_MORE),
        (decide.Claimed(FIVE, 0), DRAIN, decide.Act.AWAIT_WORK),
        (decide.Claimed(FIVE, 0, was_idle=True), DRAIN, LAST),
        (decide.Claimed(LAST, 1, was_idle=True), DRAIN, decide.Act.AWAIT_WORK),
        (decide.Claimed(LAST, 0), DRAIN, decide.Act.AWAIT_WORK),
        (decide.Claimed(LAST, 0, was_idle=True), DRAIN, decide.Retire("nothing is available", replace=False)),
    ],
)
def test_the_loop_does_what_follows_an_event(
    event: decide.Event, options: dict[str, Any], action: decide.Action
) -> None:
    assert decide.decide(WorkerOptions(concurrency=5, **options), event) == action


@for_each(
    ("turn", "options", "size"),
    [
        (decide.Turn(ahead=100), {}, 105),
        (decide.Turn(ahead=100, max_claim=3), {}, 3),
        (decide.Turn(running=5, ahead=100), {}, 100),
        (decide.Turn(running=5, waiting=50, ahead=100), {}, 50),
        (decide.Turn(running=5, waiting=51, ahead=100), {}, 0),
        (decide.Turn(running=4, waiting=51, ahead=100), {}, 50),
        (decide.Turn(running=6), {}, 0),
        (decide.Turn(running=3, waiting=2), {}, 0),
        # jobs that wait for subprocesses hold back a drain alone
        (decide.Turn(running=3, waiting=2, passes=True), {}, 2),
        (decide.Turn(running=3, waiting=2, passes=True), DRAIN, 0),
        (decide.Turn(running=5, waiting=9, passes=True), {}, 0),
        (decide.Turn(ahead=100, claimed=7), TEN, 3),
    ],
)
def test_a_claim_fills_the_slots_and_what_starts_soon(
    turn: decide.Turn, options: dict[str, Any], size: int
) -> None:
    assert decide.claim_size(WorkerOptions(concurrency=5, **options), turn) == size


A, B = (1, 1), (2, 1)


@for_each(
    ("renewed", "last", "begun", "ended", "unknown", "lost"),
    [
        ({B}, {}, 1, 1, {}, set()),  # it holds the job
        ({A, B}, {}, 1, 1, {A: 1}, set()),  # it sees this one for the first time
        ({A, B}, {A: 1}, 1, 1, {A: 1}, {A}),  # no claim under way can bring it
        ({A, B}, {A: 2}, 2, 1, {A: 2}, set()),  # the claim that has it is under way
        ({A, B}, {A: 1}, 2, 1, {A: 1}, {A}),  # a later one is
        ({B}, {A: 1}, 1, 1, {}, set()),  # it has ended
    ],
)
def test_a_job_is_lost_when_no_claim_under_way_can_bring_it(
    renewed: set[Any], last: dict[Any, int], begun: int, ended: int, unknown: dict[Any, int], lost: set[Any]
) -> None:
    renewal = decide.compare_renewal(renewed, {B}, last, begun, ended)
    assert renewal == (unknown, lost)


AWAY = {"is_away": True, "passes": True}
PASSES = {"is_away": False, "passes": True}
REFUSED = {"is_away": False, "passes": False}


@for_each(
    ("recovery", "error", "failures"),
    [
        (Recovery(), PASSES, 1),
        (Recovery(), REFUSED, OFTEN),
        (Recovery(), AWAY, 0),
        # an outage counts for nothing, and a refusal after a rollback is a refusal all the same
        (Recovery(2), AWAY, 2),
        (Recovery(2), REFUSED, OFTEN),
        (Recovery(2), PASSES, 3),
        (Recovery(2 * OFTEN), PASSES, 2 * OFTEN + 1),
    ],
)
def test_outcomes_are_written_in_parts_when_something_is_refused_or_fails_often(
    recovery: Recovery, error: dict[str, bool], failures: int
) -> None:
    assert recovery.after(**error) == Recovery(failures, in_doubt=True)


def test_no_time_is_idle_before_the_database_answers() -> None:
    bounds = Bounds(None)
    assert bounds.idle_ms() == 0.0
    bounds.note_poll()
    assert bounds.idle_ms() > 0.0
    bounds.cannot_look()
    assert bounds.idle_ms() == 0.0


# -- by its pace, and the time that claims take --------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock that claims go by."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claims, "monotonic", lambda: clock.now)
    return clock


def test_long_jobs_bound_the_pace_until_short_ones_end(clock: SimpleNamespace) -> None:
    pace = Pace(2)
    clock.now += 2.2
    assert pace.measure(0, 0.0) == 0
    clock.now += 0.1
    assert pace.measure(2, 4.4) == pytest.approx(2 / 2.2), "two that end together are no fast pace"
    seen, ended, busy_seconds = 0.0, 2, 4.4
    for _ in range(20):
        clock.now += 0.1
        ended, busy_seconds = ended + 50, busy_seconds + 0.1
        seen = pace.measure(ended, busy_seconds)
    assert seen == pytest.approx(500, rel=0.1)


def test_the_scan_starts_at_the_head_unless_that_was_slow_twice(clock: SimpleNamespace) -> None:
    cursor = ScanCursor()
    job = [ClaimedJob(7, 1, "a", "t", "{}", 1, 5)]
    cursor.note(job, 0.002)
    assert not cursor.positions(["a"]), "it was quick"
    cursor.note(job, 0.1)
    assert not cursor.positions(["a"]), "once may be a slow disk"
    cursor.note(job, 0.1)
    clock.now += 1.9
    assert cursor.positions(["a"])
    clock.now += 0.2
    assert not cursor.positions(["a"]), "a twentieth of the time"
    cursor.note(job, 60.0)
    clock.now += 4.9
    assert cursor.positions(["a"])
    clock.now += 0.2
    assert not cursor.positions(["a"]), "one that waited for a standby is no measure"
    cursor.note(job, 0.002)
    for _ in range(2):
        cursor.note(job * 1_000, 0.05)
    assert not cursor.positions(["a"]), "a large claim may take its time"
