"""Arguments and results of annotated types, end to end, and tasks that another process knows by name."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
import sqlq.testing
from sqlq.errors import ArgumentsError
from sqlq.testing import assert_enqueued, assert_not_enqueued
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


# -- tasks by name -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Item:
    item: str
    price: Decimal
    due: date


class Size(enum.Enum):
    SMALL = "small"


MOMENT = datetime(2030, 1, 31, 8, tzinfo=UTC)


@pytest.fixture
def web(database_url: str) -> Iterator[sqlq.App]:
    """Another process's App on the same database, which has no tasks."""
    with closing(sqlq.App(database_url)) as app:
        yield app


def test_a_job_by_name_runs_with_the_options_of_its_task(app: sqlq.App, web: sqlq.App) -> None:
    ran: list[Any] = []

    @app.task(name="shop.bill", max_attempts=2, backoff="0s")
    def bill(
        id: UUID, lines: list[Item], *, at: datetime, size: Size, wait: timedelta, path: PurePosixPath
    ) -> None:
        ran.append((id, lines, at, size, wait, path))
        raise ZeroDivisionError

    lines = [Item("teapot", Decimal("24.50"), date(2030, 1, 31))]
    new = web.named("shop.bill").new(
        ID, lines, at=MOMENT, size=Size.SMALL, wait=timedelta(minutes=1), path=PurePosixPath("/a")
    )
    job = web.enqueue(new)
    assert (job.task, job.queue, job.state) == ("shop.bill", "default", "available")
    assert web.jobs.get(job.id).max_attempts is None
    app.worker(drain=True).run()
    assert ran == [(ID, lines, MOMENT, Size.SMALL, timedelta(minutes=1), PurePosixPath("/a"))] * 2
    assert (app.jobs.get(job.id).state, app.jobs.get(job.id).attempts) == ("failed", 2)


def test_a_task_that_is_registered_makes_its_jobs_itself(app: sqlq.App) -> None:
    @app.task(name="shop.send", queue="mail", max_attempts=3, timeout="1m", priority=2)
    def send(order_id: int) -> None: ...

    assert app.named("shop.send").new(7) == send.new(7)
    with pytest.raises(sqlq.errors.ArgumentsError, match="missing a required argument"):
        app.named("shop.send").new()


class Opaque:
    def __repr__(self) -> str:
        return "Opaque()"


LOOP: list[Any] = []
LOOP.append(LOOP)
ROUND = dataclasses.make_dataclass("Round", ["inside"])(None)
ROUND.inside = [ROUND]
MANY: list[Any] = []
for _ in range(60):
    MANY = [MANY, MANY]


def test_a_value_without_a_json_form_is_refused_by_its_path(web: sqlq.App) -> None:
    for value, says in (
        (Opaque(), "t: args[0] is Opaque() of type Opaque, which is not JSON: pass an id, or build it"),
        ({"a": [Opaque()]}, "t: args[0]['a'][0] is Opaque() of type Opaque, which is not JSON"),
        ({1: 2}, "t: args[0] has the key 1, but JSON's keys are text"),
        (float("nan"), "t: args[0] is nan, which JSON does not have"),
        ("a\0b", "t: args[0] holds a NUL"),
        (LOOP, "is nested deeper than 100 levels, or contains itself"),
        (ROUND, "t: args[0] is nested too deep, or contains itself"),
        (MANY, "and what comes before it take more than the 1,048,576 bytes allowed"),
        ([dataclasses.make_dataclass("D", ["x"])(Opaque())], "t: args[0][0]"),
    ):
        with pytest.raises(sqlq.errors.ArgumentsError, match=re.escape(says)):
            web.named("t").new(value)


def test_a_job_by_name_has_the_defaults_of_the_app_that_enqueues_it(app: sqlq.App, database_url: str) -> None:
    defaults = {
        "queue": "slow",
        "priority": 3,
        "headers": {"from": "web"},
        "max_attempts": 9,
        "timeout": "1m",
    }
    defaults |= {"retention": "2h", "start_within": "1d"}
    queues = {"mail": {"priority": 5, "retention": "3h"}}
    with closing(sqlq.App(database_url, defaults=defaults, queues=queues)) as web:
        send = web.named("shop.send")
        named = web.jobs.get(web.enqueue(send.new()))
        mail = web.jobs.get(web.enqueue(send.new().set(queue="mail", headers={"id": 1})))
        own = web.jobs.get(web.enqueue(send.new().set(priority=1, retention="1h")))
        after = app.task(name="shop.pay", on_success=send)(lambda: None)
        follows = web.jobs.get(app.enqueue(after.new())).on_success
        other = web.jobs.get(web.enqueue(after.new()))
    hour = 3_600_000
    assert (named.queue, named.priority, named.retention_ms) == ("slow", 3, 2 * hour)
    assert named.headers == {"from": "web"}
    assert named.start_by is not None
    assert (named.max_attempts, named.timeout_ms) == (None, None), "which the worker's task knows"
    assert (mail.queue, mail.priority, mail.retention_ms) == ("mail", 5, 3 * hour)
    assert mail.headers == {"from": "web", "id": 1}
    assert (own.priority, own.retention_ms) == (1, hour)
    assert (follows["queue"], follows["priority"]) == ("slow", 3)
    assert (other.queue, other.priority, other.headers) == ("default", 0, {}), "of another App's own task"


def test_a_step_by_name_takes_the_results_of_others(app: sqlq.App, web: sqlq.App) -> None:
    ran: list[Any] = []

    @app.task(name="price")
    def price(item: str) -> Item:
        return Item(item, Decimal("24.50"), MOMENT.date())

    @app.task(name="bill")
    def bill(id: UUID, line: Item, *, others: list[Item]) -> None:
        ran.append((id, line, others))

    flow = sqlq.Flow()
    steps: list[Any] = [flow.add(web.named("price").new(item)) for item in ("pot", "cup")]
    flow.add(web.named("bill").new(ID, steps[0].result, others=[step.result for step in steps]))
    web.enqueue(flow)
    sqlq.testing.drain(app)
    pot, cup = (Item(item, Decimal("24.50"), MOMENT.date()) for item in ("pot", "cup"))
    assert ran == [(ID, pot, [pot, cup])]


def test_a_name_that_cannot_be_one_is_refused(web: sqlq.App) -> None:
    with pytest.raises(sqlq.EnqueueError, match="the task's name is '': it must be text"):
        web.named("")


def test_a_handler_enqueues_through_its_jobs_app(app: sqlq.App) -> None:
    @app.task(name="t")
    def first() -> None:
        sqlq.current_job().app.enqueue(sqlq.current_job().app.named("other").new(1))

    app.enqueue(first.new())
    app.worker(drain=True, max_jobs=1).run()
    assert [job.task for job in app.jobs.list(state="available")] == ["other"]
    found: list[object] = []
    app.task(name="u")(lambda: found.append(sqlq.current_job().app))
    with sqlq.testing.inline(app):
        app.enqueue(app.tasks["u"].new())
    assert found == [app]
