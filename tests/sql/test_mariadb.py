"""How MariaDB runs the statements: how many rows each reads and locks, whatever the size of the tables is.

A statement that reads a row locks it, if it locks at all. So a filesort, or the scan of a small table, makes
workers wait for one another, or deadlock.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

import sqlq
from sqlq.database.database import Database
from sqlq.database.mariadb.dialect import MariaDBSql
from sqlq.model.checks import Rule
from sqlq.model.outcome import Finished
from sqlq.model.schedule import Declared, Schedule
from sqlq.store import audit, schedules
from sqlq.store.events import free
from sqlq.store.flows import unblock
from sqlq.store.jobs import insert as inserting
from sqlq.store.jobs import lease, operate, settle
from sqlq.store.jobs.lookup import Selection
from sqlq.store.limits import admit
from sqlq.store.signals import waits
from sqlq.store.workers import workers
from tests.kit import claim_on, for_each
from tests.kit.databases import fresh_database
from tests.kit.mariadb import MariaDB
from tests.sql.statements import STATEMENTS, claim_two, end_many, limited, new

pytestmark = pytest.mark.integration

SIZES = (0, 60, 10_000)
HELD_BY_OTHERS = 500
READ, LOCKED = 150, 20
"""The most rows that a statement may read, in tables and in batches, and those that a verb may lock."""
READS_MORE = {"rescue": 700, "sweep_limits": 300, "look": 900, "replay": 3 * SIZES[-1]}
"""A rescue reads each reserved job. A replay by task reads all ended jobs, without a lock."""


def held_rights(held: list[Any]) -> list[tuple[int, int]]:
    return [(job.id, job.lease_token) for job in held]


def some(conn: Connection, table: str) -> list[int]:
    """Return the ids of two jobs of the table that nobody holds."""
    query = f"SELECT id FROM {table} WHERE reserved_at IS NULL AND queue = 'mail' LIMIT 2"
    return list(conn.scalars(text(query)))


def on(conn: Connection) -> Any:
    """Return a database whose transactions are this one."""

    def within() -> Any:
        return nullcontext(conn)

    return SimpleNamespace(begin=within, read=within, run=lambda work: work(conn), encryption=None)


def operate_schedules(conn: Connection, held: list[Any]) -> None:
    plan = Schedule(every="1m")
    schedules.add(conn, "a", plan, new())
    schedules.pause(conn, "a")
    schedules.resume(conn, "a")
    schedules.tick(on(conn), at=workers.moment(conn).replace(year=2090))
    schedules.remove(conn, "a")
    schedules.follow(on(conn), {"b": Declared("b", plan, new())}, None, [], lambda: 0)


def operate_workers(conn: Connection, held: list[Any]) -> None:
    workers.register(conn, id="me", host="h", pid=1, version="1", queues=["third"], concurrency=1)
    workers.stand_in(conn, ["me"], lease_ms=30_000)
    workers.request(conn, ["me"], "pause")
    workers.write_state(conn, "me", "paused")
    admit.sweep_on(conn, "", 500)


def pause_queue(conn: Connection, held: list[Any]) -> None:
    for _ in range(2):
        workers.pause_queue(conn, "third", lasting_ms=-1_000)
    workers.end_pauses(conn)
    workers.resume_queue(conn, "third")


def set_limit(conn: Connection, held: list[Any]) -> None:
    inserting.insert(conn, [limited()])
    admit.pin(conn, "stripe", Rule(1))


def prune_audit(conn: Connection, held: list[Any]) -> None:
    audit.end(conn, audit.begin(conn, "ada", "pause", "sqlq queues pause"), 1)
    audit.prune(conn, -60_000)


def wait_for_signal(conn: Connection, held: list[Any]) -> None:
    for keep_ms in (-60_000, 60_000):  # the first expires at once, and is replaced
        waits.signal(conn, "s", "1", keep_ms)
    waits.begin(conn, [(job.id, "s", None) for job in inserting.insert(conn, [new()])])
    free.look(conn)
    waits.prune(conn, 10)


def unblock_two(conn: Connection) -> None:
    """Unblock a step that may run, and one that never can."""
    conn.execute(
        text(
            "INSERT INTO jobs (id, task, flow_id, blocked_by, available_at) "
            "VALUES (9000001, 't', 1, 'flow', '9998-01-01'), (9000002, 't', 1, 'flow', '9998-01-01')"
        )
    )
    edges = "(9000001, 8000001, 'ended'), (9000002, 8000001, 'success')"
    conn.execute(text(f"INSERT INTO sqlq_edges (job_id, depends_on, on_outcome) VALUES {edges}"))
    judged = unblock._judge_on(conn, [8000001], are_ended=True)
    assert [row.id for row in judged] == [9000001, 9000002]
    assert unblock._follow_up(conn, judged) == ([9000002], [])


MORE: dict[str, Callable[[Connection, list[Any]], Any]] = {
    "cancel": lambda conn, held: operate.cancel(conn, [*some(conn, "jobs"), held[0].id]),
    "cancel_forced": lambda conn, held: operate.cancel(conn, [job.id for job in held], force=True),
    "complete_own": lambda conn, held: settle.complete(conn, held_rights(held)[0], Finished(None)),
    "forget_failed": lambda conn, held: operate.forget(conn, Selection(tuple(some(conn, "failed_jobs")))),
    "give_back": lambda conn, held: settle.give_back(conn, held_rights(held)),
    "insert_met": lambda conn, held: [inserting.insert(conn, [new(unique_key=key)]) for key in "aa"],
    "lose": lambda conn, held: settle.lose(conn, held_rights(held), "died"),
    "operate_schedules": operate_schedules,
    "operate_workers": operate_workers,
    "pause_queue": pause_queue,
    "progress": lambda conn, held: lease.note(
        conn, [lease.Note(*right, 1, 2, "half", None) for right in held_rights(held)]
    ),
    "prune_audit": prune_audit,
    "reschedule": lambda conn, held: operate.change(conn, some(conn, "jobs"), delay_ms=60_000),
    "retry_failed": lambda conn, held: operate.retry_failed(
        conn, Selection(tuple(some(conn, "failed_jobs")), "t")
    ),
    "set_limit": set_limit,
    "unblock": lambda conn, held: unblock_two(conn),
    "wait_for_signal": wait_for_signal,
    "skip": lambda conn, held: settle.skip(conn, (some(conn, "failed_jobs") or [1])[0], "no"),
}
"""The verbs that lock rows and are none of the hot ones."""
ALL = {**STATEMENTS, **MORE}


@pytest.fixture(scope="module", params=SIZES)
def database(request: pytest.FixtureRequest, mariadb: MariaDB) -> Iterator[Database]:
    """A database with so many jobs in each table, and some that another worker holds."""
    with fresh_database(mariadb) as url, closing(sqlq.App(url)) as app:
        app.migrate()
        fill(app.database, request.param)
        yield app.database


def fill(database: Database, number: int) -> None:
    if not number:
        return
    with database.begin() as conn:
        conn.execute(
            text(
                f"INSERT INTO jobs (queue, task, payload, priority, available_at, unique_key) "
                f"SELECT IF(seq % 3, 'mail', 'other'), 't', '{{}}', seq % 2, "
                f"UTC_TIMESTAMP(6) + INTERVAL IF(seq % 5, -1, 1) HOUR, IF(seq % 7, NULL, seq) "
                f"FROM seq_1_to_{number}"
            )
        )
        for place, table in enumerate(("finished", "failed"), 1):  # with the ids of other jobs
            end_many(conn, table, f"id + {place}000000", "UTC_TIMESTAMP(6) + INTERVAL 1 DAY")
        claim_on(conn, ["other"], limit=HELD_BY_OTHERS, owner="somebody")
    with database.engine.connect() as conn:
        conn.exec_driver_sql("ANALYZE TABLE jobs, finished_jobs, failed_jobs")


def row_locks(conn: Connection) -> int:
    """Return how many rows the transaction has locked. The data of information_schema is a tenth of a second
    old."""
    thread = conn.exec_driver_sql("SELECT CONNECTION_ID()").scalar()
    status = conn.exec_driver_sql("SHOW ENGINE INNODB STATUS").one()[2]
    found = re.search(rf"(\d+) row lock\(s\)[^\n]*\n(?:[^-\n]*\n)?MariaDB thread id {thread},", status)
    return int(found[1]) if found else 0


def reads(conn: Connection) -> int:
    status = "SHOW SESSION STATUS LIKE 'Handler_read%'"
    rows = conn.execution_options(no_parameters=True).exec_driver_sql(status)
    return sum(int(count) for _, count in rows)


@for_each("name", ALL)
def test_a_statement_reads_and_locks_a_bounded_number_of_rows(database: Database, name: str) -> None:
    with database.connect() as conn, conn.begin() as transaction:
        held = [] if name.startswith("claim") else claim_two(conn) or two(conn)
        transaction.rollback()
    with database.connect() as conn, conn.begin() as transaction:
        if held:
            claim_two(conn) or two(conn)
        counts: list[tuple[int, str]] = []
        before: list[int] = []
        plans: list[str] = []

        def begins(*given: Any) -> None:
            if not before and not OURS.match(given[2]):
                parameters = given[3][0] if isinstance(given[3], list) else given[3]
                plans.extend(refused(given[0], given[2], parameters))
                before.append(reads(given[0]))

        def ends(*given: Any) -> None:
            if before and not OURS.match(given[2]):
                counts.append((reads(given[0]) - before.pop(), given[2]))

        locked = row_locks(conn)
        event.listen(conn, "before_cursor_execute", begins)
        event.listen(conn, "after_cursor_execute", ends)
        with suppress(pytest.skip.Exception):
            ALL[name](conn, held)
        event.remove(conn, "before_cursor_execute", begins)
        event.remove(conn, "after_cursor_execute", ends)
        locks = row_locks(conn) - locked
        transaction.rollback()
    assert counts
    assert not plans, "\n\n".join(plans)
    for count, statement in counts:
        assert count <= READS_MORE.get(name, READ), f"{count} rows read by {statement}"
    assert locks <= LOCKED, f"{locks} rows locked"


OURS = re.compile("SHOW SESSION STATUS|EXPLAIN")
_LOCKS = re.compile(
    r"\s*(SET STATEMENT .*? FOR )?(?P<statement>UPDATE .*|DELETE .*|SELECT .* (FOR UPDATE|LOCK IN SHARE).*)",
    re.DOTALL,
)


def refused(conn: Connection, statement: str, parameters: Any) -> list[str]:
    """Return the steps of a statement that locks rows, if they sort, or read a whole table of jobs."""
    locks = _LOCKS.match(statement)
    if locks is None:
        return []
    steps = conn.exec_driver_sql(f"EXPLAIN {locks['statement']}", parameters).mappings().all()
    return [
        f"{dict(step)}\n{statement}"
        for step in steps
        if "filesort" in (step["Extra"] or "")
        or (str(step["table"]).endswith("jobs") and step["type"] in ("ALL", "index"))
    ]


def two(conn: Connection) -> list[Any]:
    conn.execute(text("INSERT INTO jobs (queue, task) VALUES ('mail', 't'), ('mail', 't')"))
    return claim_two(conn)


def test_each_statement_that_locks_is_run(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    """By the test above: a new call of a verb that locks needs a row in its table."""
    called: set[tuple[str, int]] = set()

    def noted(verb: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            called.add((frame.f_code.co_filename, frame.f_lineno))
            return verb(*given, **named)

        return run

    verbs = ("lock", "change", "move")
    for name in verbs:
        monkeypatch.setattr(MariaDBSql, name, noted(getattr(MariaDBSql, name)))
    for run in ALL.values():
        with database.connect() as conn, conn.begin() as transaction, suppress(pytest.skip.Exception):
            run(conn, claim_two(conn) or two(conn))
            transaction.rollback()
    missing = []
    for path in Path(settle.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if node.func.attr in verbs and not any((str(path), line) in called for line in lines):
                    missing.append(f"{path.name}, line {node.lineno}: {ast.unparse(node)}")
    assert not missing, "\n".join(missing)
