"""Queues that a worker names in an order, with weights, or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import sqlq
from sqlq.cli.commands import work
from sqlq.errors import ConfigurationError
from sqlq.worker.claim import claimer as claim
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.kit import for_each, needs


def test_claims_order_queues_by_weight(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    weights = {"a": 5, "b": 1, "c": 1}
    claimer = Claimer(app.database, "me", WorkerOptions(("a", "b", "c"), 10, 60_000, weights=weights))
    assert claimer.claim(5) == []
    orders = Counter("".join(claimer._in_turn("abc")) for _ in range(7_000))
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert 4_700 < sum(number for order, number in orders.items() if order[0] == "a") < 5_300
    app.enqueue_many([task.new().set(queue=queue) for queue in "abc" for _ in range(2)])
    assert Counter(job.queue for job in claimer.claim(10)) == {"a": 2, "b": 2, "c": 2}


@for_each("weight", [0, -1, 1_001, True, "3", 1.5, None])
def test_a_bad_weight_is_reported_in_one_sentence(weight: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"queue 'mail': its weight is .*: it must be a whole number from 1 to 1,000"
    ):
        WorkerOptions.of({"mail": weight})


@pytest.mark.parametrize("dear", [False, True])
def test_a_worker_serves_a_low_queue_beside_a_full_one(
    app: sqlq.App, dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whether claims go on where the last one ended does not depend on how busy the machine is
    monkeypatch.setattr(claim, "DEAR_SECONDS", -1.0 if dear else 60.0)
    monkeypatch.setattr(claim, "DEAR_SECONDS_A_JOB", 0.0)
    monkeypatch.setattr(claim, "ANEW_ONCE_IN", 1e9)
    monkeypatch.setattr(claim, "MAX_REST_SECONDS", 1e9)
    ran: list[str] = []
    task = app.task(name="t")(ran.append)
    for queue in ("high", "low"):
        app.enqueue_many([task.new(queue).set(queue=queue) for _ in range(40)])
    worker = app.worker({"high": 1, "low": 1}, concurrency=1, max_jobs=32, ahead="0s")
    worker.run()
    assert min(Counter(ran)["high"], Counter(ran)["low"]) >= 5


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


@needs("file")
def test_a_claim_takes_as_many_of_each_queue(three_queues: Callable[[int], list[str]]) -> None:
    """They lie together, and SQLite writes whole pages: from 100 queues that were filled in turn it drains
    half as many a second otherwise."""
    first = three_queues(6)
    assert Counter(first) == {"a": 2, "b": 2, "c": 2}
    assert sorted(first[:3]) == sorted(first[3:]) == ["a", "b", "c"]


@needs("cheap")
def test_a_full_queue_fills_the_turns_of_empty_ones(three_queues: Callable[[int], list[str]]) -> None:
    assert Counter(three_queues(12)) == {"a": 6, "b": 2, "c": 4}
    assert three_queues(12) == ["a"]
    assert three_queues(12) == []
