"""The hot statements as calls, which tests of their texts, plans and costs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from sqlq.database import dialects
from sqlq.database.database import Database
from sqlq.database.schemas import execute_on
from sqlq.database.values import Claimant, ClaimRequest, LookRequest
from sqlq.model.checks import Rule
from sqlq.model.history import AttemptTimes
from sqlq.model.job import NewJob
from sqlq.model.outcome import ErrorText, Failed, Finished, Outcome, Released, Retried, Settlement, settlement
from sqlq.store.flows import unblock
from sqlq.store.jobs import insert as inserting
from sqlq.store.jobs import lease, operate, settle
from sqlq.store.jobs.lookup import Selection
from sqlq.store.limits import admit as admission
from sqlq.store.workers import workers
from tests.kit import claim_on

FOLLOWER = '{"task": "shop.thank", "queue": "mail"}'
ERROR = ErrorText("ValueError", "no", "Traceback")
CARRIED = """queue, task, payload, priority, attempts, max_attempts, available_at, lease_token, unique_until,
    releases, created_at"""
"""The columns that an ended job must keep."""
RULE = Rule(max_running=5)
SLOWED = Released(1_000, snoozed=True, closes=True)


def compare_with_golden(name: str, database: Database, got: list[tuple[str, Any]]) -> None:
    """Compare what a database has received with the golden file of this name, or write that again."""
    kind = database.engine.dialect.name
    actual = "".join(f"{statement.strip()};\n\n" for statement, _ in got)
    if kind == "mariadb":
        actual = actual.replace(str(database.schema), "shop")  # each test's database has a name of its own
    golden = Path(__file__).parent / kind / f"{name}.sql"
    if os.environ.get("SQLQ_TEST_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(actual)
    assert actual == golden.read_text(), (
        f"{golden.name} is not what the database receives: SQLQ_TEST_WRITE_GOLDEN=1 writes it again"
    )


def end_many(
    conn: Connection, table: str, id: str, at: str, retention: str = "NULL", where: str = "1 = 1"
) -> None:
    """Copy jobs to the finished or failed ones, with this id, end and retention, as SQL."""
    column, end = {"finished": ("outcome", "finished"), "failed": ("reason", "error")}[table]
    into = f"{table}_jobs (id, {CARRIED}, {column}, {table}_at, retention_ms)"
    values = f"{id}, {CARRIED}, '{end}', {at}, {retention}"
    conn.execute(text(f"INSERT INTO {into} SELECT {values} FROM jobs WHERE {where}"))


def new(**options: Any) -> NewJob:
    return NewJob(task="shop.send_receipt", payload='{"args": [7]}', queue="mail", max_attempts=5, **options)


def limited(rule: Rule = RULE) -> NewJob:
    return new(limit_key="stripe", rule=rule)


def admit(conn: Connection, rule: Rule) -> Any:
    inserting.insert(conn, [limited(rule)])
    return admission.look_on(conn, (), limit=500)


def claim_two(conn: Connection) -> list[Any]:
    return claim_on(conn, ["mail"], limit=2)


def claim_beyond(conn: Connection) -> Any:
    dialect = dialects.dialect_named(conn.dialect.name)
    if dialect.in_a_file:
        pytest.skip("here each claim begins at the head")
    positions = [("mail", 1, 0, 0), ("mail", 0, 0, 0), ("empty", 0, 0, 0)]
    wanted = ClaimRequest(["mail", "empty"], 2, positions=positions)
    return dialect.sql.claim(execute_on(conn), wanted, Claimant("me", 30_000))


def due_in(conn: Connection, names: list[str], after: str | None = None) -> Any:
    return dialects.dialect_named(conn.dialect.name).sql.due_in(execute_on(conn), names, after)


def look(conn: Connection) -> Any:
    dialect = dialects.dialect_named(conn.dialect.name)
    if dialect.in_a_file:
        pytest.skip("here no lookout looks: a connection sees what others commit")
    wanted = LookRequest([], "", "sqlq", 30_000, maintenance=True, workers=[])
    return dialect.sql.look(execute_on(conn), wanted)


def ended(held: list[Any], outcome: Outcome, **options: Any) -> list[Settlement]:
    return [Settlement(job.id, job.lease_token, job.attempts, outcome, **options) for job in held]


def settle_with(outcome: Outcome, **options: Any) -> Callable[[Connection, list[Any]], Any]:
    return lambda conn, held: settle.settle(conn, ended(held, outcome, **options))


def replay_all(conn: Connection, held: list[Any]) -> Any:
    settle_with(Finished("1"))(conn, held)
    return operate.replay(conn, operate.ended(conn, Selection(task="shop.send_receipt")))


REPLACING = new(unique_key="a", on_conflict="debounce", max_wait_ms=60_000, delay_ms=1_000)
STATEMENTS: dict[str, Callable[[Connection, list[Any]], Any]] = {
    "insert": lambda conn, held: inserting.insert(conn, [new()]),
    "steps_beyond": lambda conn, held: conn.execute(
        unblock.STEPS_BEYOND, {"flow": 0, "step": 0, "most": 1_000}
    ),
    "insert_many": lambda conn, held: inserting.insert(conn, [new(), new()]),
    "insert_unlike": lambda conn, held: inserting.insert(conn, [new(), new(priority=3)]),
    "insert_keyed": lambda conn, held: inserting.insert(conn, [new(unique_key="a")]),
    "claim": lambda conn, held: claim_two(conn),
    "claim_newest": lambda conn, held: claim_on(conn, ["mail"], limit=2, order="newest"),
    "claim_beyond": lambda conn, held: claim_beyond(conn),
    "complete": settle_with(Finished("1")),
    "complete_later": settle_with(Finished("1"), course=AttemptTimes()),
    "complete_followed": lambda conn, held: settle.settle(
        conn, [settlement(job._replace(on_success=FOLLOWER), Finished("1")) for job in held]
    ),
    "fail": settle_with(Failed("error", ERROR)),
    "retry": settle_with(Retried(1_000, ERROR)),
    "release": settle_with(Released()),
    "insert_limited": lambda conn, held: inserting.insert(conn, [limited()]),
    "slow_down": lambda conn, held: settle_with(SLOWED, limit_key="stripe")(conn, held[:1]),
    "retry_limited": settle_with(Retried(1_000, ERROR), limit_key="stripe"),
    "admit": lambda conn, held: admit(conn, Rule(5)),
    "admit_in_order": lambda conn, held: admit(conn, Rule(1, in_order=True)),
    "admit_at_a_rate": lambda conn, held: admit(conn, Rule(5, 100, 60_000)),
    "forget_keys": lambda conn, held: admission.forget_unused(conn, unused_ms=1_000, limit=1_000),
    "sweep_limits": lambda conn, held: admission.sweep_on(conn, "", 500),
    "extend": lambda conn, held: lease.extend(conn, [(j.id, j.lease_token) for j in held], lease_ms=30_000),
    "stand_in": lambda conn, held: workers.stand_in(conn, ["me"], lease_ms=30_000),
    "rescue": lambda conn, held: settle.rescue(conn),
    "insert_replacing": lambda conn, held: inserting.insert(conn, [REPLACING]),
    "insert_expiring": lambda conn, held: inserting.insert(conn, [new(start_within_ms=1_000)]),
    "checkpoint": lambda conn, held: lease.save(conn, (held[0].id, held[0].lease_token), None, "7"),
    "due_in": lambda conn, held: due_in(conn, ["mail"]),
    "due_in_window": lambda conn, held: due_in(conn, ["mail"], ""),
    "look": lambda conn, held: look(conn),
    "replay": replay_all,
    "prune": lambda conn, held: operate.prune(conn, older_than_ms=1_000, limit=1_000),
    "prune_expired": lambda conn, held: operate.prune_expired(conn, limit=1_000),
}
"""Each verb as a call; `held` are two jobs it may work on."""
