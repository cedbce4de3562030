"""Signed and encrypted jobs: they run as others do, and a tampered row fails alone.

No encrypted text is shown without the key.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.config.constants import MAX_RELEASES
from sqlq.config.durations import FAR
from sqlq.errors import PayloadKeyError
from sqlq.payload.encryption import HEAD, new_key
from sqlq.schema.types import milliseconds_since_epoch
from sqlq.store.jobs import settle
from sqlq.testing import tick
from sqlq.testing.database import write_declared
from tests.kit import claim_on, deaths, execute
from tests.kit.flows import Shop

KEY, OTHER = new_key(), new_key()
SECRET = "4111-1111"


@pytest.fixture(params=["sign", "encrypt"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encrypting(database_url: str, how: Any) -> Iterator[sqlq.App]:
    """An App with a key."""
    app = sqlq.App(database_url, keys=[KEY], encryption=how)
    yield app
    app.close()


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


def work(app: sqlq.App, **options: Any) -> Any:
    return app.worker(drain=True, **options).run()


def stored(engine: Engine, table: str = "jobs", column: str = "payload") -> list[str]:
    with engine.connect() as conn:
        return list(conn.scalars(text(f"SELECT {column} FROM {table} ORDER BY id")))


def write(engine: Engine, statement: str, **parameters: Any) -> None:
    with engine.begin() as conn:
        if conn.dialect.name == "mariadb":
            conn.execute(text("SET SESSION sql_mode = CONCAT(@@sql_mode, ',PIPES_AS_CONCAT')"))
        conn.execute(text(statement), parameters)


def failed(app: sqlq.App) -> list[tuple[str, str | None]]:
    return [(job.task, job.reason) for job in reversed(app.jobs.list(state="failed"))]


def test_signed_and_encrypted_jobs_run_and_so_are_their_results(
    encrypting: sqlq.App, engine: Engine, how: str
) -> None:
    @encrypting.task(name="pay")
    def pay(card: str, id: UUID, amount: int = 1) -> dict[str, Any]:
        return {"card": card, "id": str(id), "amount": amount}

    id = UUID(int=7)
    job = encrypting.enqueue(pay.new(SECRET, id, amount=3))
    many = encrypting.enqueue_many([pay.new(SECRET, id) for _ in range(3)])
    texts = stored(engine)
    assert all(each.startswith(HEAD) for each in texts)
    assert any(SECRET in each for each in texts) is (how == "sign"), "a signed one can be read, and no more"
    assert encrypting.jobs.get(job.id).payload == {"args": [SECRET, str(id)], "kwargs": {"amount": 3}}
    assert work(encrypting).finished == 4
    assert all(each.startswith(HEAD) for each in stored(engine, "finished_jobs", "result"))
    assert any(SECRET in each for each in stored(engine, "finished_jobs", "result")) is (how == "sign")
    assert encrypting.result(job) == {"card": SECRET, "id": str(id), "amount": 3}
    assert encrypting.result(many[0])["amount"] == 1
    details = encrypting.jobs.get(job.id)
    assert details.result == encrypting.result(job)
    assert (details.encryption or "").startswith("signed with key" if how == "sign" else "encrypted with key")


TAMPERED = {
    "swapped between tasks": "UPDATE jobs SET task = 'refund' WHERE id = :id",
    "moved to another queue": "UPDATE jobs SET queue = 'other' WHERE id = :id",
    "cut off": "UPDATE jobs SET payload = substr(payload, 1, length(payload) - 5) WHERE id = :id",
    "closed after a cut": "UPDATE jobs SET payload = substr(payload, 1, 40) || '\"}' WHERE id = :id",
    "without its signature": "UPDATE jobs SET payload = '{\"args\": [1]}' WHERE id = :id",
    "written anew by a tool": "UPDATE jobs SET payload = replace(payload, '\": \"', '\":\"') WHERE id = :id",
    "with more behind it": "UPDATE jobs SET payload = payload || ' ' WHERE id = :id",
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_row_that_was_tampered_with_fails_alone(encrypting: sqlq.App, engine: Engine, change: str) -> None:
    ran: list[tuple[str, int]] = []
    pay = encrypting.task(name="pay")(lambda amount: ran.append(("pay", amount)))
    encrypting.task(name="refund")(lambda amount: ran.append(("refund", amount)))
    first, _ = encrypting.enqueue_many([pay.new(1000), pay.new(2)])
    write(engine, TAMPERED[change], id=first.id)
    raw = stored(engine)[0]
    counts = work(encrypting)
    assert (counts.finished, counts.failed) == (1, 1)
    assert ran == [("pay", 2)]
    (job,) = encrypting.jobs.list(state="failed")
    assert (job.id, job.reason, job.attempts) == (first.id, "bad_signature", 1)
    assert job.exception == "sqlq.errors.PayloadKeyError"
    assert "\n" not in (job.message or "")
    assert stored(engine, "failed_jobs") == [raw], "the raw text is kept"


def test_payloads_of_two_tasks_cannot_be_exchanged(encrypting: sqlq.App, engine: Engine) -> None:
    ran: list[tuple[str, int]] = []
    pay = encrypting.task(name="pay")(lambda amount: ran.append(("pay", amount)))
    refund = encrypting.task(name="refund")(lambda amount: ran.append(("refund", amount)))
    encrypting.enqueue_many([pay.new(1), refund.new(1000)])
    one, two = stored(engine)
    write(engine, "UPDATE jobs SET payload = CASE task WHEN 'pay' THEN :two ELSE :one END", one=one, two=two)
    work(encrypting)
    assert ran == []
    assert failed(encrypting) == [("pay", "bad_signature"), ("refund", "bad_signature")]


def test_another_key_opens_no_payload(
    encrypting: sqlq.App, make: Callable[..., sqlq.App], engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def task_of(app: sqlq.App) -> Any:
        return app.task(name="t")(lambda card: card)

    job = encrypting.enqueue(task_of(encrypting).new(SECRET))
    with caplog.at_level(logging.DEBUG):
        for app in (make(), make(keys=[OTHER])):
            task_of(app)
            assert work(app).released == 1
            found = app.jobs.get(job.id)
            # scheduled, unless this machine was slow
            assert found.state in ("scheduled", "available")
            assert found.encryption is not None
            assert found.available_at is not None
            assert found.available_at > found.created_at
            assert SECRET not in json.dumps(found.payload)
            write(engine, "UPDATE jobs SET available_at = created_at")
    rotated = make(keys=[OTHER, KEY])
    task_of(rotated)
    assert work(rotated).finished == 1
    assert rotated.result(job.id) == SECRET
    with pytest.raises(PayloadKeyError, match=r"the result of job .* cannot be read: "):
        make().result(job.id)
    said = caplog.text
    assert all(hidden not in said for hidden in (SECRET, KEY, OTHER))


def test_plain_rows_are_refused_taken_or_taken_by_queue(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    for plain, expected in ((None, []), (["hooks"], [2]), ("accept", [1, 2])):
        ran: list[int] = []
        app = make(keys=[KEY], plain=plain)
        app.task(name="t")(ran.append)
        write(
            engine,
            """INSERT INTO jobs (queue, task, payload) VALUES ('default', 't', '{"args": [1]}'),"""
            """ ('hooks', 't', '{"args": [2]}')""",
        )
        work(app)
        assert sorted(ran) == expected
        assert [reason for _, reason in failed(app)] == ["bad_signature"] * (2 - len(expected))
        write(engine, "DELETE FROM failed_jobs")


def test_a_plain_result_is_none_where_plain_rows_are_refused(
    make: Callable[..., sqlq.App], engine: Engine
) -> None:
    app = make(keys=[KEY])
    task = app.task(name="t")(lambda: 7)
    job = app.enqueue(task.new())
    work(app)
    write(engine, "UPDATE finished_jobs SET result = '8'")
    with pytest.raises(PayloadKeyError, match="is plain"):
        app.result(job)
    assert make(keys=[KEY], plain="accept").result(job.id) == 8


def test_an_app_that_reads_takes_part_in_a_rollout(make: Callable[..., sqlq.App], engine: Engine) -> None:
    ran: list[int] = []
    first, second = make(keys=[KEY], encryption="read"), make(keys=[KEY], plain="accept")
    tasks = [app.task(name="t")(ran.append) for app in (first, second)]
    first.enqueue(tasks[0].new(1))
    second.enqueue(tasks[1].new(2))
    assert [each.startswith(HEAD) for each in stored(engine)] == [False, True]
    assert work(first).finished == 2
    assert sorted(ran) == [1, 2]


# -- flows ---------------------------------------------------------------------------------------------------


def test_results_of_steps_are_arguments_of_later_ones(encrypting: sqlq.App, engine: Engine) -> None:
    shop = Shop(encrypting)
    numbers = sqlq.group(shop.note.new(1), shop.note.new(2)).then(shop.total)
    flow = encrypting.enqueue(numbers)
    assert all(each.startswith(HEAD) for each in stored(engine))
    assert sorted(map(str, shop.work())) == ["1", "2", "[1, 2]"]
    results = encrypting.flows.get(flow.id).results
    assert sorted(results.values()) == [1, 2, 3]


def test_a_step_refuses_a_changed_result(encrypting: sqlq.App, engine: Engine) -> None:
    shop = Shop(encrypting)
    flow = sqlq.Flow()
    first = flow.add(shop.note.new(1))
    flow.add(shop.note.new(first.result), after=[first])
    encrypting.enqueue(flow)
    work(encrypting, max_jobs=1)
    write(engine, "UPDATE finished_jobs SET result = '1000'")
    assert shop.work() == []
    (job,) = encrypting.jobs.list(state="failed")
    assert job.reason == "bad_payload"
    assert "its result is plain" in (job.message or "")


def test_a_handler_sees_results_and_grows_its_flow(encrypting: sqlq.App, engine: Engine) -> None:
    seen: list[Any] = []

    @encrypting.task(name="leaf")
    def leaf(n: int) -> int:
        seen.append(n)
        return n

    @encrypting.task(name="grow")
    def grow() -> None:
        job = sqlq.current_job()
        seen.append(job.results)
        with job.completing(engine, result=SECRET):
            job.flow.add(leaf.new(2))

    encrypting.enqueue(sqlq.chain(leaf.new(1), grow.new()))
    work(encrypting)
    assert seen == [1, [1], 2]
    assert all(each.startswith(HEAD) for each in stored(engine, "finished_jobs"))
    assert SECRET in [job.result for job in encrypting.jobs.list()]


# -- what follows --------------------------------------------------------------------------------------------


def test_callbacks_are_signed_whoever_writes_them(encrypting: sqlq.App, engine: Engine) -> None:
    heard: list[tuple[str, str | None]] = []
    encrypting.task(name="heard")(lambda ended: heard.append((ended["task"], ended["reason"])))
    then: dict[str, Any] = {
        "on_success": encrypting.tasks["heard"],
        "on_failure": encrypting.tasks["heard"],
        "max_attempts": 1,
    }
    good = encrypting.task(name="good", **then)(lambda: 1)

    @encrypting.task(name="completed", **then)
    def completed() -> None:
        with Session(engine) as session, session.begin():
            sqlq.current_job().complete(session, SECRET)

    lost, returned = (encrypting.task(name=name, **then)(lambda: None) for name in ("lost", "returned"))
    encrypting.enqueue_many([good.new(), completed.new()])
    encrypting.enqueue(lost.new().set(queue="lost"))
    database = encrypting.database
    with database.begin() as conn:
        (held,) = claim_on(conn, ["lost"], limit=1, owner="dead", lease_ms=1000)
    with database.begin() as conn:
        settle.lose(conn, [(held.id, held.lease_token)], "is gone")
    encrypting.enqueue(returned.new().set(queue="returned"))
    write(engine, "UPDATE jobs SET releases = :most WHERE task = 'returned'", most=MAX_RELEASES)
    with database.begin() as conn:
        assert claim_on(conn, ["returned"], limit=1, owner="dead", lease_ms=1000)
    assert deaths("dead").release(database) == float("inf")
    work(encrypting)
    assert sorted(heard, key=str) == [
        ("completed", None),
        ("good", None),
        ("lost", "worker_lost"),
        ("returned", "error"),
    ]
    assert all(each.startswith(HEAD) for each in stored(engine, "finished_jobs"))
    assert SECRET in [job.result for job in encrypting.jobs.list()]


# -- schedules -----------------------------------------------------------------------------------------------


def test_schedules_are_signed_when_they_are_stored(encrypting: sqlq.App, engine: Engine) -> None:
    ran: list[str] = []
    task = encrypting.task(name="t")(ran.append)
    encrypting.schedules.add("added", task.new(SECRET), cron="* * * * *")
    encrypting.schedule("declared", task.new(SECRET), cron="* * * * *")
    write_declared(encrypting)
    with engine.connect() as conn:
        rows = list(conn.scalars(text("SELECT payload FROM sqlq_schedules")))
    assert all(each.startswith(HEAD) for each in rows)
    here = datetime.now(UTC)
    assert len(tick(encrypting, here + timedelta(minutes=1), since=here)) == 2
    encrypting.schedules.run("added")
    work(encrypting)
    assert ran == [SECRET] * 3
    assert json.loads(encrypting.schedules.get("added").payload) == {"args": [SECRET]}
    without = sqlq.App(encrypting.database.engine.url)
    assert without.schedules.get("added").payload.endswith("add it to keys=")
    without.close()


def test_a_deploy_rewrites_a_signed_schedule_only_where_it_differs(
    encrypting: sqlq.App, make: Callable[..., sqlq.App], engine: Engine, how: Any
) -> None:
    def deploy(app: sqlq.App, argument: int) -> str:
        task = app.task(name="t")(lambda n: None)
        app.schedule("nightly", task.new(argument), cron="0 3 * * *")
        write_declared(app)
        with engine.connect() as conn:
            return str(conn.scalar(text("SELECT payload FROM sqlq_schedules")))

    first = deploy(encrypting, 1)
    assert deploy(make(keys=[KEY], encryption=how), 1) == first
    assert deploy(make(keys=[KEY, OTHER], encryption=how), 1) == first
    changed = deploy(make(keys=[KEY], encryption=how), 2)
    assert changed != first
    rotated = deploy(make(keys=[OTHER, KEY], encryption=how), 2)
    assert rotated.startswith(HEAD)
    assert rotated != changed


# -- other ways in -------------------------------------------------------------------------------------------


def test_every_way_to_enqueue_signs_the_payload(encrypting: sqlq.App, engine: Engine) -> None:
    ran: list[int] = []
    task = encrypting.task(name="t")(ran.append)
    with Session(engine) as session, session.begin():
        encrypting.enqueue(task.new(1), session=session)
    with engine.begin() as conn:
        conn.exec_driver_sql(*encrypting.statement(encrypting.named("t").new(2)))
    asyncio.run(encrypting.aenqueue(task.new(3)))
    encrypting.enqueue(task.new(0).set(unique_key="k", delay="1h"))
    encrypting.enqueue(task.new(4).set(unique_key="k", on_conflict="replace"))
    write(engine, "UPDATE jobs SET available_at = created_at")
    assert all(each.startswith(HEAD) for each in stored(engine))
    assert work(encrypting).finished == 4
    assert sorted(ran) == [1, 2, 3, 4]


def test_a_task_of_a_queue_with_options_knows_its_app(database_url: str, engine: Engine) -> None:
    """Its results are signed in its own transaction, too."""
    app = sqlq.App(database_url, keys=[KEY], queues={"slow": {"timeout": "1m"}})

    @app.task(name="t")
    def task() -> None:
        with sqlq.current_job().completing(engine, result=SECRET):
            pass

    job = app.enqueue(task.new().set(queue="slow"))
    work(app)
    assert stored(engine, "finished_jobs", "result")[0].startswith(HEAD)
    assert app.result(job) == SECRET
    app.close()


# -- rows that somebody writes without a key -----------------------------------------------------------------


LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


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


def tasks_of(app: sqlq.App) -> list[Any]:
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
    paid = tasks_of(app)
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
    paid = tasks_of(app)
    flow = sqlq.Flow()
    flow.add(app.tasks["pay"].new(flow.add(app.tasks["echo"].new(3)).result))
    app.enqueue(flow)
    work(app)
    assert paid == [3]
