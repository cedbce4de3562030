"""Keys of limits that nobody uses any more: they are forgotten, and nothing that is still to happen goes by
another rule for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.checks import Rule
from sqlq.store.blockers import UNUSED_MS
from sqlq.store.limits import admit
from sqlq.worker.maintain import services
from sqlq.worker.maintain.services import Sweep
from tests.kit import claim, execute, needs
from tests.kit.hand import blocked

pytestmark = pytest.mark.each_database

KEY = "stripe"


def call(app: sqlq.App, **limit: Any) -> sqlq.Task[..., Any]:
    return app.task(name="call", max_attempts=1, limit=sqlq.Limit(KEY, **limit or {"running": 2}))(
        lambda: None
    )


def drain(app: sqlq.App) -> None:
    app.worker(drain=True, concurrency=2).run()


def unuse(engine: Engine, days: float = 31) -> None:
    """Have all keys been used so long ago."""
    ago = {
        "postgresql": f"now() - interval '{days} days'",
        "mariadb": f"utc_timestamp(6) - INTERVAL {int(days * 24 * 3_600)} SECOND",
        "sqlite": f"used_at - {int(days * 24 * 3_600_000)}",
    }
    execute(engine, f"UPDATE sqlq_limits SET used_at = {ago[engine.dialect.name]}")


def forget(app: sqlq.App) -> int:
    with app.database.begin() as conn:
        return admit.forget_unused(conn, unused_ms=UNUSED_MS, limit=1_000)


def known(app: sqlq.App) -> list[str]:
    with app.database.read() as conn:
        return [each.key for each in admit.listing(conn, "", 100)]


def test_a_key_unused_for_a_month_is_deleted(app: sqlq.App, engine: Engine) -> None:
    app.enqueue(call(app).new())
    drain(app)
    assert known(app) == [KEY]
    assert forget(app) == 0, "it was used lately"
    unuse(engine, days=29)
    assert forget(app) == 0, "within the month"
    unuse(engine)
    Sweep(app.database).run()
    assert known(app) == []


def test_a_sweep_that_found_a_whole_batch_goes_on_at_once(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "PRUNE_BATCH", 1)
    for key in ("a", "b"):
        app.enqueue(app.task(name=key, limit=sqlq.Limit(key, running=1))(lambda: None).new())
    drain(app)
    unuse(engine)
    sweep = Sweep(app.database)
    assert max(sweep.run(), sweep.run()) < 60
    assert known(app) == []
    assert sweep.run() > 60


def test_the_next_job_stores_a_deleted_key_again(app: sqlq.App, engine: Engine) -> None:
    task = call(app, running=3)
    app.enqueue(task.new())
    drain(app)
    unuse(engine)
    assert forget(app) == 1
    app.enqueue_many([task.new() for _ in range(5)])
    assert admit.look(app.database).number == 3
    assert blocked(app) == 2


def in_line(app: sqlq.App) -> None:
    task = call(app, running=1)
    app.enqueue_many([task.new() for _ in range(2)])
    admit.look(app.database)
    app.jobs.cancel([1])


def holding_a_slot(app: sqlq.App) -> None:
    app.enqueue(call(app).new())
    admit.look(app.database)
    claim(app)


def failed(app: sqlq.App) -> None:
    @app.task(name="call", max_attempts=1, limit=sqlq.Limit(KEY, running=2))
    def fails() -> None:
        raise ValueError("no")

    app.enqueue(fails.new())
    drain(app)
    assert app.jobs.get(1).state == "failed"


def a_step_that_waits(app: sqlq.App) -> None:
    @app.task(name="first")
    def first() -> None: ...

    task = call(app)
    app.enqueue(task.new())  # so that the key is known
    drain(app)
    flow = sqlq.Flow()
    flow.add(task.new(), after=[flow.add(first.new())])
    app.enqueue(flow)


def set_by_an_operator(app: sqlq.App) -> None:
    with app.database.begin() as conn:
        admit.pin(conn, KEY, Rule(2))


def at_a_slow_rate(app: sqlq.App) -> None:
    app.enqueue(call(app, rate="1/60d").new())
    drain(app)
    assert app.jobs.get(1).state == "finished"


@pytest.mark.parametrize(
    "use", [in_line, holding_a_slot, failed, a_step_that_waits, set_by_an_operator, at_a_slow_rate]
)
def test_a_key_that_is_still_needed_is_kept(
    app: sqlq.App, engine: Engine, use: Callable[[sqlq.App], None]
) -> None:
    use(app)
    unuse(engine)
    assert forget(app) == 0
    assert known(app) == [KEY]


def test_an_admission_counts_as_use_of_its_key(app: sqlq.App, engine: Engine) -> None:
    task = call(app)
    app.enqueue(task.new())
    drain(app)
    unuse(engine)
    app.enqueue(task.new())
    drain(app)
    assert forget(app) == 0


def test_an_operators_limit_for_a_deleted_key_counts(app: sqlq.App, engine: Engine) -> None:
    task = call(app, running=3)
    app.enqueue(task.new())
    drain(app)
    unuse(engine)
    assert forget(app) == 1
    set_by_an_operator(app)
    app.enqueue_many([task.new() for _ in range(5)])
    assert admit.look(app.database).number == 2


@needs("listen")
def test_a_wake_keeps_its_limit_when_the_key_is_deleted_meanwhile(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is deleted between the look that finds it and its lock. The wake is taken, and has the only
    copy of the limit."""
    task = call(app, running=3)
    app.enqueue(task.new())
    drain(app)
    unuse(engine)
    add = admit._add
    forgotten: list[int] = []

    def adds(*asked: Any) -> None:
        add(*asked)
        if not forgotten:
            with engine.begin() as other:
                forgotten.append(other.execute(text("DELETE FROM sqlq_limits")).rowcount)

    monkeypatch.setattr(admit, "_add", adds)
    app.enqueue_many([task.new() for _ in range(5)])
    first = admit.look(app.database)
    assert (first.number, first.has_more, forgotten) == (0, True, [1])
    assert admit.look(app.database).number == 3


@needs("sessions")
def test_the_deletion_of_keys_waits_for_no_lock(app: sqlq.App, engine: Engine) -> None:
    """A sweep that waited could deadlock with admissions, which lock keys in their order."""
    for key in ("a", "b"):
        app.enqueue(app.task(name=key, limit=sqlq.Limit(key, running=1))(lambda: None).new())
    drain(app)
    unuse(engine)
    with ThreadPoolExecutor(1) as threads, engine.begin() as other:
        other.execute(text("SELECT 1 FROM sqlq_limits WHERE limit_key = 'a' FOR UPDATE"))
        assert threads.submit(forget, app).result(20) == 1
    assert known(app) == ["a"]
