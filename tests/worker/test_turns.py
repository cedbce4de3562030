"""Turns by weights, of queues that a worker names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import sqlq
from sqlq.cli import work
from sqlq.errors import ConfigurationError
from sqlq.worker import turns
from sqlq.worker.claim import Frontier
from sqlq.worker.turns import Turns, checked_weights


def test_queues_come_first_as_often_as_their_weights_say_and_evenly_mixed() -> None:
    each = Turns({"high": 3, "low": 1})
    firsts = [each.order(["high", "low"])[0] for _ in range(40)]
    assert Counter(firsts) == {"high": 30, "low": 10}
    assert all(firsts[i : i + 4].count("low") == 1 for i in range(0, 40, 4))


def test_of_equal_weights_each_has_its_turn_and_the_others_follow() -> None:
    each = Turns({"a": 1, "b": 1, "c": 1})
    orders = [each.order(["a", "b", "c"]) for _ in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_who_was_empty_for_long_has_saved_nothing_up() -> None:
    each = Turns({"high": 1, "low": 1})
    for _ in range(1_000):
        assert each.order(["low"]) == ["low"]
    assert {each.order(["high", "low"])[0] for _ in range(2)} == {"high", "low"}
    assert each.order([]) == []


@pytest.mark.parametrize("weight", [0, -1, 1_001, True, "3", 1.5, None])
def test_what_is_no_weight_is_one_sentence(weight: Any) -> None:
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

    def demand(running: int, waiting: int, ended: int, *, blocked: bool) -> int:
        return int(not running and not waiting)

    monkeypatch.setattr(worker._claimer, "demand", demand)
    worker.run()
    assert Counter(ran) == {"high": 12, "low": 4}


def test_without_weights_the_order_is_strict(app: sqlq.App) -> None:
    ran: list[str] = []
    task = app.task(name="t")(ran.append)
    for queue in ("low", "high"):
        app.enqueue_many([task.new(queue).set(queue=queue) for _ in range(5)])
    app.worker(["high", "low"], concurrency=1, max_jobs=5).run()
    assert set(ran) == {"high"}


@pytest.mark.parametrize(
    ("given", "queues"),
    [
        ((), None),
        (("high,low",), ["high", "low"]),
        (("high=3", "low=1"), {"high": 3, "low": 1}),
        (("high=3, low",), {"high": 3, "low": 1}),
        (("a=b=2",), {"a=b": 2}),
    ],
)
def test_how_queues_are_named(given: tuple[str, ...], queues: Any) -> None:
    assert work._named_queues(given) == queues
    assert work.LARGEST_WEIGHT == turns.LARGEST_WEIGHT
