"""Looking at jobs and counting them, however many there are: what is shown, and how much of the tables is
read for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.admin import failures
from sqlq.model.job import State
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Finished
from sqlq.store import health
from sqlq.store.jobs import failed as failed_rows
from sqlq.store.jobs import lookup
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from tests.kit import NOW, Hand, claim_on, failed, needs, received, span

pytestmark = pytest.mark.each_database

MAIL: dict[str, Any] = {"queue": "mail", "priority": 100}


def fail(hand: Hand, count: int = 1, message: str = "boom", queue: str = "mail") -> list[int]:
    return hand.ended(count, failed(message), **{**MAIL, "queue": queue})


def status(hand: Hand, **how: Any) -> dict[str, tuple[Any, ...]]:
    return {
        s.queue: (s.available, s.scheduled, s.running, s.failed, s.capped)
        for s in hand.app.queues.list(**how)
    }


def test_a_count_stops_at_a_bound(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    hand.enqueue(4, queue="mail")
    hand.enqueue(2, queue="mail", priority=7)
    hand.enqueue(3, queue="mail", delay="1h", priority=-7)
    hand.enqueue(1, queue="other", delay="1h")
    fail(hand, 2)
    hand.enqueue(4, queue="third")
    with hand.app.database.begin() as conn:
        claim_on(conn, ["third"], limit=3, owner="w")
    all_of_them = {"mail": (6, 3, 0, 2, ()), "other": (0, 1, 0, 0, ()), "third": (1, 0, 3, 0, ())}
    assert status(hand) == status(hand, exact=True) == all_of_them
    oldest = [queue.oldest_wait_seconds for queue in hand.app.queues.list()]
    assert [wait is None for wait in oldest] == [False, True, False]
    assert oldest[0] == pytest.approx(hand.app.queues.list(exact=True)[0].oldest_wait_seconds, abs=5)

    monkeypatch.setattr(health, "COUNT_LIMIT", 3)
    # running and failed jobs are counted over all queues: any may have more
    assert status(hand) == {
        "mail": (3, 3, 0, 2, ("available", "scheduled", "running")),
        "other": (0, 1, 0, 0, ("running",)),
        "third": (1, 0, 3, 0, ("running",)),
    }
    monkeypatch.setattr(health, "COUNT_LIMIT", 2)
    assert status(hand)["other"] == (0, 1, 0, 0, ("running",))
    assert status(hand, exact=True) == all_of_them


def test_with_many_queues_and_priorities_each_count_ends_sooner(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.enqueue(4, queue="mail")
    hand.enqueue(1, queue="mail", priority=1)
    hand.enqueue(1, queue="other")
    monkeypatch.setattr(health, "ROW_LIMIT", 9)
    monkeypatch.setattr(health, "COUNT_MINIMUM", 1)
    assert status(hand) == {"mail": (4, 0, 0, 0, ("available",)), "other": (1, 0, 0, 0, ())}, (
        "three rows of each queue and priority, and what the priorities of a queue have is added up"
    )


def test_failures_are_counted_by_their_error(hand: Hand) -> None:
    fail(hand, 2, "no box\nof size 1")
    (newest,) = fail(hand, 1, "no box\nof size 2")
    fail(hand, 1, "no van", queue="other")
    (lost,) = hand.ended(1, Failed("worker_lost", ErrorText("WorkerLostError", "gone")), **MAIL)
    found, complete = hand.app.jobs.failures()
    assert complete
    assert [(each.task, each.error, each.number) for each in found] == [
        ("send", "ValueError: no box", 3),
        ("send", "worker_lost: WorkerLostError: gone", 1),
        ("send", "ValueError: no van", 1),
    ]
    assert [each.newest for each in found[:2]] == [newest, lost]
    assert [each.error for each in hand.app.jobs.failures(queue="other")[0]] == ["ValueError: no van"]
    assert hand.app.jobs.failures(task="pack") == ([], True)


def test_jobs_of_one_error_are_found_in_each_queue_and_task(hand: Hand) -> None:
    fail(hand, 2, "no box of size 1")
    fail(hand, 1, "no van")
    (other,) = fail(hand, 1, "no box of size 7", queue="other")
    with hand.app.database.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET task = 'pack' WHERE id = :id"), {"id": other})
    fingerprint = hand.app.jobs.get(other).fingerprint
    assert fingerprint is not None
    with hand.app.database.read() as conn:
        selections = failed_rows.of_error(conn, fingerprint)
        assert [(each.queue, each.task) for each in selections] == [("mail", "send"), ("other", "pack")]
        assert [len(lookup.handles(conn, each)) for each in selections] == [2, 1]
        assert [each.queue for each in failed_rows.of_error(conn, fingerprint, queue="mail")] == ["mail"]
        assert [each.queue for each in failed_rows.of_error(conn, fingerprint, task="pack")] == ["other"]
        assert failed_rows.of_error(conn, "") == []
    assert hand.app.jobs.retry(error=fingerprint)[-1] == other


# -- listing -------------------------------------------------------------------------------------------------


def test_a_listing_reports_whether_it_is_complete(hand: Hand) -> None:
    (old,) = hand.enqueue(1, queue="rare")
    running = hand.enqueue(1, queue="busy")
    with hand.app.database.begin() as conn:
        claim_on(conn, ["busy"], limit=1, owner="w")
    newer = hand.enqueue(5, queue="mail")
    listing = hand.app.jobs.list

    def ids(**how: Any) -> tuple[list[int], bool]:
        found = listing(**how)
        return [job.id for job in found], found.complete

    assert ids(queue="rare", within=5) == ([], False)
    assert ids(queue="rare", within=7) == ([old], True)
    assert ids(queue="rare", within=None) == ([old], True)
    assert ids(limit=5, within=5) == (newer[::-1], True), "five were wanted, and there they are"
    assert ids(state="running", within=5) == (running, True), "an index has these"
    assert [job.id for job in hand.app.jobs.list(queue="rare")] == [old]
    failed = fail(hand, 1, queue="rare")
    assert ids(queue="rare", limit=1, within=5) == (failed, True), "what was not looked at is older"
    assert ids(queue="rare", limit=2, within=5) == (failed, False)


def test_the_error_of_a_job_is_the_text_that_the_view_has(hand: Hand, engine: Engine) -> None:
    ids = [
        *fail(hand, 1, "two\nlines"),
        *hand.ended(1, Cancelled("not wanted"), **MAIL),
        *hand.ended(1, Finished("1"), **MAIL),
        *hand.ended(1, Finished(None, note="the result was too long"), **MAIL),
        *hand.enqueue(),
    ]
    with engine.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET reason = 'timeout'"))
        rows = conn.execute(text("SELECT id, error FROM job_states")).all()
        errors: dict[int, str | None] = {row.id: row.error for row in rows}
    assert {id: hand.app.jobs.get(id).error for id in ids} == errors
    assert [hand.app.jobs.get(id).error for id in ids] == [
        "ValueError: two\nlines",
        "not wanted",
        None,
        "the result was too long",
        None,
    ]
    with engine.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET exception = NULL"))
        assert conn.scalar(text("SELECT error FROM job_states WHERE state = 'failed'")) == "timeout"
    assert hand.app.jobs.get(ids[0]).error == "timeout"


def test_a_job_shows_its_timeout_and_unique_key(hand: Hand) -> None:
    (id,) = hand.enqueue(timeout="5s", unique_key="k", unique_until="start")
    job = hand.app.jobs.get(id)
    assert (job.timeout_ms, job.unique_key, job.unique_until) == (5_000, "k", "start")


# -- what is read for it -------------------------------------------------------------------------------------

WAITING = 60_000


@pytest.fixture
def crowded(app: sqlq.App) -> sqlq.App:
    """A database in which a careless count would read some thousand pages. The planner has no statistics.

    In the index scheduled jobs of a higher priority lie before due ones. Few jobs are of another queue.
    """
    kind = app.database.dialect.name
    postgresql = kind == "postgresql"
    now = NOW[kind]
    soon, later = now, f"{now} + {span(app.database.engine, 86_400)}"
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)"
    columns = (
        "queue, task, payload, priority, attempts, max_attempts, available_at, lease_token, unique_until, "
        "releases, created_at"
    )
    with app.database.begin() as conn:
        prefix = f"{app.database.schema}." if postgresql else ""
        if kind == "mariadb":
            conn.exec_driver_sql("SET SESSION max_recursive_iterations = 100000")
        if postgresql:
            for table in ("jobs", "finished_jobs", "failed_jobs"):
                conn.execute(text(f"ALTER TABLE {prefix}{table} SET (autovacuum_enabled = off)"))
        for queue, priority, due, rows in (
            ("mail", 5, later, WAITING),
            ("mail", 0, soon, WAITING),
            ("rare", 0, soon, 10),
        ):
            conn.execute(
                text(
                    f"INSERT INTO {prefix}jobs (queue, task, priority, available_at) {numbers} "
                    f"SELECT '{queue}', 't', {priority}, {due} FROM n"
                ),
                {"rows": rows},
            )
        ended = f"SELECT id, {columns}, {{0}}, created_at FROM {prefix}jobs WHERE queue = 'mail'"
        conn.execute(
            text(
                f"INSERT INTO {prefix}finished_jobs (id, {columns}, outcome, finished_at) "
                f"{ended.format(chr(39) + 'finished' + chr(39))}"
            )
        )
        conn.execute(
            text(
                f"INSERT INTO {prefix}failed_jobs (id, {columns}, reason, failed_at) "
                f"{ended.format(chr(39) + 'error' + chr(39))}"
            )
        )
        claim_on(conn, ["rare"], limit=5, owner="w")
    return app


LOOKS: dict[str, Callable[[Connection], Any]] = {
    "capped": health.capped,
    "listing": lambda conn: lookup.listing(conn, limit=20, within=1_000),
    "listing_queue": lambda conn: lookup.listing(
        conn, selection=lookup.Selection(queue="nowhere"), limit=20, within=1_000
    ),
    "listing_available": lambda conn: lookup.listing(conn, state=State.AVAILABLE, limit=20, within=1_000),
    "listing_running": lambda conn: lookup.listing(conn, state=State.RUNNING, limit=20, within=1_000),
    "failures": lambda conn: failures.grouped(conn, lookup.Selection()),
    "reserved": workers.reserved,
    "stuck": lambda conn: health.stuck(conn, longer_than_ms=1_000),
    "unknown": health.unknown_tasks,
}
"""The queries of `status`, `jobs`, `workers`, and `doctor`."""
NEED_STATISTICS = {
    *("reserved", "stuck", "failures", "unknown"),
    *("listing_queue", "listing_available", "listing_running"),
}
"""The others are bounded whatever the planner takes the tables for."""


@needs("plans")
def test_postgresql_reads_a_bounded_number_of_pages(
    crowded: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "COUNT_LIMIT", 500)
    monkeypatch.setattr(health, "SAMPLE_JOBS", 100)
    for bound in ("EXACT", "ROWS", "TIMES"):
        monkeypatch.setattr(failed_rows, bound, 100)
    for analyzed in (False, True):
        reads_few_pages(crowded, analyzed=analyzed)


def reads_few_pages(crowded: sqlq.App, *, analyzed: bool) -> None:
    if analyzed:
        with crowded.database.connect(isolation_level="AUTOCOMMIT") as conn:
            conn.exec_driver_sql("VACUUM ANALYZE")  # an index alone has the times
    with crowded.database.read() as conn:
        assert conn.scalar(text("SELECT pg_relation_size('jobs') / 8192")) > 1_000
        for name in LOOKS if analyzed else LOOKS.keys() - NEED_STATISTICS:
            with received(conn) as got:
                LOOKS[name](conn)
            assert got
            for statement, parameters in got:
                if not analyzed and "GROUP BY public.failed_jobs.queue" in statement:
                    continue  # the sample, whose rows are looked up until there was a vacuum
                (plan,) = conn.exec_driver_sql(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
                ).scalar_one()
                touched = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
                assert touched <= 250, f"{name}: {touched} pages\n{json.dumps(plan, indent=1)}"
                # from there on PostgreSQL compiles a statement, which takes a third of a second
                assert plan["Plan"]["Total Cost"] < 100_000, f"{name}\n{json.dumps(plan, indent=1)}"


@needs("mariadb")
def test_mariadb_reads_a_bounded_number_of_rows(crowded: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "COUNT_LIMIT", 500)
    monkeypatch.setattr(health, "SAMPLE_JOBS", 100)
    for bound in ("EXACT", "ROWS", "TIMES"):
        monkeypatch.setattr(failed_rows, bound, 100)
    with crowded.database.connect(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("ANALYZE TABLE jobs, finished_jobs, failed_jobs")
    with crowded.database.read() as conn:
        for name, look in {**LOOKS, "keys": sweep}.items():
            before = rows_read(conn)
            look(conn)
            assert rows_read(conn) - before <= 10_000, name


def sweep(conn: Connection) -> Any:
    return admit.sweep_on(conn, "", 500)


def rows_read(conn: Connection) -> int:
    """Return the number of rows that a session of MariaDB has read."""
    return sum(int(number) for _, number in conn.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'"))


@needs("file")
def test_sqlite_reads_by_indexes(crowded: sqlq.App) -> None:
    """A table is read by itself only from its newest job backwards, up to a limit."""
    with crowded.database.read() as conn:
        for name, look in LOOKS.items():
            with received(conn) as got:
                look(conn)
            assert got
            for statement, parameters in got:
                plan = [row[3] for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
                scans = [step for step in plan if re.match(r"SCAN main\.(jobs|\w+_jobs)$", step)]
                assert not scans or "LIMIT" in statement, f"{name}: {plan}"
