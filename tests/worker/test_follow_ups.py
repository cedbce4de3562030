"""Callbacks are written with the end of their job: once, by the owner that ends it, and by nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import sqlq
from sqlq.database.database import Database
from sqlq.database.schemas import in_schema
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import (
    Cancelled,
    ErrorText,
    Finished,
    Follower,
    Outcome,
    Released,
    Retried,
    settlement,
)
from sqlq.store.jobs import insert as inserting
from sqlq.store.jobs import settle
from tests.faults import account
from tests.kit import BOOM, claim, execute, expire, refuse, rescue, span


class Shop:
    """An App whose tasks note what they are called with."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.heard: list[sqlq.JobOutcome] = []

        @app.task(name="alarm", queue="ops", priority=7, max_attempts=2)
        def alarm(ended: sqlq.JobOutcome) -> None:
            self.heard.append(ended)

        @app.task(name="thank", queue="ops")
        def thank(ended: dict[str, Any]) -> None:
            self.heard.append(sqlq.JobOutcome(**ended))

        self.alarm, self.thank = alarm, thank

    def task(self, handler: Callable[..., Any], **options: Any) -> Any:
        own = {"name": "pay", "backoff": "0s", "on_success": self.thank, "on_failure": self.alarm}
        return self.app.task(**{**own, **options})(handler)

    def work(self) -> list[sqlq.JobOutcome]:
        """Run everything, and return what the follow-ups were called with."""
        self.app.worker(drain=True).run()
        return self.heard

    def following(self) -> list[tuple[str, Any]]:
        """Return task and argument of the follow-ups that wait."""
        found = [(job.task, job.payload["args"][0]) for job in self.app.jobs.list(queue="ops", limit=1000)]
        return [(task, sqlq.JobOutcome(**argument)) for task, argument in reversed(found)]

    def claim(self, owner: str = "me", queue: str = "default") -> list[ClaimedJob]:
        return claim(self.app, owner, queue=queue, lease_ms=3_600_000)

    def settle(self, job: ClaimedJob, outcome: Outcome) -> None:
        with self.app.database.begin() as conn:
            assert settle.settle(conn, [settlement(job, outcome)])

    def lose(self, job: ClaimedJob) -> None:
        with self.app.database.begin() as conn:
            assert settle.lose(conn, [(job.id, job.lease_token)], "is gone")


@pytest.fixture
def shop(app: sqlq.App) -> Shop:
    return Shop(app)


def fail(*args: Any) -> None:
    raise ValueError("no")


def test_a_finished_job_gets_its_on_success_callback(shop: Shop) -> None:
    """And that of the callback itself."""
    job = shop.app.enqueue(shop.task(lambda n: n).new(7))
    assert shop.work() == [sqlq.JobOutcome(job.id, "pay", "default", "finished", 1)]
    assert shop.app.result(shop.heard.pop().id) == 7
    (follow_up,) = shop.app.jobs.list(task="thank")
    assert (follow_up.queue, follow_up.state, follow_up.max_attempts) == ("ops", "finished", 5)
    second = shop.app.task(name="second", on_success=shop.thank)(lambda ended: None)
    job = shop.app.enqueue(shop.task(lambda: 1, name="first", on_success=second).new())
    (ended,) = shop.work()
    assert ended.task == "second"
    assert shop.app.jobs.get(ended.id).payload["args"][0]["id"] == job.id


def test_a_failed_job_gets_its_callback_after_the_last_attempt_and_again_after_a_retry(shop: Shop) -> None:
    job = shop.app.enqueue(shop.task(fail, max_attempts=3).new())
    ended = sqlq.JobOutcome(job.id, "pay", "default", "failed", 3, "error", "ValueError", "no")
    assert shop.work() == [ended]
    (follow_up,) = shop.app.jobs.list(task="alarm")
    assert (follow_up.queue, follow_up.priority, follow_up.max_attempts) == ("ops", 7, 2)
    assert shop.app.jobs.retry([job.id]) == [job.id]
    assert [each.id for each in shop.work()] == [job.id] * 2


def test_a_job_of_a_removed_task_gets_its_callback(shop: Shop, engine: Engine, database_url: str) -> None:
    """The row names the callback: the code of the task need not be there any more."""
    gone = Shop(sqlq.App(database_url)).task(lambda: None, name="gone")
    shop.app.enqueue(gone.new())
    assert shop.work() == []
    day = span(engine, 86_400)
    execute(engine, f"UPDATE jobs SET available_at = created_at, unknown_since = unknown_since - {day}")
    (ended,) = shop.work()
    assert (ended.task, ended.outcome, ended.reason) == ("gone", "failed", "unknown_task")


def test_a_job_that_completes_itself_gets_its_callback_at_the_commit(shop: Shop, session: Session) -> None:
    waiting: list[Any] = []

    def pay() -> None:
        with session.begin():
            sqlq.current_job().complete(session)
            waiting.extend(session.scalars(text("SELECT task FROM jobs WHERE queue = 'ops'")))

    job = shop.app.enqueue(shop.task(pay, max_attempts=1).new())
    assert shop.work() == [sqlq.JobOutcome(job.id, "pay", "default", "finished", 1)]
    assert waiting == ["thank"], "in the handler's own transaction"


def test_an_attempt_that_does_not_end_its_job_gets_no_callback(shop: Shop) -> None:
    shop.app.enqueue(shop.task(lambda: 1).new())
    for outcome in (Retried(0, ErrorText("ValueError", "no")), Released()):
        (job,) = shop.claim()
        shop.settle(job, outcome)
    assert shop.following() == []


@pytest.mark.parametrize("way", ["handler", "waiting", "forced", "requested", "expired"])
def test_a_cancelled_job_gets_its_on_cancel_callback(shop: Shop, engine: Engine, way: str) -> None:
    def cancels() -> None:
        raise sqlq.Cancel("not wanted")

    task = shop.task(cancels, on_cancel=shop.alarm)
    job = shop.app.enqueue(task.new().set(start_within="1h" if way == "expired" else None))
    reason = "cancelled on request"
    if way == "handler":
        reason = "not wanted"
    elif way == "expired":
        reason = "expired: it was not started in time"
        execute(engine, "UPDATE jobs SET start_by = created_at")
    elif way == "waiting":
        shop.app.jobs.cancel([job.id])
    else:
        (held,) = shop.claim()
        shop.app.jobs.cancel([job.id], force=way == "forced")
        if way == "forced":
            reason += " while it ran; what that attempt still did does not count"
        else:
            shop.settle(held, Cancelled(reason))
    (ended,) = shop.work()
    attempts = 0 if way == "waiting" else 1
    assert ended == sqlq.JobOutcome(job.id, "pay", "default", "cancelled", attempts, message=reason)
    assert [each.task for each in shop.app.jobs.list(queue="ops")] == ["alarm"]


def test_on_cancel_and_on_failure_are_set_apart_from_each_other(shop: Shop) -> None:
    alarm, thank = '"task": "alarm", "queue": "ops", "priority": 7', '{"task": "thank", "queue": "ops"}'
    task = shop.task(fail, on_cancel=shop.thank, max_attempts=1)
    new = task.new()
    assert new.on_failure == f'{{{alarm}, "on_cancel": {thank}}}'
    assert new.set(on_cancel=None).on_failure == f"{{{alarm}}}"
    assert new.set(on_failure=None).on_failure == f'{{"on_cancel": {thank}}}'
    assert new.set(on_failure=None, on_cancel=None).on_failure == "null"
    assert new.set(on_failure=shop.thank).on_failure == f'{thank[:-1]}, "on_cancel": {thank}}}'
    shop.app.enqueue(new.set(on_failure=None))
    assert shop.work() == []
    shop.app.jobs.cancel([shop.app.enqueue(new.set(on_cancel=None))])
    assert shop.following() == []


def test_a_zombies_complete_writes_no_callback(shop: Shop, engine: Engine) -> None:
    shop.app.enqueue(shop.task(lambda: 1).new())
    (zombie,) = shop.claim("zombie")
    shop.lose(zombie)
    right, follow_up = (zombie.id, zombie.lease_token), settlement(zombie, Finished()).follow_up
    with engine.begin() as conn, in_schema(conn, shop.app.database.schema):
        assert not settle.complete(conn, right, Finished(), follow_up=follow_up)
    assert shop.following() == []


@pytest.mark.parametrize("after_the_insert", [True, False])
def test_a_broken_settle_ends_no_job_and_is_repeated(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, after_the_insert: bool
) -> None:
    """The connection breaks beside the insert of the callbacks: the jobs have not ended. They end later, with
    one callback each."""
    insert, broken = inserting.insert, threading.Semaphore(1)

    def breaks(*args: Any) -> Any:
        done = insert(*args) if after_the_insert else None
        if broken.acquire(blocking=False):
            raise OperationalError("INSERT", {}, Exception("gone"), connection_invalidated=True)
        return done or insert(*args)

    monkeypatch.setattr(settle, "insert", breaks)
    pay = shop.task(lambda n: n)
    made = shop.app.enqueue_many([pay.new(n) for n in range(20)])
    heard = shop.work()
    assert not broken.acquire(blocking=False), "nothing broke"
    assert sorted(ended.id for ended in heard) == sorted(job.id for job in made)


def test_a_lost_reply_to_commit_doubles_no_callback(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, lost = Database.begin, threading.Semaphore(1)

    @contextmanager
    def losing(database: Database) -> Iterator[Connection]:
        with begin(database) as conn:
            yield conn
        if threading.current_thread().name == "sqlq-settle" and lost.acquire(blocking=False):
            raise OperationalError("COMMIT", {}, Exception("gone"), connection_invalidated=True)

    monkeypatch.setattr(Database, "begin", losing)
    pay = shop.task(lambda n: fail() if n % 2 else n, max_attempts=1)
    made = shop.app.enqueue_many([pay.new(n) for n in range(20)])
    heard = shop.work()
    assert not lost.acquire(blocking=False), "no reply was lost"
    follow_ups = shop.app.jobs.list(queue="ops", limit=1000)
    figures = account.followed(shop.app.jobs.list(task="pay"), follow_ups)
    account.demand("G14: a lost reply to COMMIT", figures)
    assert sorted(ended.id for ended in heard) == sorted(job.id for job in made)
    assert [ended.outcome for ended in sorted(heard, key=lambda e: e.id)] == ["finished", "failed"] * 10


def test_a_refused_callback_does_not_block_other_rescues(
    shop: Shop, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.store.apart.LATELY_SECONDS", 0.0)
    refuse(engine, "INSERT ON jobs", "NEW.task = 'alarm'")
    pay = shop.task(lambda: 1, max_attempts=1)
    plain = shop.app.task(name="plain", max_attempts=1)(lambda: 1)
    thanked = pay.new().set(on_failure=shop.thank)
    made = shop.app.enqueue_many([pay.new(), plain.new(), thanked, pay.new(), plain.new()])
    shop.claim("dead")
    for _ in range(2):
        expire(engine)
        rescue(shop.app)
        states = [str(shop.app.jobs.get(job.id).state) for job in made]
        assert states == ["running", "failed", "failed", "running", "failed"]
    assert [(task, ended.id) for task, ended in shop.following()] == [("thank", made[2].id)]
    said = f"job {made[0].id} has lost its worker, but the database refuses to store that"
    assert caplog.text.count(said) == 1
    execute(engine, f"DROP TRIGGER refuse{' ON jobs' if engine.dialect.name == 'postgresql' else ''}")
    assert {job.id for job in rescue(shop.app)} == {made[0].id, made[3].id}
    assert sorted(ended.id for _, ended in shop.following()) == [made[0].id, made[2].id, made[3].id]


@pytest.mark.parametrize("lost", [True, False])
def test_a_callback_that_cannot_be_made_does_not_block_other_ends(
    shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    def from_text(text: str, column: str) -> Follower | None:
        if "alarm" in text:
            raise RuntimeError("no memory")
        return Follower(**json.loads(text))

    monkeypatch.setattr(Follower, "from_text", from_text)
    pay = shop.task(fail, max_attempts=1)
    made = shop.app.enqueue_many([pay.new(), pay.new().set(on_failure=shop.thank)])
    if lost:
        shop.claim("dead")
        expire(engine)
        assert len(rescue(shop.app)) == 2
    heard = shop.work()
    assert [str(shop.app.jobs.get(job.id).state) for job in made] == ["failed", "failed"]
    assert [ended.id for ended in heard] == [made[1].id]


THANK = {"task": "thank", "queue": "ops"}
ALARM = {"task": "alarm", "queue": "ops", "priority": 7}


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("in_session", [True, False])
def test_a_jobs_callback_comes_before_its_tasks(
    shop: Shop, session: Session, engine: Engine, keyed: bool, together: bool, in_session: bool
) -> None:
    pay = shop.task(lambda: 1, on_success=None)
    plain = shop.app.task(name="plain")(lambda: 1)
    new = [pay.new(), pay.new().set(on_failure=None), pay.new().set(on_success=shop.thank), plain.new()]
    new = [job.set(unique_key=f"k{i}") for i, job in enumerate(new)] if keyed else new
    target = session if in_session else None
    if together:
        done = shop.app.enqueue_many(new, session=target)
    else:
        done = [shop.app.enqueue(job, session=target) for job in new]
    session.commit()
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT id, on_success, on_failure FROM jobs")).all()
    said = {id: [json.loads(text or "null") for text in texts] for id, *texts in rows}
    assert [said[job.id] for job in done] == [[None, ALARM], [None, None], [THANK, ALARM], [None, None]]
    assert [(ended.task, ended.outcome) for ended in shop.work()] == [("pay", "finished")]


def test_a_job_inserted_by_sql_gets_its_tasks_callback(shop: Shop, engine: Engine) -> None:
    shop.task(lambda n: fail() if n < 0 else n, max_attempts=1)
    shop.app.task(name="plain")(lambda n: n)
    later = '{"task": "thank", "queue": "ops", "of a later release": 1}'
    for task, n, column, said in (
        *(("pay", 1, "label", None), ("pay", -1, "label", None), ("pay", 2, "on_success", "null")),
        *(("pay", -2, "on_failure", later), ("plain", 1, "label", None)),
    ):
        into = f"INSERT INTO jobs (task, payload, {column}) VALUES (:task, :payload, :said)"
        execute(engine, into, task=task, payload=f'{{"args": [{n}]}}', said=said)
    heard = shop.work()
    assert sorted(ended.outcome for ended in heard) == ["failed", "failed", "finished"]


@pytest.mark.parametrize(
    "said",
    [
        *("alarm", "[]", '"alarm"', "{}", '{"task": 7}', '{"task": ""}', '{"task": "t", "queue": "a,b"}'),
        *('{"task": "t", "priority": 101}', '{"task": "t", "priority": true}', f'{{"task": "{"t" * 256}"}}'),
    ],
)
def test_a_row_with_a_bad_callback_fails_alone(shop: Shop, engine: Engine, said: str) -> None:
    """Neither the jobs beside it pay for that, nor the rescue."""
    ran: list[int] = []
    shop.task(ran.append, max_attempts=1)
    for n, (column, value, queue) in enumerate((
        ("on_success", said, "default"), ("on_failure", said, "default"),
        ("on_failure", None, "default"), ("on_failure", said, "lost"),
    )):  # fmt: skip
        into = f"INSERT INTO jobs (task, max_attempts, payload, {column}, queue)"
        values = {"payload": f'{{"args": [{n}]}}', "said": value, "queue": queue}
        execute(engine, f"{into} VALUES ('pay', 1, :payload, :said, :queue)", **values)
    (lost,) = shop.claim("dead", "lost")
    shop.lose(lost)
    heard = shop.work()
    failed = [job for job in shop.app.jobs.list(task="pay") if job.state == "failed"]
    assert [job.reason for job in reversed(failed)] == ["bad_payload", "bad_payload", "worker_lost"]
    assert all(job.message for job in failed)
    assert ran == [2]
    assert sorted(ended.reason or "" for ended in heard) == ["", "bad_payload"], "a good one is heard of"


@pytest.mark.parametrize("lost", [True, False])
def test_a_callback_has_the_headers_and_the_label_of_the_job(shop: Shop, lost: bool) -> None:
    new = shop.task(fail, max_attempts=1).new().set(label="of May", headers={"tenant": "blue"})
    shop.app.enqueue(new)
    (job,) = shop.claim()
    shop.lose(job) if lost else shop.settle(job, BOOM)
    ((_, ended),) = shop.following()
    assert ended.label == "of May"
    (follow_up,) = shop.app.jobs.list(task="alarm")
    assert (follow_up.headers, follow_up.label) == ({"tenant": "blue"}, None)


@pytest.mark.parametrize("headers", ["no JSON", "[]", '{"sqlq.carry": 1}'])
def test_unreadable_headers_are_not_passed_on_to_a_callback(shop: Shop, engine: Engine, headers: str) -> None:
    """The job fails of them, and its alarm would, too."""
    shop.task(lambda: 1, max_attempts=1)
    execute(engine, "INSERT INTO jobs (task, headers) VALUES ('pay', :h)", h=headers)
    (job,) = shop.claim()
    shop.settle(job._replace(on_failure='{"task": "alarm"}'), BOOM)
    shop.work()
    (follow_up,) = shop.app.jobs.list(task="alarm")
    assert (follow_up.state, follow_up.headers) == ("finished", {})
