"""The guard rejects what it should: without this, tests that rest on it could not fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.model.flow import plan_of
from sqlq.model.job import NewJob
from sqlq.model.limit import rule_of
from sqlq.model.outcome import ErrorText, Failed, Finished, Released, Retried, Settlement
from sqlq.store.flows import flows
from sqlq.store.jobs import insert, lease, lookup, operate, settle
from sqlq.store.limits import admit
from tests.faults import guard
from tests.kit import NOW, claim_on, execute, needs

ERROR = ErrorText("ValueError", "no")

SCENES = (
    *("waiting", "scheduled", "running", "spent"),
    *("blocked", "alarm", "delayed", "in_line", "limited"),
)
"""Jobs in each state; {name} in a statement below is such a job's id."""

CARRIED = (
    "id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, "
    "lease_token, unique_key, "
    "unique_until, timeout_ms, releases, errors, headers, label, backoff, retention_ms, created_at"
)
RESERVE = "reserved_at = available_at, reserved_by = 'me', lease_expires_at = {later}"
RESERVE_IN_THE_PAST = RESERVE.replace("{later}", "created_at")
UNRESERVE = "reserved_at = NULL, reserved_by = NULL, lease_expires_at = NULL"

ILLEGAL = [
    ("INSERT INTO jobs (task, attempts) VALUES ('t', 1)", "a new job has a history"),
    (
        "INSERT INTO jobs (task, reserved_at, reserved_by, lease_expires_at) SELECT 't', {now}, 'me', {now}",
        "begins reserved",
    ),
    ("INSERT INTO jobs (task, lease_token) VALUES ('t', 1)", "comes back that did not fail with it"),
    (
        "INSERT INTO jobs (id, task, lease_token) SELECT id, task, lease_token + 1 FROM failed_jobs",
        "comes back that did not fail",
    ),
    (
        "INSERT INTO jobs (id, task, lease_token, attempts) SELECT id, task, lease_token, 1 FROM failed_jobs",
        "comes back with attempts",
    ),
    ("INSERT INTO jobs (id, task) SELECT id, task FROM finished_jobs", "a finished job comes back"),
    ("UPDATE jobs SET payload = '[]' WHERE id = {waiting}", "what a job is was changed"),
    ("UPDATE jobs SET queue = 'other' WHERE id = {waiting}", "which job it is was changed"),
    ("UPDATE jobs SET start_by = {later} WHERE id = {waiting}", "until when it has to start was changed"),
    ("UPDATE jobs SET start_by = {later} WHERE id = {running}", "until when it has to start was changed"),
    (
        "UPDATE jobs SET {cursor} = '1' WHERE id = {waiting}",
        "a cursor was saved by somebody who did not hold",
    ),
    ("UPDATE jobs SET releases = 1 WHERE id = {running}", "releases or losses were taken back"),
    ("UPDATE jobs SET losses = 1, {cursor} = '1' WHERE id = {running}", "releases or losses were taken back"),
    ("UPDATE jobs SET flow_id = 7 WHERE id = {waiting}", "which job it is was changed"),
    (
        "INSERT INTO jobs (task, blocked_by, available_at) VALUES ('t', 'flow', {far})",
        "a flow that it is not in",
    ),
    ("UPDATE jobs SET blocked_by = 'flow', available_at = {far} WHERE id = {waiting}", "after it was not"),
    (
        f"UPDATE jobs SET blocked_by = NULL, available_at = {{now}}, lease_token = 1, attempts = 1, "
        f"{RESERVE} WHERE id = {{blocked}}",
        "while it was blocked",
    ),
    (
        "UPDATE jobs SET blocked_by = NULL, available_at = {now} WHERE id = {blocked}",
        "without the success",
    ),
    ("UPDATE jobs SET blocked_by = NULL, available_at = {now} WHERE id = {alarm}", "without the failure"),
    ("UPDATE jobs SET blocked_by = NULL, available_at = {now} WHERE id = {delayed}", "before its time"),
    ("INSERT INTO jobs (task, limit_key) VALUES ('t', 'one')", "in no line"),
    (
        "UPDATE jobs SET blocked_by = NULL, available_at = {now} WHERE id = {in_line}",
        "admitted before it is due",
    ),
    (f"UPDATE jobs SET {UNRESERVE} WHERE id = {{limited}}", "put back with its place"),
    ("UPDATE jobs SET on_success = 'null' WHERE id = {waiting}", "what follows on_success was changed"),
    ("UPDATE jobs SET on_failure = 'null' WHERE id = {running}", "what follows on_failure was changed"),
    ("UPDATE jobs SET lease_token = 0 WHERE id = {running}", "the token fell"),
    ("UPDATE jobs SET lease_token = lease_token + 2 WHERE id = {running}", "the token fell or jumped"),
    (f"UPDATE jobs SET attempts = attempts + 1, {RESERVE} WHERE id = {{waiting}}", "without a new token"),
    (f"UPDATE jobs SET lease_token = 1, {RESERVE} WHERE id = {{waiting}}", "without counting"),
    (f"UPDATE jobs SET lease_token = 1, attempts = 1, {RESERVE} WHERE id = {{scheduled}}", "claimed early"),
    (
        f"UPDATE jobs SET lease_token = 1, attempts = 1, {RESERVE_IN_THE_PAST} WHERE id = {{waiting}}",
        "has run out",
    ),
    (
        f"UPDATE jobs SET lease_token = 1, attempts = 1, {RESERVE}, losses = 1 WHERE id = {{waiting}}",
        "changed the history",
    ),
    ("UPDATE jobs SET reserved_by = 'other' WHERE id = {running}", "changed hands"),
    ("UPDATE jobs SET attempts = 2 WHERE id = {running}", "changed hands or history"),
    ("UPDATE jobs SET lease_expires_at = created_at WHERE id = {running}", "renewed into the past"),
    ("UPDATE jobs SET lease_token = lease_token + 1 WHERE id = {running}", "whose lease still runs"),
    (
        f"UPDATE jobs SET lease_token = 2, {UNRESERVE}, errors = '[1]' WHERE id = {{running}}",
        "given up under another token",
    ),
    (
        f"UPDATE jobs SET lease_token = 2, losses = 1, {UNRESERVE}, errors = '[1]' WHERE id = {{running}}",
        "given up under another token",
    ),
    (
        f"UPDATE jobs SET attempts = 3, {UNRESERVE}, errors = '[1]' WHERE id = {{running}}",
        "with other attempts",
    ),
    (f"UPDATE jobs SET attempts = 0, {UNRESERVE} WHERE id = {{running}}", "without counting the release"),
    (
        f"UPDATE jobs SET releases = 1, {UNRESERVE}, errors = '[1]' WHERE id = {{running}}",
        "for an attempt that counted",
    ),
    (f"UPDATE jobs SET {UNRESERVE}, errors = '[1]' WHERE id = {{spent}}", "without attempts left"),
    (f"UPDATE jobs SET {UNRESERVE} WHERE id = {{running}}", "without recording the error"),
    (f"UPDATE jobs SET {UNRESERVE}, errors = '[1]', losses = 3 WHERE id = {{running}}", "miscounted"),
    ("UPDATE jobs SET lease_token = 1 WHERE id = {waiting}", "history of a waiting job"),
    ("DELETE FROM jobs WHERE id = {waiting}", "a job vanished"),
    ("DELETE FROM jobs WHERE id = {running}", "a job vanished"),
    (
        f"INSERT INTO finished_jobs ({CARRIED}, outcome) SELECT {CARRIED}, 'finished' FROM jobs WHERE id = "
        f"{{waiting}}",
        "did not hold it",
    ),
    (
        f"INSERT INTO failed_jobs ({CARRIED}, reason) SELECT {CARRIED}, 'error' FROM jobs WHERE id = "
        f"{{waiting}}",
        "did not hold it",
    ),
    (
        f"INSERT INTO failed_jobs ({CARRIED}, reason) SELECT {CARRIED}, 'worker_lost' FROM jobs WHERE id = "
        f"{{running}}",
        "attempts left",
    ),
    (
        f"INSERT INTO failed_jobs ({CARRIED}, reason) SELECT {CARRIED}, 'error' FROM finished_jobs",
        "ended twice|did not hold it",
    ),
    (
        f"INSERT INTO finished_jobs ({CARRIED}, outcome) SELECT {CARRIED}, 'finished' FROM failed_jobs",
        "ended twice|did not hold it",
    ),
    ("UPDATE finished_jobs SET result = '1'", "an ended job was changed"),
    ("UPDATE failed_jobs SET lease_token = 0", "an ended job was changed"),
]


@pytest.fixture
def scene(app: sqlq.App, engine: Engine) -> dict[str, int]:
    guard.install(engine)
    names = ("finishes", "fails", "running", "spent")
    with app.database.begin() as conn:
        insert.insert(
            conn,
            [NewJob(name, "{}", "default", 1 if name == "spent" else 5) for name in names],
        )
        held = {job.task: job for job in claim_on(conn, limit=9, lease_ms=60_000)}
        for name, outcome in (("finishes", Finished()), ("fails", Failed("error", ERROR))):
            settle.settle(conn, [Settlement(held[name].id, held[name].lease_token, 1, outcome)])
        insert.insert(conn, [NewJob("waiting", "{}", "default", 5)])
        insert.insert(conn, [NewJob("scheduled", "{}", "default", 5, delay_ms=60_000)])
        one = NewJob(
            "limited", "{}", "limits", 5, limit_key="one", rule=rule_of(sqlq.Limit("one", running=1))
        )
        later = dataclasses.replace(one, task="in_line", delay_ms=60_000)
        insert.insert(conn, [one, later])
        assert admit.look_on(conn, (), limit=9).number == 1
        assert claim_on(conn, ["limits"], limit=9, lease_ms=60_000)
        flow = sqlq.Flow()
        failing = flow.add(NewJob("failing", "{}", "flows", 5))
        failing.then(NewJob("blocked", "{}", "flows", 5))
        passing = flow.add(NewJob("passing", "{}", "flows", 5))
        passing.catch(NewJob("alarm", "{}", "flows", 5))
        passing.then(NewJob("delayed", "{}", "flows", 5, delay_ms=60_000))
        flows.insert_flow(conn, plan_of(flow))
        held = {job.task: job for job in claim_on(conn, ["flows"], limit=9, lease_ms=60_000)}
        for name, outcome in (("passing", Finished()), ("failing", Failed("error", ERROR))):
            settle.settle(conn, [Settlement(held[name].id, held[name].lease_token, 1, outcome)])
    with engine.connect() as conn:
        query = text("SELECT id FROM jobs WHERE task = :task")
        return {task: conn.execute(query, {"task": task}).scalar_one() for task in SCENES}


def test_the_guard_rejects_illegal_transitions(engine: Engine, scene: dict[str, int]) -> None:
    kind = engine.dialect.name
    moments = {
        "cursor": engine.dialect.identifier_preparer.quote("cursor"),
        "now": NOW[kind],
        "later": "4102444800000" if kind == "sqlite" else "'2100-01-01'",
        "far": {
            "sqlite": "253339228800000",
            "postgresql": "'9998-01-01 00:00+00'",
            "mariadb": "'9998-01-01'",
        }[kind],
    }
    for statement, says in ILLEGAL:
        print(statement)
        with pytest.raises(DBAPIError, match=f"{guard.ILLEGAL} .*({says})"), engine.begin() as conn:
            conn.execute(text(statement.format(**scene, **moments)))


def test_the_guard_accepts_legal_transitions(app: sqlq.App, engine: Engine) -> None:
    guard.install(engine)
    error = ErrorText("ValueError", "no")
    outcomes: list[Any] = [Released(), Retried(0, error), Failed("error", error)]
    with app.database.begin() as conn:
        (job,) = insert.insert(conn, [NewJob("t", "{}", "default", 2)])
    for outcome in [*outcomes, "back", Retried(0, error), "lost", "back", "lost", Finished("1")]:
        if outcome == "back":
            with app.database.begin() as conn:
                assert operate.retry_failed(conn, lookup.Selection(ids=(job.id,))) == ([job.id], [])
            continue
        with app.database.begin() as conn:
            (held,) = claim_on(conn, limit=1, lease_ms=60_000)
        with app.database.begin() as conn:
            assert lease.extend(conn, [(held.id, held.lease_token)], lease_ms=90_000)
        if outcome == "lost":
            guard.advance(engine, 90_000)
            with app.database.begin() as conn:
                assert len(settle.rescue(conn)) == 1
            continue
        with app.database.begin() as conn:
            assert settle.settle(conn, [Settlement(held.id, held.lease_token, held.attempts, outcome)])
    guard.check(engine)
    assert app.jobs.get(job.id).state == "finished"


@needs("postgresql")
def test_a_job_taken_from_its_owner_may_not_stay_reserved(engine: Engine, scene: dict[str, int]) -> None:
    guard.advance(engine, 60_000)
    with pytest.raises(DBAPIError, match="still reserved"), engine.begin() as conn:
        conn.execute(text(f"UPDATE jobs SET lease_token = lease_token + 1 WHERE id = {scene['running']}"))


def test_the_guard_rejects_claims_from_a_paused_queue(engine: Engine, scene: dict[str, int]) -> None:
    later = "4102444800000" if engine.dialect.name == "sqlite" else "'2100-01-01'"
    execute(
        engine, "INSERT INTO sqlq_queues (queue, paused_at) SELECT 'default', available_at FROM jobs LIMIT 1"
    )
    reserve = RESERVE.format(later=later)
    with pytest.raises(DBAPIError, match="paused"), engine.begin() as conn:
        conn.execute(
            text(f"UPDATE jobs SET lease_token = 1, attempts = 1, {reserve} WHERE id = {scene['waiting']}")
        )
