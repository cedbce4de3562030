"""Arguments and results of annotated types, end to end, and tasks that another process knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
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
import sqlq.testing
from sqlq.testing import assert_enqueued, assert_not_enqueued
from tests.kit import drain, execute, run_one

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


@pytest.fixture
def web(database_url: str) -> Iterator[sqlq.App]:
    """Another process's App on the same database, which has no tasks."""
    with closing(sqlq.App(database_url)) as app:
        yield app


@pytest.mark.parametrize(
    ("enqueued", "known", "says"),
    [
        (OrderWithNote(ID, AT, "gift"), Order, "it has the unknown field note"),
        (ORDER, OrderWithNote, "object missing required field note"),
        (ORDER, OrderOfOld, "it has the unknown field lines"),
    ],
)
def test_a_job_of_another_release_is_released_until_a_worker_takes_it(
    app: sqlq.App, database_url: str, engine: Engine, caplog: pytest.LogCaptureFixture,
    enqueued: Any, known: Any, says: str,
) -> None:  # fmt: skip
    got: list[Any] = []

    def takes(kind: Any) -> Callable[[Any], None]:
        def handler(order: Any) -> None:
            got.append(order)

        handler.__annotations__["order"] = kind
        return handler

    job = app.enqueue(app.task(name="t")(takes(type(enqueued))).new(enqueued))
    with closing(sqlq.App(database_url)) as other:
        other.task(name="t")(takes(known))
        assert drain(other).released == 1
    released = app.jobs.get(job.id)
    assert (released.attempts, released.releases) == (0, 1)
    assert says in caplog.text
    assert not got
    execute(engine, "UPDATE jobs SET available_at = created_at")
    assert drain(app).finished == 1
    assert got == [enqueued]


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
def test_a_result_is_stored_by_annotation(app: sqlq.App, annotation: Any, result: Any, stored: Any) -> None:
    def handler() -> Any:
        return result

    handler.__annotations__["return"] = annotation
    done = run_one(app, handler)
    assert (done.state, done.result, done.reason) == ("finished", stored, None)


def test_a_result_is_read_as_annotated(app: sqlq.App, web: sqlq.App, engine: Engine) -> None:
    @app.task(name="t")
    def place(order: Order) -> list[Order]:
        return [order]

    @app.task(name="completes")
    def completes(order: Order) -> Order:
        with Session(engine) as session, session.begin():
            sqlq.current_job().complete(session, order)
        return order

    @app.task(name="plain")
    async def plain() -> tuple[int, ...]:
        return (1, 2)

    placed, counted, completed = map(app.enqueue, (place.new(ORDER), plain.new(), completes.new(ORDER)))
    assert app.jobs.get(placed.id).payload == {"args": [ORDER_JSON]}
    with pytest.raises(sqlq.NoResultError, match=rf"^job {placed.id} is available and has no result$"):
        app.result(placed)
    assert drain(app).finished == 3
    assert app.result(placed) == app.result(placed.id) == [ORDER]
    assert app.result(counted) == (1, 2)
    assert app.jobs.get(completed.id).result == ORDER_JSON
    assert web.result(placed.id) == [ORDER_JSON], "the task is not known there"


def test_a_result_that_is_not_there_or_does_not_fit_is_refused_with_the_reason(app: sqlq.App) -> None:
    def other() -> UUID:
        return "text"  # type: ignore[return-value]

    dropped = app.enqueue(app.task(name="drops")(object).new())
    misfit = app.enqueue(app.task(name="other")(other).new())
    drain(app)
    for job, says in (
        (dropped, rf"^job {dropped.id} has finished, but its result is not JSON .*; null is stored$"),
        (misfit, rf"^the result of job {misfit.id} does not fit its annotation: invalid UUID: app.jobs.get"),
    ):
        with pytest.raises(sqlq.NoResultError, match=says):
            app.result(job)


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


def test_a_job_by_name_runs_with_the_options_of_its_task(app: sqlq.App, web: sqlq.App) -> None:
    """Where that is registered, it makes the job itself."""
    ran: list[Any] = []

    @app.task(name="shop.bill", max_attempts=2, backoff="0s", priority=2)
    def bill(id: UUID, lines: list[Line], *, at: datetime) -> None:
        ran.append((id, lines, at))
        raise ZeroDivisionError

    job = web.enqueue(web.named("shop.bill").new(ID, ORDER.lines, at=AT))
    assert (job.task, job.queue, job.state) == ("shop.bill", "default", "available")
    assert web.jobs.get(job.id).max_attempts is None
    assert drain(app).failed == 1
    assert ran == [(ID, ORDER.lines, AT)] * 2
    assert app.named("shop.bill").new(ID, ORDER.lines, at=AT) == bill.new(ID, ORDER.lines, at=AT)
    with pytest.raises(sqlq.errors.ArgumentsError, match="missing a required argument"):
        app.named("shop.bill").new()


def test_a_job_by_name_has_the_defaults_of_the_app_that_enqueues_it(app: sqlq.App, database_url: str) -> None:
    defaults = {"queue": "slow", "priority": 3, "headers": {"from": "web"}, "max_attempts": 9}
    queues = {"mail": {"priority": 5, "retention": "3h"}}
    with closing(sqlq.App(database_url, defaults=defaults, queues=queues)) as web:
        send = web.named("shop.send")
        named = web.jobs.get(web.enqueue(send.new()))
        mail = web.jobs.get(web.enqueue(send.new().set(queue="mail", headers={"id": 1})))
        after = app.task(name="shop.pay", on_success=send)(lambda: None)
        follows = web.jobs.get(app.enqueue(after.new())).on_success
        other = web.jobs.get(web.enqueue(after.new()))
    assert (named.queue, named.priority, named.headers) == ("slow", 3, {"from": "web"})
    assert named.max_attempts is None, "which the worker's task knows"
    assert (mail.queue, mail.priority, mail.retention_ms) == ("mail", 5, 3 * 3_600_000)
    assert mail.headers == {"from": "web", "id": 1}
    assert (follows["queue"], follows["priority"]) == ("slow", 3)
    assert (other.queue, other.priority, other.headers) == ("default", 0, {}), "of another App's own task"


def test_a_step_by_name_takes_the_results_of_others(app: sqlq.App, web: sqlq.App) -> None:
    ran: list[Any] = []

    @app.task(name="price")
    def price(item: str) -> Line:
        return Line(item, Decimal("24.50"))

    @app.task(name="bill")
    def bill(id: UUID, line: Line, *, others: list[Line]) -> None:
        ran.append((id, line, others))

    flow = sqlq.Flow()
    steps: list[Any] = [flow.add(web.named("price").new(item)) for item in ("pot", "cup")]
    flow.add(web.named("bill").new(ID, steps[0].result, others=[step.result for step in steps]))
    web.enqueue(flow)
    drain(app)
    pot, cup = (Line(item, Decimal("24.50")) for item in ("pot", "cup"))
    assert ran == [(ID, pot, [pot, cup])]


def test_a_handler_enqueues_through_its_jobs_app(app: sqlq.App) -> None:
    def enqueues() -> None:
        sqlq.current_job().app.enqueue(sqlq.current_job().app.named("other").new(1))

    app.enqueue(app.task(name="t")(enqueues).new())
    drain(app, max_jobs=1)
    assert [job.task for job in app.jobs.list(state="available")] == ["other"]
    found: list[object] = []
    with sqlq.testing.inline(app):
        app.enqueue(app.task(name="u")(lambda: found.append(sqlq.current_job().app)).new())
    assert found == [app]
