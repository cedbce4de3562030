"""A role that writes rows without a key gets nothing signed, and feeds no signed step.

A worker with another key spoils nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.config.constants import MAX_RELEASES
from sqlq.config.durations import FAR
from sqlq.payload.encryption import HEAD, new_key
from sqlq.schema.types import milliseconds_since_epoch
from sqlq.store.jobs import settle
from tests.kit import claim_on, deaths, execute

KEY, OTHER = new_key(), new_key()
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def make(database_url: str) -> Iterator[Callable[..., sqlq.App]]:
    """Makes Apps on the same database."""
    made: list[sqlq.App] = []

    def app(**options: Any) -> sqlq.App:
        made.append(sqlq.App(database_url, **options))
        return made[-1]

    yield app
    for each in made:
        each.close()


def work(app: sqlq.App) -> Any:
    return app.worker(drain=True).run()


def _hear(ended: sqlq.JobOutcome) -> None: ...


def tasks_in(engine: Engine) -> list[str]:
    """Return the tasks of all jobs that are waiting or running."""
    with engine.connect() as conn:
        return list(conn.scalars(text("SELECT task FROM jobs ORDER BY id")))


def _moment(engine: Engine, moment: datetime) -> str:
    return {
        "sqlite": str(milliseconds_since_epoch(moment)),
        "postgresql": f"timestamptz '{moment}'",
        "mariadb": f"TIMESTAMP '{moment:%Y-%m-%d %H:%M:%S}'",
    }[engine.dialect.name]


# -- a key that is not here ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encryption", ["sign", "encrypt"])
@pytest.mark.parametrize("keys", [None, [OTHER]])
def test_a_job_is_released_when_its_key_is_not_here(
    make: Callable[..., sqlq.App],
    engine: Engine,
    keys: list[str] | None,
    encryption: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[Any] = []
    encrypting, without = make(keys=[KEY], encryption=encryption), make(keys=keys)
    for app in (encrypting, without):
        app.task(name="pay", max_attempts=1, on_failure=app.task(name="alarm")(_hear))(ran.append)
    encrypting.enqueue(encrypting.tasks["pay"].new(7))
    for _ in range(3):
        assert (work(without).released, without.jobs.list(state="failed")) == (1, [])
        execute(engine, "UPDATE jobs SET available_at = created_at")
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1, "one for each task, reason and minute"
    assert all("which this App does not have" in each.getMessage() for each in warnings)
    assert all(each.event == "bad_signature" for each in warnings)  # type: ignore[attr-defined]
    assert work(encrypting).finished == 1
    assert ran == [7]


def test_a_job_without_its_key_for_a_day_fails_without_a_callback(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    encrypting, without = make(keys=[KEY]), make(keys=[OTHER])
    for app in (encrypting, without):
        app.task(name="pay", on_failure=app.task(name="alarm")(print))(print)
    encrypting.enqueue(encrypting.tasks["pay"].new(7))
    work(without)
    execute(engine, f"UPDATE jobs SET unknown_since = {_moment(engine, LONG_AGO)}, available_at = created_at")
    assert work(without).failed == 1
    (failed,) = without.jobs.list(state="failed")
    assert (failed.reason, failed.exception) == ("bad_signature", "sqlq.errors.PayloadKeyError")
    assert tasks_in(engine) == []
    assert encrypting.jobs.retry([failed.id]) == [failed.id]
    assert work(encrypting).finished == 1


def test_a_step_is_released_when_the_key_of_a_result_is_not_here(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    ran: list[int] = []
    first, second, both = make(keys=[KEY]), make(keys=[OTHER]), make(keys=[OTHER, KEY])
    for app in (first, second, both):
        app.task(name="one")(lambda: 1)
        app.task(name="take")(ran.append)
    flow = sqlq.Flow()
    flow.add(second.tasks["take"].new(flow.add(second.tasks["one"].new()).result))
    second.enqueue(flow)
    both.worker(drain=True, max_jobs=1).run()
    assert first.database.encryption is not None
    execute(
        engine,
        "UPDATE finished_jobs SET result = :r",
        r=first.database.encryption.protect("result", "one", "default", "1"),
    )
    assert (work(second).released, second.jobs.list(state="failed")) == (1, [])
    execute(engine, "UPDATE jobs SET available_at = created_at")
    assert work(both).finished == 1
    assert ran == [1]


@pytest.mark.parametrize("keys", [None, [OTHER], [KEY]])
def test_a_rewritten_signature_fails_at_once(
    make: Callable[..., sqlq.App], engine: Engine, keys: list[str] | None
) -> None:
    encrypting, app = make(keys=[KEY]), make(keys=keys, plain=None if keys is None else "accept")
    for each in (encrypting, app):
        each.task(name="pay")(print)
    encrypting.enqueue(encrypting.tasks["pay"].new(7))
    execute(engine, "UPDATE jobs SET payload = replace(payload, '\": \"', '\":\"')")
    assert work(app).failed == 1
    assert [job.reason for job in app.jobs.list(state="failed")] == ["bad_signature"]


# -- what follows --------------------------------------------------------------------------------------------

FORGED = """
INSERT INTO jobs (queue, task, payload, on_failure, on_success, label, attempts, max_attempts, releases)
VALUES ('any "thing"', '{"amount": 1000000}', :payload, '{"task": "charge", "queue": "pay"}',
        '{"task": "charge", "queue": "pay"}', 'theirs', :attempts, 1, :releases)
"""


def forge(engine: Engine, payload: str = "{}", *, attempts: int = 0, releases: int = 0) -> None:
    execute(engine, FORGED, payload=payload, attempts=attempts, releases=releases)


@pytest.mark.parametrize("payload", ["{}", f'{HEAD}s1.KEY.{"A" * 44}", "text": {{}}}}'])
def test_a_refused_row_gets_no_callback(make: Callable[..., sqlq.App], engine: Engine, payload: str) -> None:
    """Else it would be signed, with a task, a queue and a label of theirs in it."""
    app = make(keys=[KEY])
    assert app.database.encryption is not None
    app.task(name="charge", queue="pay")(print)
    forge(engine, payload.replace("KEY", next(iter(app.database.encryption.keys))))
    assert work(app).failed == 1
    assert [(job.reason, job.label) for job in app.jobs.list()] == [("bad_signature", "theirs")]
    assert tasks_in(engine) == []


def test_a_forged_row_whose_worker_is_lost_gets_no_callback(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    """Whoever ends it has never opened it."""
    app = make(keys=[KEY])
    then = app.task(name="charge", queue="pay")(print)
    honest = app.task(name="honest", max_attempts=1, on_failure=then)(print)
    database = app.database
    for payload in ("{}", None):
        forge(engine, payload or "{}") if payload else app.enqueue(honest.new(1))
        with database.begin() as conn:
            (held,) = claim_on(conn, ['any "thing"', "default"], limit=1, owner="dead", lease_ms=1)
        with database.begin() as conn:
            settle.lose(conn, [(held.id, held.lease_token)], "is gone")
    assert [(job.task, job.reason) for job in app.jobs.list(state="failed")] == [
        ("honest", "worker_lost"),
        ('{"amount": 1000000}', "worker_lost"),
    ]
    assert tasks_in(engine) == ["charge"], "the one that follows the honest one"
    (follows,) = app.jobs.list(state="available")
    assert follows.payload["args"][0]["task"] == "honest"


def test_a_forged_row_that_is_cancelled_gets_no_callback(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    app = make(keys=[KEY])
    then = app.task(name="charge", queue="pay")(print)
    honest = app.enqueue(app.task(name="honest", on_cancel=then)(print).new(1))
    forge(engine)
    execute(engine, """UPDATE jobs SET on_failure = '{"on_cancel": {"task": "charge", "queue": "pay"}}'""")
    app.jobs.cancel(all=True)
    (follows,) = app.jobs.list(state="available")
    assert follows.payload["args"][0]["id"] == honest.id
    assert work(app).finished == 1, "it is signed"


def test_a_forged_row_of_a_dead_worker_gets_no_callback(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    app = make(keys=[KEY])
    app.task(name="charge", queue="pay")(print)
    forge(engine, releases=MAX_RELEASES)
    with app.database.begin() as conn:
        assert claim_on(conn, ['any "thing"'], limit=1, owner="dead", lease_ms=1000)
    assert deaths("dead").release(app.database) == float("inf")
    assert [job.reason for job in app.jobs.list(state="failed")] == ["error"]
    assert tasks_in(engine) == []


# -- what goes into later steps ------------------------------------------------------------------------------


def feed(engine: Engine, signed_step: str) -> None:
    """Insert rows as a role would: one in the queue whose plain rows are accepted, and behind it a step.

    The arguments of the step were signed for another flow.
    """
    with engine.begin() as conn:
        flow_id = conn.scalar(text("SELECT max(id) FROM sqlq_flows"))
        insert = "INSERT INTO jobs (queue, task, payload, flow_id, blocked_by, available_at) VALUES "
        echo = conn.scalar(
            text(
                f"{insert} ('hooks', 'echo', :payload, :flow, NULL, {_moment(engine, LONG_AGO)}) RETURNING id"
            ),
            {"payload": json.dumps({"args": [{"amount": 555}]}), "flow": flow_id},
        )
        step = conn.scalar(
            text(f"{insert} ('pay', 'pay', :payload, :flow, 'flow', {_moment(engine, FAR)}) RETURNING id"),
            {"payload": signed_step, "flow": flow_id},
        )
        conn.execute(
            text(
                "INSERT INTO sqlq_edges (job_id, depends_on, on_outcome, place) VALUES (:s, :e, 'success', 0)"
            ),
            {"s": step, "e": echo},
        )


def shop(app: sqlq.App) -> list[Any]:
    """Give an App the tasks of these tests, and return what `pay` is called with."""
    paid: list[Any] = []
    app.task(name="quote", queue="pay")(lambda: {"amount": 1})
    app.task(name="echo", queue="hooks")(lambda value: value)
    app.task(name="pay", queue="pay")(paid.append)

    @app.task(name="look", queue="pay")
    def look() -> None:
        paid.append(sqlq.current_job().results)

    return paid


@pytest.mark.parametrize("task", ["pay", "look"])
def test_a_plain_row_feeds_no_signed_step(make: Callable[..., sqlq.App], engine: Engine, task: str) -> None:
    app = make(keys=[KEY], plain=["hooks"])
    paid = shop(app)
    flow = sqlq.Flow()
    quoted = flow.add(app.tasks["quote"].new())
    step = app.tasks["pay"].new(quoted.result) if task == "pay" else app.tasks["look"].new()
    flow.add(step, after=[quoted])
    app.enqueue(flow)
    with engine.connect() as conn:
        protected = str(conn.scalar(text("SELECT payload FROM jobs WHERE task = :t"), {"t": task}))
    feed(engine, protected)
    execute(engine, "UPDATE jobs SET task = :t WHERE id = (SELECT max(id) FROM jobs)", t=task)
    work(app)
    assert paid == [{"amount": 1} if task == "pay" else [{"amount": 1}]], "what the App has asked for"
    refused = app.jobs.list(state="failed") + app.jobs.list(state="scheduled")
    assert len(refused) == 1
    said = refused[0].message or str(refused[0].errors[-1])
    assert "its queue hooks accepts plain rows" in said


@pytest.mark.parametrize("plain", ["accept", ["hooks", "pay"]])
def test_a_step_in_a_queue_of_plain_rows_takes_plain_results(
    make: Callable[..., sqlq.App], engine: Engine, plain: Any
) -> None:
    app = make(keys=[KEY], plain=plain)
    paid = shop(app)
    flow = sqlq.Flow()
    flow.add(app.tasks["pay"].new(flow.add(app.tasks["echo"].new(3)).result))
    app.enqueue(flow)
    work(app)
    assert paid == [3]


def test_signed_steps_feed_steps_in_a_queue_of_plain_rows(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    app = make(keys=[KEY], plain=["hooks"])
    shop(app)
    flow = sqlq.Flow()
    flow.add(app.tasks["echo"].new(flow.add(app.tasks["quote"].new()).result))
    done = app.enqueue(flow)
    work(app)
    assert app.result(done) == {"amount": 1}
