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
from tests import kit
from tests.faults import guard
from tests.kit import NOW, claim_on, execute

ERROR = ErrorText("ValueError", "no")

SCENES = ("waiting", "scheduled", "running", "spent", "blocked", "alarm", "delayed", "in_line", "limited")

CARRIED = (
    "id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, "
    "lease_token, unique_key, unique_until, timeout_ms, releases, errors, headers, label, backoff, "
    "retention_ms, created_at"
)
RESERVE = "reserved_at = available_at, reserved_by = 'me', lease_expires_at = {later}"
RESERVE_FIRST = f"lease_token = 1, attempts = 1, {RESERVE}"
UNRESERVE = "reserved_at = NULL, reserved_by = NULL, lease_expires_at = NULL"
HELD, BLOCKED = "reserved_at, reserved_by, lease_expires_at", "blocked_by, available_at"


def moved(rows: str, table: str, column: str, value: str) -> str:
    """Return the INSERT that copies rows to a table of ended jobs, with how they ended."""
    return f"INSERT INTO {table} ({CARRIED}, {column}) SELECT {CARRIED}, '{value}' FROM {rows}"


CHANGES = [
    ("waiting", "payload = '[]'", "what a job is was changed"),
    ("waiting", "queue = 'other'", "which job it is was changed"),
    ("waiting", "start_by = {later}", "until when it has to start was changed"),
    ("running", "start_by = {later}", "until when it has to start was changed"),
    ("waiting", "{cursor} = '1'", "a cursor was saved by somebody who did not hold"),
    ("running", "releases = 1", "releases or losses were taken back"),
    ("running", "losses = 1, {cursor} = '1'", "releases or losses were taken back"),
    ("waiting", "flow_id = 7", "which job it is was changed"),
    ("waiting", "blocked_by = 'flow', available_at = {far}", "after it was not"),
    ("blocked", f"available_at = {{now}}, blocked_by = NULL, {RESERVE_FIRST}", "while it was blocked"),
    ("blocked", "blocked_by = NULL, available_at = {now}", "without the success"),
    ("alarm", "blocked_by = NULL, available_at = {now}", "without the failure"),
    ("delayed", "blocked_by = NULL, available_at = {now}", "before its time"),
    ("in_line", "blocked_by = NULL, available_at = {now}", "admitted before it is due"),
    ("limited", UNRESERVE, "put back with its place"),
    ("waiting", "on_success = 'null'", "what follows on_success was changed"),
    ("running", "on_failure = 'null'", "what follows on_failure was changed"),
    ("running", "lease_token = 0", "the token fell"),
    ("running", "lease_token = lease_token + 2", "the token fell or jumped"),
    ("waiting", f"attempts = attempts + 1, {RESERVE}", "without a new token"),
    ("waiting", f"lease_token = 1, {RESERVE}", "without counting"),
    ("scheduled", RESERVE_FIRST, "claimed early"),
    ("waiting", RESERVE_FIRST.replace("{later}", "created_at"), "has run out"),
    ("waiting", f"{RESERVE_FIRST}, losses = 1", "changed the history"),
    ("running", "reserved_by = 'other'", "changed hands"),
    ("running", "attempts = 2", "changed hands or history"),
    ("running", "lease_expires_at = created_at", "renewed into the past"),
    ("running", "lease_token = lease_token + 1", "whose lease still runs"),
    ("running", f"lease_token = 2, {UNRESERVE}, errors = '[1]'", "given up under another token"),
    ("running", f"lease_token = 2, losses = 1, {UNRESERVE}, errors = '[1]'", "given up under another token"),
    ("running", f"attempts = 3, {UNRESERVE}, errors = '[1]'", "with other attempts"),
    ("running", f"attempts = 0, {UNRESERVE}", "without counting the release"),
    ("running", f"releases = 1, {UNRESERVE}, errors = '[1]'", "for an attempt that counted"),
    ("spent", f"{UNRESERVE}, errors = '[1]'", "without attempts left"),
    ("running", UNRESERVE, "without recording the error"),
    ("running", f"{UNRESERVE}, errors = '[1]', losses = 3", "miscounted"),
    ("waiting", "lease_token = 1", "history of a waiting job"),
]
"""Changes of a job that must be refused, and the reason that the guard names."""

COPIED = "INSERT INTO jobs (id, task, lease_token"
ILLEGAL = [
    *((f"UPDATE jobs SET {change} WHERE id = {{{job}}}", says) for job, change, says in CHANGES),
    ("INSERT INTO jobs (task, attempts) VALUES ('t', 1)", "a new job has a history"),
    (f"INSERT INTO jobs (task, {HELD}) SELECT 't', {{now}}, 'me', {{now}}", "begins reserved"),
    ("INSERT INTO jobs (task, lease_token) VALUES ('t', 1)", "comes back that did not fail with it"),
    (f"{COPIED}) SELECT id, task, lease_token + 1 FROM failed_jobs", "comes back that did not fail"),
    (f"{COPIED}, attempts) SELECT id, task, lease_token, 1 FROM failed_jobs", "comes back with attempts"),
    ("INSERT INTO jobs (id, task) SELECT id, task FROM finished_jobs", "a finished job comes back"),
    (f"INSERT INTO jobs (task, {BLOCKED}) VALUES ('t', 'flow', {{far}})", "a flow that it is not in"),
    ("INSERT INTO jobs (task, limit_key) VALUES ('t', 'one')", "in no line"),
    ("DELETE FROM jobs WHERE id = {waiting}", "a job vanished"),
    ("DELETE FROM jobs WHERE id = {running}", "a job vanished"),
    (moved("jobs WHERE id = {waiting}", "finished_jobs", "outcome", "finished"), "did not hold it"),
    (moved("jobs WHERE id = {waiting}", "failed_jobs", "reason", "error"), "did not hold it"),
    (moved("jobs WHERE id = {running}", "failed_jobs", "reason", "worker_lost"), "attempts left"),
    (moved("finished_jobs", "failed_jobs", "reason", "error"), "ended twice|did not hold it"),
    (moved("failed_jobs", "finished_jobs", "outcome", "finished"), "ended twice|did not hold it"),
    ("UPDATE finished_jobs SET result = '1'", "an ended job was changed"),
    ("UPDATE failed_jobs SET lease_token = 0", "an ended job was changed"),
]


@pytest.fixture
def scene(app: sqlq.App, engine: Engine) -> dict[str, int]:
    guard.install(engine)
    names = ("finishes", "fails", "running", "spent")
    with app.database.begin() as conn:
        insert.insert(conn, [NewJob(name, "{}", "default", 1 if name == "spent" else 5) for name in names])
        held = {job.task: job for job in claim_on(conn, limit=9, lease_ms=60_000)}
        for name, outcome in (("finishes", Finished()), ("fails", Failed("error", ERROR))):
            settle.settle(conn, [Settlement(held[name].id, held[name].lease_token, 1, outcome)])
        insert.insert(conn, [NewJob("waiting", "{}", "default", 5)])
        insert.insert(conn, [NewJob("scheduled", "{}", "default", 5, delay_ms=60_000)])
        rule = rule_of(sqlq.Limit("one", running=1))
        one = NewJob("limited", "{}", "limits", 5, limit_key="one", rule=rule)
        insert.insert(conn, [one, dataclasses.replace(one, task="in_line", delay_ms=60_000)])
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
    far = {"sqlite": "253339228800000", "postgresql": "'9998-01-01 00:00+00'", "mariadb": "'9998-01-01'"}
    moments = {
        "cursor": engine.dialect.identifier_preparer.quote("cursor"),
        "now": NOW[kind],
        "later": "4102444800000" if kind == "sqlite" else "'2100-01-01'",
        "far": far[kind],
    }

    def demand(statement: str, says: str) -> None:
        with pytest.raises(DBAPIError, match=f"{guard.ILLEGAL} .*({says})"), engine.begin() as conn:
            conn.execute(text(statement.format(**scene, **moments)))

    for statement, says in ILLEGAL:
        demand(statement, says)
    execute(engine, f"INSERT INTO sqlq_queues (queue, paused_at) SELECT 'default', {NOW[kind]}")
    demand(f"UPDATE jobs SET {RESERVE_FIRST} WHERE id = {{waiting}}", "paused")
    if kind == "postgresql":
        guard.advance(engine, 60_000)
        demand("UPDATE jobs SET lease_token = lease_token + 1 WHERE id = {running}", "still reserved")


def test_the_guard_accepts_legal_transitions(app: sqlq.App, engine: Engine) -> None:
    guard.install(engine)
    outcomes: list[Any] = [Released(), Retried(0, ERROR), Failed("error", ERROR)]
    with app.database.begin() as conn:
        (job,) = insert.insert(conn, [NewJob("t", "{}", "default", 2)])
    for outcome in [*outcomes, "back", Retried(0, ERROR), "lost", "back", "lost", Finished("1")]:
        if outcome == "back":
            with app.database.begin() as conn:
                assert operate.retry_failed(conn, lookup.Selection(ids=(job.id,))) == ([job.id], [])
            continue
        (held,) = kit.claim(app, lease_ms=60_000)
        with app.database.begin() as conn:
            assert lease.extend(conn, [(held.id, held.lease_token)], lease_ms=90_000)
        if outcome == "lost":
            guard.advance(engine, 90_000)
            assert len(kit.rescue(app)) == 1
        else:
            assert kit.settle(app, held, outcome)
    guard.check(engine)
    assert app.jobs.get(job.id).state == "finished"
