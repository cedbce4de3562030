"""The supervisor's decisions: how many worker processes start, when, and when it gives up."""

from __future__ import annotations

from sqlq.worker.supervise.child import FAILED_STARTS, MAX_PAUSE_SECONDS, RestartPolicy, Stage
from tests.kit import for_each

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
def test_starts_that_fail_follow_ever_later_until_the_supervisor_gives_up(
    status: int, any_ready: bool
) -> None:
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
