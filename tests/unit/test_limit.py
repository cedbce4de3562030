"""Limits as they are declared: their keys, their descriptions, and their errors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import sqlq
from sqlq.errors import ArgumentsError
from sqlq.model.checks import Rule
from sqlq.model.limit import Limit, Serial, checked_rate
from sqlq.model.task import new_from_json
from sqlq.store.limits.grant import Grant
from tests.kit import for_each


@pytest.fixture
def app() -> sqlq.App:
    return sqlq.App("sqlite:///nowhere.db")


def test_a_key_is_the_same_for_positional_and_keyword_arguments(app: sqlq.App) -> None:
    @app.task(name="bill", limit=Limit("{region}:{customer}", running=1))
    def bill(customer: uuid.UUID, region: str = "eu") -> None: ...

    id = uuid.UUID(int=7)
    assert app.task(name="a", limit=Limit("{{a}}", running=1))(lambda: None).new().limit_key == "{a}"
    for job in (bill.new(id), bill.new(customer=id), bill.new(id, "eu"), bill.new(id, region="eu")):
        assert job.limit_key == f"eu:{id}"
    assert new_from_json(bill, [str(id), "us"]).limit_key == f"us:{id}"


def test_a_key_may_be_an_item_of_an_argument_or_what_a_function_returns(app: sqlq.App) -> None:
    def tenth(customer: Any, **more: Any) -> str:
        return None if customer is None else f"c{customer % 10}"  # type: ignore[return-value]

    @app.task(name="bill", limit=Limit("{order[customer]}", running=1))
    def bill(order: dict[str, Any], **more: Any) -> None: ...

    @app.task(name="remind", limit=Limit(tenth, running=1))
    def remind(customer: Any, note: str = "") -> None: ...

    assert bill.new({"customer": 7}).limit_key == "7"
    assert remind.new(27, note="x").limit_key == "c7"
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: bill.new({}), "the key of its limit cannot be made from"),
        (lambda: remind.new(None), "remind: the key of its limit is None"),
        (lambda: bill.new({"customer": "x" * 300}), "the key of its limit has 300 characters: at most 255"),
    ]
    for wrong, says in refused:
        with pytest.raises(ArgumentsError, match=says):
            wrong()


@dataclass
class Order:
    customer: int | None


@pytest.mark.parametrize("limit", [Limit("k{x}", running=1), Serial("k{x}")])
def test_none_makes_no_key(app: sqlq.App, limit: Any) -> None:
    """All jobs without a customer would wait in one line, and nobody would know."""

    @app.task(name="plain", limit=limit)
    def plain(x: int | None = None) -> None: ...

    @app.task(name="inner", limit=Serial("k{order.customer!r:>5}"))
    def inner(order: Order) -> None: ...

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: plain.new(None), "x"),
        (plain.new, "x"),
        (lambda: plain.new(x=None), "x"),
        (lambda: inner.new(Order(None)), "order.customer"),
    ]
    for wrong, name in refused:
        with pytest.raises(ArgumentsError, match=f"the key of its limit cannot be made .*{name} is None"):
            wrong()
    assert plain.new(0).limit_key == "k0"
    assert inner.new(Order(7)).limit_key == "k    7"


@for_each(
    ("key", "named"),
    [
        ("c:{client}", "'client', and its parameters are customer"),
        ("c:{}", "'{}', and its parameters are customer"),
        ("c:{0}", "'0'"),
        ("c:{customer:{width}}", "'width'"),
    ],
)
def test_a_template_that_names_no_parameter_is_refused(app: sqlq.App, key: str, named: str) -> None:
    sentence = f"^bill: the key '{re.escape(key)}' of its limit names {named}"
    with pytest.raises(sqlq.errors.ConfigurationError, match=sentence):

        @app.task(name="bill", limit=Limit(key, running=1))
        def bill(customer: int) -> None: ...


def test_two_limits_of_one_key_that_differ_are_refused(app: sqlq.App) -> None:
    first = app.limit("stripe", running=5)
    assert app.limit("stripe", running=5) == first
    with pytest.raises(sqlq.errors.ConfigurationError, match="two limits of the key 'stripe' differ"):
        app.limit("stripe", running=6)
    with pytest.raises(sqlq.errors.ConfigurationError, match="two limits of the key 'stripe' differ"):

        @app.task(name="call", limit=Serial("stripe"))
        def call() -> None: ...


def test_a_name_that_nobody_has_declared_is_refused(app: sqlq.App) -> None:
    app.limit("api", running=5)
    with pytest.raises(sqlq.errors.ConfigurationError, match=r"limit is 'aip'.*declared are api"):

        @app.task(name="call", limit="aip")
        def call() -> None: ...


@for_each(
    ("text", "rate"),
    [
        ("100/1m", (100, 60_000)),
        ("3/s", (3, 1_000)),
        ("1000 / 2h30m", (1_000, 9_000_000)),
        ("1/d", (1, 86_400_000)),
    ],
)
def test_rates(text: str, rate: tuple[int, int]) -> None:
    assert checked_rate(text) == rate


# -- rates ---------------------------------------------------------------------------------------------------


MOMENT, MS = datetime(2030, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)


@for_each(("rate", "period_ms"), [(100, 60_000), (7, 1_000), (3_000, 1_000), (1, 250)])
def test_starts_are_never_closer_than_the_rate(rate: int, period_ms: int) -> None:
    """Lot after lot, as wakes come: any window of one period has at most `rate` starts."""
    starts: list[datetime] = []
    moment, next_free_at = MOMENT, None
    for _ in range(200):
        lot = Grant("api", Rule(rate=rate, period_ms=period_ms), moment, next_free_at, 1000, moment)
        lot.ids = list(range(lot.number))
        starts += [start for _, start in lot.starts() if start]
        next_free_at = lot.start(lot.number)
        (again,) = (wake.moment for wake in lot.again())
        assert again is not None
        moment = max(again, moment)
    period = timedelta(milliseconds=period_ms)
    assert starts == sorted(starts)
    for first, later in zip(starts, starts[rate:], strict=False):
        assert later - first >= period
    closed = Grant("api", Rule(rate=rate, period_ms=period_ms), MOMENT, None, 1000, MOMENT + 200 * MS)
    assert (closed.number, closed.start(0)) == (0, MOMENT + 200 * MS), "a closed key opens at its rate"
    # and not much slower either: what is lost is less than a millisecond for each lot
    slowest = period * (len(starts) / rate) + MS * 200
    assert starts[-1] - starts[0] <= slowest
