"""Jobs under a limit are enqueued like all others, by whatever session and driver: blocked, and with the wake
by which a worker finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.testing import tick
from tests.kit.callers import Caller, common_ways

pytestmark = pytest.mark.each_database

JOBS = "SELECT limit_key, blocked_by, due_at IS NOT NULL FROM jobs ORDER BY id"
WAKES = "SELECT limit_key, max_running, rate, period_ms, in_order, holds FROM sqlq_wakes ORDER BY id"
STRIPE = ("stripe", 5, 100, 60_000, False, False)


@pytest.fixture
def call(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="shop.call", queue="mail", limit=sqlq.Limit("stripe", running=5, rate="100/1m"))
    def call(order_id: int = 0) -> None: ...

    return call


def committed(engine: Engine, query: str) -> list[Any]:
    with engine.connect() as conn:
        return [tuple(row) for row in conn.execute(text(query))]


@common_ways
def test_limited_jobs_are_enqueued_as_blocked(
    app: sqlq.App, call: Any, watch: Engine, caller: Caller
) -> None:
    caller.begin()
    done = [
        caller.enqueue(app, call.new(1)),
        *caller.enqueue_many(app, [call.new(2).set(delay="1h"), call.new(3).set(limit=None)]),
        *caller.enqueue_many(app, [call.new(4).set(unique_key="k"), call.new(5), call.new(6)]),
    ]
    flow: Any = sqlq.chain(call.new(7), call.new(8))
    caller.enqueue(app, flow)
    assert committed(watch, WAKES) == []
    caller.commit()
    assert [str(job.state) for job in done] == [*["blocked"] * 2, "available", *["blocked"] * 3]
    limited, free, step = ("stripe", "limit", True), (None, None, False), ("stripe", "flow", False)
    assert sorted(committed(watch, JOBS), key=str) == sorted([*[limited] * 6, free, step], key=str)
    # the limit is stored at once; when the delayed job is due, its wake does not have it
    wakes = [*[STRIPE] * 4, ("stripe", None, None, None, False, False)]
    assert sorted(committed(watch, WAKES), key=str) == sorted(wakes, key=str)


def test_limited_jobs_without_a_session_are_blocked(app: sqlq.App, call: Any, watch: Engine) -> None:
    app.enqueue(call.new(1))
    asyncio.run(app.aenqueue_many([call.new(2), call.new(3)]))
    assert committed(watch, JOBS) == [("stripe", "limit", True)] * 3
    assert committed(watch, WAKES) == [STRIPE] * 2


def test_tasks_and_jobs_take_a_limit_by_its_name(app: sqlq.App, watch: Engine) -> None:
    app.limit("api", rate="3/s")

    @app.task(name="plain", limit="api")
    def plain() -> None: ...

    @app.task(name="free")
    def free() -> None: ...

    serial = sqlq.Serial("one", on_failure="hold")
    app.enqueue_many([plain.new(), free.new().set(limit="api"), free.new().set(limit=serial), free.new()])
    assert [row[0] for row in committed(watch, JOBS)] == ["api", "api", "one", None]
    wakes = [("api", None, 3, 1000, False, False), ("one", 1, None, None, True, True)]
    assert sorted(committed(watch, WAKES)) == wakes


def test_ordinary_jobs_leave_no_wake(app: sqlq.App, watch: Engine) -> None:
    @app.task(name="free")
    def free() -> None: ...

    app.enqueue_many([free.new(), free.new().set(delay="1h")])
    assert committed(watch, WAKES) == []


# -- what is refused -----------------------------------------------------------------------------------------


def test_statement_refuses_a_limited_job(app: sqlq.App, call: Any) -> None:
    with pytest.raises(sqlq.EnqueueError, match=r"takes a second statement.*enqueue it with app.enqueue"):
        app.statement(call.new(1))
    sql, _ = app.statement(call.new(1).set(limit=None))
    assert sql.startswith("INSERT")


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda job: job.set(limit="mail"), "no limit of that name is declared; write app.limit"),
    (lambda job: job.set(limit=5), r"limit is 5: give a limit, as in limit=sqlq.Limit"),
    (lambda job: job.set(limit=sqlq.Limit("a:{n}", running=1)), "is made from arguments"),
    (lambda job: job.set(limit=sqlq.Limit("stripe", running=7)), "differs from the one declared"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_a_wrong_limit_is_one_sentence_before_any_sql(
    app: sqlq.App, call: Any, watch: Engine, change: Callable[[Any], sqlq.NewJob], sentence: str
) -> None:
    with watch.connect() as conn:
        with pytest.raises(sqlq.EnqueueError, match=sentence):
            app.enqueue(change(call.new(1)), session=conn)
        app.enqueue(call.new(2), session=conn)  # the caller's transaction is as it was
        conn.commit()
    assert len(committed(watch, JOBS)) == 1


def test_a_name_without_any_limit_is_refused(app: sqlq.App) -> None:
    @app.task(name="free")
    def free() -> None: ...

    with pytest.raises(sqlq.EnqueueError, match="limit is 'api': no limit of that name"):
        app.enqueue(free.new().set(limit="api"))


def test_the_jobs_of_a_schedule_are_under_the_limit_of_their_task(
    app: sqlq.App, call: Any, watch: Engine
) -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    app.schedule("calls", call.new(7), cron="* * * * *")
    tick(app, noon, since=noon)
    (job,) = tick(app, noon + timedelta(minutes=1))
    assert str(job.state) == "blocked"
    assert committed(watch, JOBS) == [("stripe", "limit", True)]
    assert committed(watch, WAKES) == [STRIPE]


@pytest.mark.parametrize(
    "options", [{"on_conflict": "replace"}, {"on_conflict": "debounce", "max_wait": "1m"}]
)
def test_a_limited_job_refuses_replace_and_debounce(call: Any, options: dict[str, Any]) -> None:
    with pytest.raises(sqlq.EnqueueError, match="is not for a job under a limit"):
        call.new(1).set(unique_key="k", **options)


def test_a_job_without_a_limit_does_not_replace_a_limited_one(
    app: sqlq.App, call: Any, watch: Engine
) -> None:
    first = app.enqueue(call.new(1).set(unique_key="k"))
    free = call.new(2).set(limit=None, unique_key="k", on_conflict="replace")
    again = app.enqueue(free)
    assert (again.id, again.created, again.replaced, str(again.state)) == (first.id, False, False, "blocked")
    assert app.jobs.get(first.id).payload == {"args": [1]}
    assert committed(watch, JOBS) == [("stripe", "limit", True)]
