"""Arguments and results of annotated types, end to end: enqueued, stored as JSON, run, and stored again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import ArgumentsError
from sqlq.testing import assert_enqueued, assert_not_enqueued, inline
from tests.kit import drain, execute, span

ID = UUID("0b5e6a2e-7f0c-4d5e-9d0e-6f1f6a1b2c3d")
AT = datetime(2030, 1, 31, 8, tzinfo=UTC)


@dataclass
class Line:
    sku: str
    price: Decimal


@dataclass
class Order:
    id: UUID
    placed_at: datetime
    lines: list[Line] = field(default_factory=list)


@dataclass
class OrderWithNote:
    """The `Order` of the next release."""

    id: UUID
    placed_at: datetime
    note: str
    lines: list[Line] = field(default_factory=list)


@dataclass
class OrderOfOld:
    """The `Order` of the release before."""

    id: UUID
    placed_at: datetime


ORDER = Order(ID, AT, [Line("tea", Decimal("3.50"))])
ORDER_JSON = {"id": str(ID), "placed_at": "2030-01-31T08:00:00Z", "lines": [{"sku": "tea", "price": "3.50"}]}


def insert(engine: Engine, *args: Any) -> None:
    execute(engine, "INSERT INTO jobs (task, payload) VALUES ('t', :p)", p=json.dumps({"args": args}))


def make_due(engine: Engine, *, unknown_for_a_day: bool = False) -> None:
    day = span(engine, 86_400)
    earlier = f", unknown_since = unknown_since - {day}" if unknown_for_a_day else ""
    execute(engine, f"UPDATE jobs SET available_at = created_at{earlier}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_handler_gets_and_returns_values_of_its_annotations(app: sqlq.App, asynchronous: bool) -> None:
    got: list[Any] = []

    def place(order: Order, *, by: UUID | None = None) -> Order:
        got.append((order, by))
        return order

    async def aplace(order: Order, *, by: UUID | None = None) -> Order:
        return place(order, by=by)

    task = app.task(name="t")(aplace if asynchronous else place)
    job = app.enqueue(task.new(ORDER, by=ID))
    assert app.jobs.get(job.id).payload == {"args": [ORDER_JSON], "kwargs": {"by": str(ID)}}
    assert drain(app).finished == 1
    assert got == [(ORDER, ID)]
    assert app.jobs.get(job.id).result == ORDER_JSON


def test_a_payload_inserted_by_sql_arrives_as_annotated(app: sqlq.App, engine: Engine) -> None:
    got: list[Any] = []

    @app.task(name="t")
    def place(order: Order) -> None:
        got.append(order)

    insert(engine, {"id": str(ID), "placed_at": "2030-01-31T08:00:00+00:00"})
    assert drain(app).finished == 1
    assert got == [Order(ID, AT)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_value_that_does_not_fit_fails_with_the_error_of_new(
    app: sqlq.App, engine: Engine, asynchronous: bool
) -> None:
    ran: list[Any] = []

    def place(order: Order) -> None:
        ran.append(order)

    async def aplace(order: Order) -> None:
        ran.append(order)

    task = app.task(name="t")(aplace if asynchronous else place)
    bad: Any = {"id": str(ID), "placed_at": "2030-01-31T08:00:00Z", "lines": [{"sku": "a", "price": "dear"}]}
    insert(engine, bad)
    behind = app.enqueue(task.new(ORDER))
    counts = drain(app)
    assert (counts.failed, counts.finished) == (1, 1)
    (failed,) = app.jobs.list(state="failed")
    assert (failed.reason, failed.attempts, failed.exception) == (
        "bad_payload",
        1,
        "sqlq.errors.ArgumentsError",
    )
    with pytest.raises(ArgumentsError) as refusal:
        task.new(bad)
    assert failed.message == str(refusal.value)
    assert "order.lines[0].price does not fit its annotation" in str(refusal.value)
    assert app.jobs.get(behind.id).state == "finished"
    assert ran == [ORDER]


@pytest.mark.parametrize(
    ("enqueues", "meets", "form", "says"),
    [
        (OrderWithNote(ID, AT, "gift"), Order, None, "it has the unknown field note"),
        (ORDER, OrderWithNote, None, "object missing required field note"),
        (ORDER, OrderOfOld, None, "it has the unknown field lines"),
    ],
)
def test_a_job_of_another_release_is_released_until_a_worker_takes_it(
    database_url: str,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    enqueues: Any,
    meets: Any,
    form: Any,
    says: str,
) -> None:
    mine, other = sqlq.App(database_url), sqlq.App(database_url)
    got: list[Any] = []

    def takes(kind: Any) -> Callable[[Any], None]:
        def handler(order: Any) -> None:
            got.append(order)

        handler.__annotations__["order"] = kind
        return handler

    job = mine.enqueue(mine.task(name="t")(takes(type(enqueues))).new(enqueues))
    other.task(name="t")(takes(meets))
    assert drain(other).released == 1
    released = other.jobs.get(job.id)
    assert (released.attempts, released.releases) == (0, 1)
    assert says in caplog.text
    assert not got
    make_due(engine)
    assert drain(mine).finished == 1
    assert got == [enqueues]
    mine.close()
    other.close()


def test_a_job_that_no_release_takes_fails_after_a_day(app: sqlq.App, engine: Engine) -> None:
    @app.task(name="t")
    def place(order: Order) -> None: ...

    insert(engine, {**ORDER_JSON, "note": "gift"})
    id = app.jobs.list()[0].id
    assert drain(app).released == 1
    make_due(engine, unknown_for_a_day=True)
    assert drain(app).failed == 1
    failed = app.jobs.get(id)
    assert (failed.reason, failed.exception) == ("bad_payload", "sqlq.errors.ArgumentsError")
    assert "t: order does not fit its annotation: it has the unknown field note" in str(failed.message)


def test_no_value_appears_in_the_logs(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "sqlq")

    @app.task(name="t")
    def place(order: Order) -> None: ...

    insert(engine, {"id": "s3cret"})
    insert(engine, {"id": str(ID), "placed_at": "s3cret"})
    insert(engine, {**ORDER_JSON, "lines": [{"sku": "s3cret", "price": "s3cret"}]})
    drain(app)
    assert len(caplog.records) >= 3
    assert "s3cret" not in caplog.text


# -- results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "result", "stored"),
    [
        (UUID, ID, str(ID)),
        ("UUID | None", ID, str(ID)),
        (list[Order], [ORDER], [ORDER_JSON]),
        (dict[str, Decimal], {"sum": Decimal("1.10")}, {"sum": "1.10"}),
        (set[int], {7}, [7]),
        # it is the handler that has finished: a result that is not as annotated is kept if it can be
        (UUID, "none", "none"),
        (UUID, None, None),
    ],
)
def test_a_result_is_stored_by_its_annotation(
    app: sqlq.App, annotation: Any, result: Any, stored: Any
) -> None:
    def handler() -> Any:
        return result

    handler.__annotations__["return"] = annotation
    job = app.enqueue(app.task(name="t")(handler).new())
    assert drain(app).finished == 1
    done = app.jobs.get(job.id)
    assert (done.result, done.reason) == (stored, None)


@pytest.mark.parametrize("annotation", [Any, dict, UUID])
def test_a_result_that_no_annotation_explains_is_null_with_a_note(app: sqlq.App, annotation: Any) -> None:
    def handler() -> Any:
        return {"by": ID if annotation is not UUID else object()}

    handler.__annotations__["return"] = annotation
    job = app.enqueue(app.task(name="t")(handler).new())
    assert drain(app).finished == 1
    done = app.jobs.get(job.id)
    assert (done.state, done.result) == ("finished", None)
    assert "its result is not JSON" in str(done.reason)


def test_a_result_is_read_as_annotated(app: sqlq.App, database_url: str) -> None:
    @app.task(name="t")
    def place(order: Order) -> list[Order]:
        return [order]

    @app.task(name="plain")
    async def plain() -> tuple[int, ...]:
        return (1, 2)

    @app.task(name="nothing")
    def nothing() -> UUID | None:
        return None

    placed, counted, none = (
        app.enqueue(place.new(ORDER)),
        app.enqueue(plain.new()),
        app.enqueue(nothing.new()),
    )
    with pytest.raises(sqlq.NoResultError, match=rf"^job {placed.id} is available and has no result$"):
        app.result(placed)
    assert drain(app).finished == 3
    assert app.result(placed) == [ORDER]
    assert app.result(placed.id) == [ORDER]
    assert app.result(counted) == (1, 2)
    assert app.result(none) is None
    elsewhere = sqlq.App(database_url)
    assert elsewhere.result(placed.id) == [ORDER_JSON], "the task is not known there"
    elsewhere.close()


def test_result_names_the_reason_why_there_is_none(app: sqlq.App) -> None:
    def fails() -> None:
        raise ValueError

    app.task(name="fails", max_attempts=1)(fails)
    app.task(name="cancels")(_cancels)
    app.task(name="drops")(_drops)
    app.task(name="other")(_returns_text)
    failed, cancelled, dropped, other = (
        app.enqueue(app.tasks[name].new()) for name in ("fails", "cancels", "drops", "other")
    )
    drain(app)
    for job, says in (
        (failed, rf"^job {failed.id} \(fails\) failed after 1 attempt: ValueError$"),
        (cancelled, rf"^job {cancelled.id} \(cancels\) was cancelled"),
        (dropped, rf"^job {dropped.id} has finished, but its result is not JSON .*; null is stored$"),
        (other, rf"^the result of job {other.id} does not fit its annotation: invalid UUID: app.jobs.get"),
    ):
        with pytest.raises(sqlq.NoResultError, match=says):
            app.result(job)
    with pytest.raises(sqlq.JobNotFoundError):
        app.result(4711)


def _cancels() -> None:
    raise sqlq.Cancel


def _drops() -> object:
    return object()


def _returns_text() -> UUID:
    return "text"  # type: ignore[return-value]


def test_complete_stores_its_result_as_annotated(app: sqlq.App, engine: Engine) -> None:
    @app.task(name="t")
    def place(order: Order) -> Order:
        with Session(engine) as session, session.begin():
            sqlq.current_job().complete(session, order)
        return order

    job = app.enqueue(place.new(ORDER))
    assert drain(app).finished == 1
    assert app.jobs.get(job.id).result == ORDER_JSON


# -- the test kit --------------------------------------------------------------------------------------------


def test_inline_handlers_get_their_arguments_by_way_of_json(app: sqlq.App) -> None:
    got: list[Order] = []

    @app.task(name="t")
    def place(order: Order) -> None:
        got.append(order)

    with inline(app) as ran:
        app.enqueue(place.new(ORDER))
    assert got == [ORDER]
    assert got[0] is not ORDER
    assert json.loads(ran.jobs[0].new.payload) == {"args": [ORDER_JSON]}


def test_assert_enqueued_compares_values_of_annotated_types(app: sqlq.App) -> None:
    @app.task(name="t")
    def place(order: Order, by: UUID | None = None) -> None: ...

    app.enqueue(place.new(ORDER, by=ID))
    found = assert_enqueued(place, args=[ORDER, ID], app=app)
    assert (found.args, found.kwargs) == ([ORDER], {"by": ID})
    assert_enqueued(place, args=[ORDER], kwargs={"by": str(ID)}, app=app)
    assert_enqueued(place, args=[Order(ID, ANY, ANY), ANY], app=app)
    assert_enqueued("t", args=[ORDER_JSON], kwargs={"by": str(ID)}, app=app)
    assert_not_enqueued(place, args=[ORDER], app=app)
    assert_not_enqueued(place, args=[Order(ID, AT), ID], app=app)
    with pytest.raises(AssertionError, match=r"not enqueued: t\(Order\(id=UUID\(.*\n  t\(Order\(id=UUID"):
        assert_enqueued(place, args=[Order(ID, AT), ID], app=app)


def test_assert_enqueued_shows_a_payload_of_another_release_as_it_is(app: sqlq.App, engine: Engine) -> None:
    @app.task(name="t")
    def place(order: Order) -> None: ...

    insert(engine, {"other": 1})
    assert assert_enqueued(place, app=app).args == [{"other": 1}]
    assert_not_enqueued(place, args=[ORDER], app=app)
