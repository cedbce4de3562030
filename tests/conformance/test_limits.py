"""Jobs under a limit are enqueued blocked, with a wake by which a worker finds them. Unused keys go."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlq
from sqlq.model.checks import Rule
from sqlq.store.blockers import UNUSED_MS
from sqlq.store.limits import admit
from sqlq.worker.maintain.services import Sweep
from tests.kit import BOOM, blocked, claim, drain, end, execute, for_each, locked, needs, span
from tests.kit.callers import Caller, common_ways

pytestmark = pytest.mark.each_database

KEY = "stripe"


def limited(app: sqlq.App, key: str = KEY, **limit: Any) -> sqlq.Task[..., Any]:
    limit_of_key = sqlq.Limit(key, **limit or {"running": 2})
    return app.task(name=f"call {key}", max_attempts=1, limit=limit_of_key)(lambda: None)


def unuse(engine: Engine, days: float = 31) -> None:
    """Have all keys been used so long ago."""
    execute(engine, f"UPDATE sqlq_limits SET used_at = used_at - {span(engine, days * 86_400)}")


def forget(app: sqlq.App) -> int:
    return app.database.run(lambda conn: admit.forget_unused(conn, unused_ms=UNUSED_MS, limit=1_000))


def known(app: sqlq.App) -> list[str]:
    with app.database.read() as conn:
        return [each.key for each in admit.listing(conn, "", 100)]


def test_a_key_unused_for_a_month_is_deleted(app: sqlq.App, engine: Engine) -> None:
    task = limited(app)
    app.enqueue(task.new())
    drain(app)
    assert known(app) == [KEY]
    assert forget(app) == 0, "it was used lately"
    unuse(engine, days=29)
    assert forget(app) == 0, "within the month"
    unuse(engine)
    Sweep(app.database).run()
    assert known(app) == []
    for _ in range(2):
        unuse(engine)
        app.enqueue(task.new())
        drain(app)
    assert forget(app) == 0, "an admission is a use"


@pytest.mark.parametrize("pinned", [False, True])
def test_the_next_job_stores_a_deleted_key_again(app: sqlq.App, engine: Engine, pinned: bool) -> None:
    task = limited(app, running=3)
    app.enqueue(task.new())
    drain(app)
    unuse(engine)
    assert forget(app) == 1
    if pinned:
        set_by_an_operator(app)
    app.enqueue_many([task.new() for _ in range(5)])
    assert admit.look(app.database).number == (2 if pinned else 3)
    assert blocked(app) == (3 if pinned else 2)


def set_by_an_operator(app: sqlq.App) -> None:
    app.database.run(lambda conn: admit.pin(conn, KEY, Rule(2)))


NEEDED = "in_line holding_a_slot failed a_step_that_waits set_by_an_operator at_a_slow_rate closed"


@pytest.mark.parametrize("why", NEEDED.split())
def test_a_key_that_is_needed_is_kept(app: sqlq.App, engine: Engine, why: str) -> None:
    options: dict[str, Any] = {"in_line": {"running": 1}, "at_a_slow_rate": {"rate": "1/60d"}}
    task = limited(app, **options.get(why, {}))
    if why == "set_by_an_operator":
        set_by_an_operator(app)
    else:
        app.enqueue(task.new())
    match why:
        case "in_line":
            app.enqueue(task.new())
            admit.look(app.database)
            app.jobs.cancel([1])
        case "holding_a_slot":
            admit.look(app.database)
            claim(app)
        case "failed":
            admit.look(app.database)
            end(app, BOOM)
        case "a_step_that_waits":
            drain(app)
            app.enqueue(sqlq.chain(app.named("first").new(), task.new()))
        case "closed":
            drain(app)
            app.limits.close(KEY, until="60d")
        case "at_a_slow_rate":
            assert drain(app).finished == 1
    unuse(engine)
    assert forget(app) == 0
    assert known(app) == [KEY]


@needs("listen")
def test_a_wake_keeps_its_limit_when_the_key_is_deleted_meanwhile(app: sqlq.App, engine: Engine) -> None:
    """It is deleted between the look that finds it and its lock; the wake has the only copy of the limit."""
    task = limited(app, running=3)
    app.enqueue(task.new())
    drain(app)
    unuse(engine)
    app.enqueue_many([task.new() for _ in range(5)])
    forgotten: list[int] = []

    def forgets(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO public.sqlq_limits") and not forgotten:
            forgotten.append(execute(engine, "DELETE FROM sqlq_limits RETURNING 1"))

    event.listen(app.database.engine, "after_cursor_execute", forgets)
    first = admit.look(app.database)
    assert (first.number, first.has_more, forgotten) == (0, True, [1])
    assert admit.look(app.database).number == 3


@needs("sessions")
def test_the_deletion_of_keys_waits_for_no_lock(app: sqlq.App, engine: Engine) -> None:
    """A sweep that waited could deadlock with admissions, which lock keys in their order."""
    for key in ("a", "b"):
        app.enqueue(limited(app, key).new())
    drain(app)
    unuse(engine)
    a = "SELECT 1 FROM sqlq_limits WHERE limit_key = 'a' FOR UPDATE"
    with ThreadPoolExecutor(1) as threads, locked(engine, a):
        assert threads.submit(forget, app).result(20) == 1
    assert known(app) == ["a"]


JOBS = "SELECT limit_key, blocked_by, due_at IS NOT NULL FROM jobs ORDER BY id"
WAKES = "SELECT limit_key, max_running, rate, period_ms, in_order, holds FROM sqlq_wakes ORDER BY id"
STRIPE = ("stripe", 5, 100, 60_000, False, False)


@pytest.fixture
def call(app: sqlq.App) -> sqlq.Task[..., None]:
    limit = sqlq.Limit("stripe", running=5, rate="100/1m")
    return app.task(name="shop.call", queue="mail", limit=limit)(lambda order_id=0: None)


def committed(engine: Engine, query: str) -> list[Any]:
    with engine.connect() as conn:
        return [tuple(row) for row in conn.execute(text(query))]


@common_ways
def test_limited_jobs_are_enqueued_blocked(app: sqlq.App, call: Any, watch: Engine, caller: Caller) -> None:
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
    with pytest.raises(sqlq.EnqueueError, match=r"takes a second statement.*enqueue it with app.enqueue"):
        app.statement(call.new(1))
    assert app.statement(call.new(1).set(limit=None))[0].startswith("INSERT")
    first = app.enqueue(call.new(1).set(unique_key="k"))
    again = app.enqueue(call.new(2).set(limit=None, unique_key="k", on_conflict="replace"))
    assert (again.id, again.created, again.replaced, str(again.state)) == (first.id, False, False, "blocked")
    assert app.jobs.get(first.id).payload == {"args": [1]}
    assert committed(watch, JOBS) == [("stripe", "limit", True)] * 4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"limit": "mail"}, "no limit of that name is declared; write app.limit"),
    ({"limit": 5}, r"limit is 5: give a limit, as in limit=sqlq.Limit"),
    ({"limit": sqlq.Limit("a:{n}", running=1)}, "is made from arguments"),
    ({"limit": sqlq.Limit("stripe", running=7)}, "differs from the one declared"),
    ({"unique_key": "k", "on_conflict": "replace"}, "is not for a job under a limit"),
    ({"unique_key": "k", "on_conflict": "debounce", "max_wait": "1m"}, "is not for a job under a limit"),
]


@for_each(("options", "sentence"), WRONG)
def test_a_wrong_limit_is_one_sentence_before_any_sql(
    app: sqlq.App, call: Any, watch: Engine, options: dict[str, Any], sentence: str
) -> None:
    before = len(committed(watch, JOBS))
    with watch.connect() as conn:
        with pytest.raises(sqlq.EnqueueError, match=sentence):
            app.enqueue(call.new(1).set(**options), session=conn)
        app.enqueue(call.new(2), session=conn)  # the caller's transaction is as it was
        conn.commit()
    assert len(committed(watch, JOBS)) == before + 1
