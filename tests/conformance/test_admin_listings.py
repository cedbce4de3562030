"""Looking at jobs and counting them, however many there are: what is shown, and how much of the tables is
read for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
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
from tests.kit import NOW, Hand, claim_on, failed, for_each, insert_many, needs, received, rows_read, span
from tests.kit.plans import explained, pages, walk

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
    said = ["ValueError: two\nlines", "not wanted", None, "the result was too long", None]
    assert [hand.app.jobs.get(id).error for id in ids] == said
    with engine.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET exception = NULL"))
        assert conn.scalar(text("SELECT error FROM job_states WHERE state = 'failed'")) == "timeout"
    assert hand.app.jobs.get(ids[0]).error == "timeout"


# -- what is read for it -------------------------------------------------------------------------------------

WAITING = 60_000


@pytest.fixture
def crowded(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> sqlq.App:
    """A database in which a careless count would read some thousand pages. The planner has no statistics.

    In the index scheduled jobs of a higher priority lie before due ones. Few jobs are of another queue.
    """
    monkeypatch.setattr(health, "COUNT_LIMIT", 500)
    monkeypatch.setattr(health, "SAMPLE_JOBS", 100)
    for bound in ("EXACT", "ROWS", "TIMES"):
        monkeypatch.setattr(failed_rows, bound, 100)
    kind = app.database.dialect.name
    soon, later = NOW[kind], f"{NOW[kind]} + {span(app.database.engine, 86_400)}"
    carried = "queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases"
    with app.database.begin() as conn:
        if kind == "postgresql":
            for table in ("jobs", "finished_jobs", "failed_jobs"):
                conn.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        into = "jobs (queue, task, priority, available_at)"
        insert_many(conn, WAITING, into, f"'mail', 't', 5, {later}")
        insert_many(conn, WAITING, into, f"'mail', 't', 0, {soon}")
        insert_many(conn, 10, into, f"'rare', 't', 0, {soon}")
        for columns, values in (
            ("finished_jobs (outcome, finished_at", "'finished'"),
            ("failed_jobs (reason, failed_at", "'error'"),
        ):
            conn.exec_driver_sql(
                f"INSERT INTO {columns}, id, created_at, {carried}) "
                f"SELECT {values}, created_at, id, created_at, {carried} FROM jobs WHERE queue = 'mail'"
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
    "counts_batch": lambda conn: lookup.counts(conn, lookup.Selection(batch="import-42")),
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
@for_each("analyzed", [False, True])
def test_postgresql_reads_a_bounded_number_of_pages(crowded: sqlq.App, analyzed: bool) -> None:
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
                plan = explained(conn, statement, parameters)
                assert pages(plan) <= 250, f"{name}: {json.dumps(plan, indent=1)}"
                # from there on PostgreSQL compiles a statement, which takes a third of a second
                assert plan["Total Cost"] < 100_000, f"{name}: {json.dumps(plan, indent=1)}"


def sweep(conn: Connection) -> Any:
    return admit.sweep_on(conn, "", 500)


@needs("mariadb")
def test_mariadb_reads_a_bounded_number_of_rows(crowded: sqlq.App) -> None:
    with crowded.database.connect(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("ANALYZE TABLE jobs, finished_jobs, failed_jobs")
    with crowded.database.read() as conn:
        for name, look in (LOOKS | {"keys": sweep}).items():
            with received(conn) as got:
                look(conn)
            assert sum(rows_read(conn, *statement) for statement in got) <= 10_000, name


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


@needs("file")
def test_a_probe_steps_over_all_jobs_of_an_error(app: sqlq.App) -> None:
    with app.database.read() as conn:
        with received(conn) as sent:
            failed_rows.groups(conn, lookup.Selection())
        plan = str([conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {said}", given).all() for said, given in sent])
    for place in ("queue=? AND task=? AND fingerprint<?", "queue=? AND task<?", "queue<?"):
        assert f"failed_jobs_error ({place})" in plan


# -- failed jobs, where there are many -----------------------------------------------------------------------


COLUMNS = (
    "queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases, "
    "created_at, reason, exception, message, fingerprint, failed_at"
)


def insert_failed(
    app: sqlq.App, rows: int, queue: str, task: str, error: str, *, first: int, column: str = ""
) -> None:
    """Insert failed jobs, one a second until now; `column` computes the fingerprint of each from `i`."""
    kind = app.database.dialect.name
    at = f"{NOW[kind]} - {span(app.database.engine, 1)} * ({rows} - i)"
    if kind == "mariadb":
        at = f"{NOW[kind]} - INTERVAL {rows} - i SECOND"
    values = (
        f"{first} + i, '{queue}', '{task}', '{{}}', 0, 1, {NOW[kind]}, 1, 'finish', 0, {NOW[kind]}, "
        f"'error', '{error}', 'it broke', {column or repr(error)}, {at}"
    )
    with app.database.begin() as conn:
        insert_many(conn, rows, f"failed_jobs (id, {COLUMNS})", values)


@pytest.fixture
def burst(app: sqlq.App) -> sqlq.App:
    """50,000 failed jobs of three errors in three queues; the newest 10,000 are all of one queue."""
    insert_failed(app, 15_000, "mail", "shop.send", "SMTPError", first=0)
    insert_failed(app, 20_000, "exports", "shop.export", "DiskFull", first=20_000)
    insert_failed(app, 15_000, "bulk", "shop.crunch", "KeyError", first=60_000)
    return app


def numbers(app: sqlq.App, **only: Any) -> dict[tuple[str, str], int]:
    groups, is_complete = app.jobs.failures(**only)
    assert is_complete
    return {(each.task, each.fingerprint): each.number for each in groups}


def test_every_queue_and_error_is_counted_beyond_the_newest_10_000(burst: sqlq.App) -> None:
    queues = {each.queue: (each.failed, each.capped, each.estimated) for each in burst.queues.list()}
    assert queues == {"mail": (15_000, (), ()), "exports": (20_000, (), ()), "bulk": (15_000, (), ())}
    assert numbers(burst) == {
        ("shop.export", "DiskFull"): 20_000,
        ("shop.send", "SMTPError"): 15_000,
        ("shop.crunch", "KeyError"): 15_000,
    }
    exports = {("shop.export", "DiskFull"): 20_000}
    assert numbers(burst, queue="exports") == exports
    assert numbers(burst, task="shop.export") == exports
    assert numbers(burst, queue="exports", task="shop.export") == exports
    assert numbers(burst, error="DiskFull") == exports
    assert numbers(burst, queue="nowhere") == numbers(burst, task="mail") == numbers(burst, error="?") == {}
    assert burst.queues._vitals()[0] == {"error": 50_000}
    assert burst.jobs._counts(("failed",), error="DiskFull") == {"failed": 20_000}
    (group,), _ = burst.jobs.failures(queue="mail")
    assert group.newest == 15_000
    lasted = (group.last_at - group.first_at).total_seconds()
    assert lasted == pytest.approx(15_000, abs=300)
    assert sum(group.over_time) == pytest.approx(15_000, rel=0.05)
    assert min(group.over_time) > 0


def test_a_number_beyond_the_bound_is_an_estimate(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    insert_failed(app, 300_000, "mail", "shop.send", "SMTPError", first=0)
    insert_failed(app, 100, "mail", "shop.send", "Other", first=400_000)
    (queue,) = app.queues.list()
    assert queue.failed == pytest.approx(300_000, rel=0.2)
    assert queue.estimated == ("failed",)
    many, few = app.jobs.failures()[0]
    assert many.number == pytest.approx(300_000, rel=0.2)
    assert many.estimated == ("number",)
    assert (few.number, few.estimated) == (100, ())
    assert sum(many.over_time) == pytest.approx(300_000, rel=0.2)
    assert many.last_at - many.first_at == timedelta(seconds=299_999), "the oldest is not in the sample"
    monkeypatch.setattr(failed_rows, "ROWS", 50)
    monkeypatch.setattr(failed_rows, "TIMES", 50)
    many, few = app.jobs.failures()[0]
    assert (many.estimated, few.estimated) == (("number",), ("number",))


def test_distinct_errors_without_end_are_bounded(app: sqlq.App) -> None:
    insert_failed(app, 100_000, "mail", "shop.send", "E", first=1_000, column="CAST(i AS CHAR(12))")
    insert_failed(app, 5_000, "mail", "shop.send", "Zzz", first=200_000)
    groups, is_complete = app.jobs.failures()
    assert (len(groups), is_complete) == (failed_rows.KEYS, False)
    assert (groups[0].fingerprint, groups[0].number) == ("Zzz", 5_000), "the sample has what is frequent"
    with app.database.read() as conn:
        found, is_complete = failed_rows.groups(conn, lookup.Selection(queue="mail"))
        assert (len(found), is_complete) == (failed_rows.KEYS, False)
        with received(conn) as sent:
            failed_rows.queues(conn, 10)
        assert all(reads_few(conn, *statement) for statement in sent)


def reads_few(conn: Connection, statement: str, parameters: Any) -> bool:
    """Whether no part of the plan reads many rows of failed_jobs."""

    def plan(explain: str) -> Any:
        return conn.exec_driver_sql(f"{explain} {statement}", parameters)

    match conn.dialect.name:
        case "postgresql":
            nodes = walk(explained(conn, statement, parameters))
            return not [node for node in nodes if "Relation Name" in node and node["Actual Rows"] >= 2_000]
        case "mariadb":
            return all("index" in str(row["Extra"]) for row in plan("EXPLAIN").mappings())
        case _:
            steps = [row[3] for row in plan("EXPLAIN QUERY PLAN")]
            return not [step for step in steps if re.match("SCAN failed_jobs(?!.*USING)", step)]


def test_a_fingerprint_leaves_out_what_varies() -> None:
    def of(message: str, exception: str = "ValueError") -> str:
        return Failed("error", ErrorText(exception, message)).fingerprint

    assert of("order 17 of 'ada' is gone\nx") == of("order 4711 of 'bob' is gone\ny")
    assert len({of("a"), of("b"), of("a", "KeyError")}) == 3
    assert len(of("a")) == 12
