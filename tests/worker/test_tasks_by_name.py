"""Tasks by name: enqueued by a process that does not have their handlers, run by one that has."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest

import sqlq
import sqlq.testing


@dataclasses.dataclass
class Line:
    item: str
    price: Decimal
    due: date


class Size(enum.Enum):
    SMALL = "small"


ID = UUID("8c39a3bc-54ff-4c24-9b0e-4b3d7a6a7f2b")
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
        id: UUID, lines: list[Line], *, at: datetime, size: Size, wait: timedelta, path: PurePosixPath
    ) -> None:
        ran.append((id, lines, at, size, wait, path))
        raise ZeroDivisionError

    lines = [Line("teapot", Decimal("24.50"), date(2030, 1, 31))]
    new = web.named("shop.bill").new(
        ID, lines, at=MOMENT, size=Size.SMALL, wait=timedelta(minutes=1), path=PurePosixPath("/a")
    )
    job = web.enqueue(new)
    assert (job.task, job.queue, job.state) == ("shop.bill", "default", "available")
    assert web.jobs.get(job.id).max_attempts is None
    app.worker(drain=True).run()
    assert ran == [(ID, lines, MOMENT, Size.SMALL, timedelta(minutes=1), PurePosixPath("/a"))] * 2
    assert (app.jobs.get(job.id).state, app.jobs.get(job.id).attempts) == ("failed", 2)


def test_a_job_by_name_takes_options(app: sqlq.App, web: sqlq.App) -> None:
    task = web.named("shop.send")
    first = web.enqueue(task.new(7).set(queue="mail", priority=9, delay="1h", max_attempts=9, unique_key="k"))
    found = web.jobs.get(first.id)
    assert (found.queue, found.priority, found.max_attempts, found.unique_key) == ("mail", 9, 9, "k")
    assert found.state == "scheduled"
    again, other = web.enqueue_many([task.new(8).set(queue="mail", unique_key="k"), task.new(9)])
    assert (again.id, again.created, other.created) == (first.id, False, True)


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
    def price(item: str) -> Line:
        return Line(item, Decimal("24.50"), MOMENT.date())

    @app.task(name="bill")
    def bill(id: UUID, line: Line, *, others: list[Line]) -> None:
        ran.append((id, line, others))

    flow = sqlq.Flow()
    steps: list[Any] = [flow.add(web.named("price").new(item)) for item in ("pot", "cup")]
    flow.add(web.named("bill").new(ID, steps[0].result, others=[step.result for step in steps]))
    web.enqueue(flow)
    sqlq.testing.drain(app)
    pot, cup = (Line(item, Decimal("24.50"), MOMENT.date()) for item in ("pot", "cup"))
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
