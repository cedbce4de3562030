"""Turns by weights, of queues that a worker names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import sqlq
from sqlq.cli import work
from sqlq.errors import ConfigurationError
from sqlq.worker import options
from sqlq.worker.claim import Claimer, Frontier, Turns
from sqlq.worker.options import WorkerOptions, checked_weights
from tests.kit import for_each


def test_turns_follow_the_weights_and_are_evenly_mixed() -> None:
    each = Turns({"a": 5, "b": 1, "c": 1})
    assert "".join(each.take("abc", 7)) == "aabacaa"
    assert "".join(each.take("abc", 16)) == "aabacaa" * 2 + "aa"
    assert "".join(each.take("abc", 5)) == "bacaa"
    turns = Turns({"high": 3, "low": 1}).take(["high", "low"], 40)
    assert all(turns[i : i + 4].count("low") == 1 for i in range(0, 40, 4))


def test_single_turns_equal_those_of_a_batch() -> None:
    one, many = Turns({"a": 7, "b": 3, "c": 2}), Turns({"a": 7, "b": 3, "c": 2})
    assert [one.take("abc", 1)[0] for _ in range(40)] == many.take("abc", 40)


def test_queues_of_equal_weights_take_turns() -> None:
    each = Turns({"a": 1, "b": 1, "c": 1})
    assert "".join(each.take("abc", 7)) == "abcabca"


def test_a_queue_that_was_empty_gains_no_extra_turns() -> None:
    each = Turns({"high": 1, "low": 1})
    assert set(each.take(["low"], 1_000)) == {"low"}
    assert sorted(each.take(["high", "low"], 2)) == ["high", "low"]


@pytest.fixture
def weighted(app: sqlq.App) -> Callable[..., Any]:
    """Return what enqueues jobs into queues, and claims by their weights."""
    task = app.task(name="t")(lambda: None)
    claimer = Claimer(
        app.database, "me", WorkerOptions(("a", "b", "c"), 10, 60_000, weights={"a": 5, "b": 1, "c": 1})
    )

    def claim(limit: int, **new: int) -> str:
        for queue, number in new.items():
            app.enqueue_many([task.new().set(queue=queue) for _ in range(number)])
        return "".join(job.queue for job in claimer.claim(limit))

    return claim


def test_a_batch_mixes_queues_evenly(weighted: Callable[..., Any]) -> None:
    assert weighted(21, a=50, b=50, c=50) == "aabacaa" * 3
    assert weighted(3) == "aab"
    assert weighted(11) == "acaa" + "aabacaa", "the next batch goes on where the last one ended"


def test_the_turns_of_an_empty_queue_go_to_the_others_in_turn(weighted: Callable[..., Any]) -> None:
    first = weighted(12, b=20, c=20)
    assert Counter(first) == {"b": 6, "c": 6}
    assert max(first.count(queue * 3) for queue in "bc") == 0
    assert weighted(28) == "bc" * 14, "to the last job"
    assert weighted(5) == ""
    assert weighted(5, c=2) == "cc"


def test_a_queue_that_is_filled_again_has_its_share_at_once(weighted: Callable[..., Any]) -> None:
    weighted(10, b=60)
    assert Counter(weighted(14, a=50, c=50)) == {"a": 10, "b": 2, "c": 2}


@for_each("weight", [0, -1, 1_001, True, "3", 1.5, None])
def test_a_bad_weight_is_reported_in_one_sentence(weight: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"queues\['mail'\] is .*: a weight is a whole number from 1"
    ):
        checked_weights({"mail": weight})


@pytest.mark.parametrize("dear", [False, True])
def test_a_worker_serves_a_low_queue_beside_a_full_one(
    app: sqlq.App, dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whether claims go on where the last one ended does not depend on how busy the machine is
    monkeypatch.setattr(Frontier, "begins_anew", lambda self: not (dear and self._positions))
    ran: list[str] = []
    task = app.task(name="t")(ran.append)
    for queue in ("high", "low"):
        app.enqueue_many([task.new(queue).set(queue=queue) for _ in range(40)])
    worker = app.worker({"high": 3, "low": 1}, concurrency=1, max_jobs=16)

    def demand(running: int, waiting: int, *done: float, blocked: bool) -> int:
        return int(not running and not waiting)

    monkeypatch.setattr(worker._claimer, "demand", demand)
    worker.run()
    assert Counter(ran) == {"high": 12, "low": 4}


def test_the_order_of_queues_is_strict_without_weights(app: sqlq.App) -> None:
    ran: list[str] = []
    task = app.task(name="t")(ran.append)
    for queue in ("low", "high"):
        app.enqueue_many([task.new(queue).set(queue=queue) for _ in range(5)])
    app.worker(["high", "low"], concurrency=1, max_jobs=5).run()
    assert set(ran) == {"high"}


@for_each(
    ("given", "queues"),
    [
        ((), None),
        (("high,low",), ["high", "low"]),
        (("high=3", "low=1"), {"high": 3, "low": 1}),
        (("high=3, low",), {"high": 3, "low": 1}),
        (("a=b=2",), {"a=b": 2}),
    ],
)
def test_the_command_line_reads_queues_and_weights(given: tuple[str, ...], queues: Any) -> None:
    assert work._named_queues(given) == queues
    assert work.LARGEST_WEIGHT == options.LARGEST_WEIGHT


# -- queues without an order ---------------------------------------------------------------------------------


@pytest.fixture
def three_queues(app: sqlq.App) -> Callable[[int], list[str]]:
    """Return a function that claims so many jobs of three queues, and returns their queues.

    Their jobs were enqueued in turn as long as each queue had some.
    """
    task = app.task(name="t")(lambda: None)
    for many in ("abc", "abc", "ac", "ac", "a", "a", "a"):
        app.enqueue_many([task.new().set(queue=name) for name in many])
    claimer = Claimer(app.database, "me", WorkerOptions(None, 10, 60_000))
    return lambda limit: [job.queue for job in claimer.claim(limit)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_claim_takes_as_many_of_each_queue(three_queues: Callable[[int], list[str]]) -> None:
    """They lie together, and SQLite writes whole pages: from 100 queues that were filled in turn it drains
    half as many a second otherwise."""
    first = three_queues(6)
    assert Counter(first) == {"a": 2, "b": 2, "c": 2}
    assert sorted(first[:3]) == sorted(first[3:]) == ["a", "b", "c"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_full_queue_fills_the_turns_of_empty_ones(three_queues: Callable[[int], list[str]]) -> None:
    assert Counter(three_queues(12)) == {"a": 6, "b": 2, "c": 4}
    assert three_queues(12) == ["a"]
    assert three_queues(12) == []
