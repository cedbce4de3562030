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
from sqlq.errors import PayloadKeyError
from sqlq.payload.encryption import HEAD, new_key
from sqlq.store.jobs import settle
from sqlq.testing import tick
from sqlq.testing.database import write_declared
from tests.kit import claim, claim_on, deaths, drain, execute, for_each, span
from tests.kit.flows import Shop

KEY, OTHER = new_key(), new_key()
SECRET = "4111-1111"
Make = Callable[..., sqlq.App]


@pytest.fixture(params=["sign", "encrypt"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Makes Apps on the same database."""
    made: list[sqlq.App] = []

    def app(**options: Any) -> sqlq.App:
        made.append(sqlq.App(database_url, **options))
        return made[-1]

    yield app
    for each in made:
        each.close()


@pytest.fixture
def encrypting(make: Make, how: str) -> sqlq.App:
    return make(keys=[KEY], encryption=how)


def stored(engine: Engine, table: str = "jobs", column: str = "payload") -> list[str]:
    with engine.connect() as conn:
        return list(conn.scalars(text(f"SELECT {column} FROM {table} ORDER BY id")))


def test_protected_jobs_run_and_so_are_their_results(encrypting: sqlq.App, engine: Engine, how: str) -> None:
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
    assert drain(encrypting).finished == 4
    assert all(each.startswith(HEAD) for each in stored(engine, "finished_jobs", "result"))
    assert any(SECRET in each for each in stored(engine, "finished_jobs", "result")) is (how == "sign")
    assert encrypting.result(job) == {"card": SECRET, "id": str(id), "amount": 3}
    assert encrypting.result(many[0])["amount"] == 1
    details = encrypting.jobs.get(job.id)
    assert details.result == encrypting.result(job)
    assert (details.encryption or "").startswith("signed with key" if how == "sign" else "encrypted with key")


TAMPERED: dict[str, tuple[str, Callable[[str], str]]] = {
    "swapped between tasks": ("task", lambda task: "refund"),
    "moved to another queue": ("queue", lambda queue: "other"),
    "cut off": ("payload", lambda payload: payload[:-5]),
    "closed after a cut": ("payload", lambda payload: payload[:40] + '"}'),
    "without its signature": ("payload", lambda payload: '{"args": [1]}'),
    "written anew by a tool": ("payload", lambda payload: payload.replace('": "', '":"')),
    "with more behind it": ("payload", lambda payload: payload + " "),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_row_that_was_tampered_with_fails_alone(encrypting: sqlq.App, engine: Engine, change: str) -> None:
    ran: list[tuple[str, int]] = []
    pay = encrypting.task(name="pay")(lambda amount: ran.append(("pay", amount)))
    encrypting.task(name="refund")(lambda amount: ran.append(("refund", amount)))
    first, _ = encrypting.enqueue_many([pay.new(1000), pay.new(2)])
    column, tamper = TAMPERED[change]
    value = tamper(stored(engine, "jobs", column)[0])
    execute(engine, f"UPDATE jobs SET {column} = :value WHERE id = :id", value=value, id=first.id)
    raw = stored(engine)[0]
    counts = drain(encrypting)
    assert (counts.finished, counts.failed) == (1, 1)
    assert ran == [("pay", 2)]
    (job,) = encrypting.jobs.list(state="failed")
    assert (job.id, job.reason, job.attempts) == (first.id, "bad_signature", 1)
    assert job.exception == "sqlq.errors.PayloadKeyError"
    assert "\n" not in (job.message or "")
    assert stored(engine, "failed_jobs") == [raw], "the raw text is kept"


def test_plain_rows_are_refused_taken_or_taken_by_queue(make: Make, engine: Engine) -> None:
    rows = """('default', 't', '{"args": [1]}'), ('hooks', 't', '{"args": [2]}')"""
    for plain, expected in ((None, []), (["hooks"], [2]), ("accept", [1, 2])):
        ran: list[int] = []
        app = make(keys=[KEY], plain=plain)
        app.task(name="t")(ran.append)
        execute(engine, f"INSERT INTO jobs (queue, task, payload) VALUES {rows}".replace(":", r"\:"))
        drain(app)
        assert sorted(ran) == expected
        refused = [job.reason for job in app.jobs.list(state="failed")]
        assert refused == ["bad_signature"] * (2 - len(expected))
        execute(engine, "DELETE FROM failed_jobs")
    refusing, accepting = make(keys=[KEY]), make(keys=[KEY], plain="accept")
    job = refusing.enqueue(refusing.task(name="seven")(lambda: 7).new())
    drain(refusing)
    execute(engine, "UPDATE finished_jobs SET result = '8'")
    with pytest.raises(PayloadKeyError, match="is plain"):
        refusing.result(job)
    assert accepting.result(job.id) == 8


def test_an_app_that_reads_takes_part_in_a_rollout(make: Make, engine: Engine) -> None:
    ran: list[int] = []
    first, second = make(keys=[KEY], encryption="read"), make(keys=[KEY], plain="accept")
    for n, app in enumerate((first, second)):
        app.enqueue(app.task(name="t")(ran.append).new(n))
    assert [each.startswith(HEAD) for each in stored(engine)] == [False, True]
    assert (drain(first).finished, sorted(ran)) == (2, [0, 1])


def test_a_step_refuses_a_changed_result(encrypting: sqlq.App, engine: Engine) -> None:
    shop = Shop(encrypting)
    encrypting.enqueue(sqlq.chain(shop.note.new(1), shop.note))
    drain(encrypting, max_jobs=1)
    execute(engine, "UPDATE finished_jobs SET result = '1000'")
    assert shop.work() == []
    (job,) = encrypting.jobs.list(state="failed")
    assert (job.reason, "its result is plain" in (job.message or "")) == ("bad_payload", True)


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
    drain(encrypting)
    assert seen == [1, [1], 2]
    assert all(each.startswith(HEAD) for each in stored(engine, "finished_jobs"))
    assert SECRET in [job.result for job in encrypting.jobs.list()]


def test_callbacks_are_signed_whoever_writes_them(encrypting: sqlq.App, engine: Engine) -> None:
    heard: list[tuple[str, str | None]] = []
    encrypting.task(name="heard")(lambda ended: heard.append((ended["task"], ended["reason"])))
    hears = encrypting.tasks["heard"]
    then: dict[str, Any] = {"on_success": hears, "on_failure": hears, "max_attempts": 1}
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
    execute(engine, "UPDATE jobs SET releases = :most WHERE task = 'returned'", most=MAX_RELEASES)
    with database.begin() as conn:
        assert claim_on(conn, ["returned"], limit=1, owner="dead", lease_ms=1000)
    assert deaths("dead").release(database) == float("inf")
    drain(encrypting)
    expected = {"completed": None, "good": None, "lost": "worker_lost", "returned": "error"}
    assert sorted(heard, key=str) == [*expected.items()]
    assert all(each.startswith(HEAD) for each in stored(engine, "finished_jobs"))
    assert SECRET in [job.result for job in encrypting.jobs.list()]


def test_schedules_are_signed_when_they_are_stored(encrypting: sqlq.App, make: Make, engine: Engine) -> None:
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
    drain(encrypting)
    assert ran == [SECRET] * 3
    assert json.loads(encrypting.schedules.get("added").payload) == {"args": [SECRET]}
    assert make().schedules.get("added").payload.endswith("add it to keys=")


def test_a_deploy_rewrites_a_signed_schedule_only_where_it_differs(
    encrypting: sqlq.App, make: Make, engine: Engine, how: Any
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
    execute(engine, "UPDATE jobs SET available_at = created_at")
    assert all(each.startswith(HEAD) for each in stored(engine))
    assert drain(encrypting).finished == 4
    assert sorted(ran) == [1, 2, 3, 4]


def test_a_task_of_a_queue_with_options_knows_its_app(make: Make, engine: Engine) -> None:
    """Its results are signed in its own transaction, too."""
    app = make(keys=[KEY], queues={"slow": {"timeout": "1m"}})

    @app.task(name="t")
    def task() -> None:
        with sqlq.current_job().completing(engine, result=SECRET):
            pass

    job = app.enqueue(task.new().set(queue="slow"))
    drain(app)
    assert stored(engine, "finished_jobs", "result")[0].startswith(HEAD)
    assert app.result(job) == SECRET


@pytest.mark.parametrize("encryption", ["sign", "encrypt"])
@pytest.mark.parametrize("keys", [None, [OTHER]])
def test_a_job_is_released_when_its_key_is_not_here(
    make: Make, engine: Engine, keys: list[str] | None, encryption: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """After a day it fails, without a callback."""
    caplog.set_level(logging.DEBUG)
    encrypting, without = make(keys=[KEY], encryption=encryption), make(keys=keys)
    rotated = make(keys=[OTHER, KEY])
    for app in (encrypting, without, rotated):
        alarm = app.task(name="alarm")(lambda ended: None)
        app.task(name="pay", max_attempts=1, on_failure=alarm)(lambda card: card)
    job = encrypting.enqueue(encrypting.tasks["pay"].new(SECRET))
    for _ in range(3):
        assert (drain(without).released, without.jobs.list(state="failed")) == (1, [])
        found = without.jobs.get(job.id)
        assert found.encryption is not None
        assert found.available_at is not None
        assert found.available_at > found.created_at
        assert SECRET not in json.dumps(found.payload)
        execute(engine, "UPDATE jobs SET available_at = created_at")
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1, "one for each task, reason and minute"
    assert all("which this App does not have" in each.getMessage() for each in warnings)
    assert all(each.event == "bad_signature" for each in warnings)  # type: ignore[attr-defined]
    execute(engine, f"UPDATE jobs SET unknown_since = created_at - {span(engine, 90_000)}")
    assert drain(without).failed == 1
    failed = without.jobs.get(job.id)
    assert (failed.reason, failed.exception) == ("bad_signature", "sqlq.errors.PayloadKeyError")
    assert stored(engine, "jobs", "task") == []
    assert encrypting.jobs.retry([job.id]) == [job.id]
    assert drain(rotated).finished == 1
    assert rotated.result(job.id) == SECRET
    with pytest.raises(PayloadKeyError, match=r"the result of job .* cannot be read: "):
        make().result(job.id)
    assert not any(hidden in caplog.text for hidden in (SECRET, KEY, OTHER))


def test_a_step_is_released_when_the_key_of_a_result_is_not_here(make: Make, engine: Engine) -> None:
    ran: list[int] = []
    first, second, both = make(keys=[KEY]), make(keys=[OTHER]), make(keys=[OTHER, KEY])
    for app in (second, both):
        app.task(name="one")(lambda: 1)
        app.task(name="take")(ran.append)
    second.enqueue(sqlq.chain(second.tasks["one"].new(), second.tasks["take"]))
    drain(both, max_jobs=1)
    assert first.database.encryption is not None
    result = first.database.encryption.protect("result", "one", "default", "1")
    execute(engine, "UPDATE finished_jobs SET result = :result", result=result)
    assert (drain(second).released, second.jobs.list(state="failed")) == (1, [])
    execute(engine, "UPDATE jobs SET available_at = created_at")
    assert (drain(both).finished, ran) == (1, [1])


@pytest.mark.parametrize("keys", [None, [OTHER], [KEY]])
def test_a_rewritten_signature_fails_at_once(make: Make, engine: Engine, keys: list[str] | None) -> None:
    encrypting, app = make(keys=[KEY]), make(keys=keys, plain=None if keys is None else "accept")
    for each in (encrypting, app):
        each.task(name="pay")(print)
    encrypting.enqueue(encrypting.tasks["pay"].new(7))
    execute(engine, "UPDATE jobs SET payload = replace(payload, '\": \"', '\":\"')")
    assert drain(app).failed == 1
    assert [job.reason for job in app.jobs.list(state="failed")] == ["bad_signature"]


FORGED = """
INSERT INTO jobs (queue, task, payload, on_failure, on_success, label, max_attempts, releases)
VALUES ('any "thing"', '{"amount": 1000000}', :payload, '{"task": "charge", "queue": "pay"}',
        '{"task": "charge", "queue": "pay"}', 'theirs', 1, :releases)
""".replace('": ', r'"\: ')


@pytest.mark.parametrize("ends", ["as refused", "as badly signed", "lost", "released too often"])
def test_a_forged_row_gets_no_callback(make: Make, engine: Engine, ends: str) -> None:
    """Else it would be signed, with a task, a queue and a label of theirs in it."""
    app = make(keys=[KEY])
    assert app.database.encryption is not None
    app.task(name="charge", queue="pay")(print)
    key = next(iter(app.database.encryption.keys))
    signed = f'{HEAD}s1.{key}.{"A" * 44}", "text": {{}}}}'
    payload = signed if ends == "as badly signed" else "{}"
    execute(engine, FORGED, payload=payload, releases=MAX_RELEASES if ends == "released too often" else 0)
    if ends.startswith("as"):
        assert drain(app).failed == 1
    else:
        (held,) = claim(app, "dead", queue='any "thing"')
        if ends == "lost":
            with app.database.begin() as conn:
                settle.lose(conn, [(held.id, held.lease_token)], "is gone")
        else:
            assert deaths("dead").release(app.database) == float("inf")
    (job,) = app.jobs.list()
    assert (job.state, job.label, stored(engine, "jobs", "task")) == ("failed", "theirs", [])
    reasons = {"lost": "worker_lost", "released too often": "error"}
    assert job.reason == reasons.get(ends, "bad_signature")


def tasks_of(app: sqlq.App) -> list[Any]:
    """Give an App the tasks of these tests, and return what `pay` is called with."""
    paid: list[Any] = []
    app.task(name="quote", queue="pay")(lambda: {"amount": 1})
    app.task(name="echo", queue="hooks")(lambda value: value)
    app.task(name="pay", queue="pay")(paid.append)
    app.task(name="look", queue="pay")(lambda: paid.append(sqlq.current_job().results))
    return paid


def feed(engine: Engine, task: str) -> None:
    """Insert rows as a role would: one in the queue whose plain rows are accepted, and behind it a copy of a
    signed step."""
    into = "INSERT INTO jobs (queue, task, payload, flow_id, blocked_by, available_at) SELECT"
    copied = "queue, task, payload, flow_id, blocked_by, available_at"
    step = execute(engine, f"{into} {copied} FROM jobs WHERE task = :task RETURNING id", task=task)
    plain = {"payload": '{"args": [{"amount": 555}]}', "step": step}
    made = "'hooks', 'echo', :payload, flow_id, NULL, created_at"
    echo = execute(engine, f"{into} {made} FROM jobs WHERE id = :step RETURNING id", **plain)
    edge = "INSERT INTO sqlq_edges (job_id, depends_on, on_outcome, place)"
    execute(engine, f"{edge} VALUES (:step, :echo, 'success', 0)", step=step, echo=echo)


@pytest.mark.parametrize("task", ["pay", "look"])
def test_a_plain_row_feeds_no_signed_step(make: Make, engine: Engine, task: str) -> None:
    app = make(keys=[KEY], plain=["hooks"])
    paid = tasks_of(app)
    flow = sqlq.Flow()
    quoted = flow.add(app.tasks["quote"].new())
    step = app.tasks["pay"].new(quoted.result) if task == "pay" else app.tasks["look"].new()
    flow.add(step, after=[quoted])
    app.enqueue(flow)
    feed(engine, task)
    drain(app)
    assert paid == [{"amount": 1} if task == "pay" else [{"amount": 1}]], "what the App has asked for"
    refused = app.jobs.list(state="failed") + app.jobs.list(state="scheduled")
    assert len(refused) == 1
    said = refused[0].message or str(refused[0].errors[-1])
    assert "its queue hooks accepts plain rows" in said


@for_each("plain", ["accept", ["hooks", "pay"]])
def test_a_step_in_a_queue_of_plain_rows_takes_plain_results(make: Make, plain: Any) -> None:
    app = make(keys=[KEY], plain=plain)
    paid = tasks_of(app)
    app.enqueue(sqlq.chain(app.tasks["echo"].new(3), app.tasks["pay"]))
    drain(app)
    assert paid == [3]
