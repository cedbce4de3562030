"""Counting failed jobs where there are many: each queue and error is shown, and no number is too small."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, text

import sqlq
from sqlq.database.dialects import dialect_of
from sqlq.database.sql import distinct
from sqlq.model.outcome import ErrorText, Failed
from sqlq.store.jobs import failed
from sqlq.store.jobs.lookup import Selection
from tests.kit import NOW, needs, received, span

pytestmark = pytest.mark.each_database

COLUMNS = (
    "queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases, "
    "created_at, reason, exception, message, fingerprint, failed_at"
)


def fail(
    app: sqlq.App, rows: int, queue: str, task: str, error: str, *, first: int, column: str = ""
) -> None:
    """Insert failed jobs, one a second until now; `column` computes the fingerprint of each from `i`."""
    kind = app.database.dialect.name
    at = f"{NOW[kind]} - {span(app.database.engine, 1)} * ({rows} - i)"
    if kind == "mariadb":
        at = f"{NOW[kind]} - INTERVAL {rows} - i SECOND"
    with app.database.begin() as conn:
        if kind == "mariadb":
            conn.exec_driver_sql("SET SESSION max_recursive_iterations = 1000000")
        prefix = f"{app.database.schema}." if kind == "postgresql" else ""
        conn.execute(
            text(
                f"INSERT INTO {prefix}failed_jobs (id, {COLUMNS}) "
                f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) "
                f"SELECT {first} + i, '{queue}', '{task}', '{{}}', 0, 1, {NOW[kind]}, 1, 'finish', 0, "
                f"{NOW[kind]}, 'error', '{error}', 'it broke', {column or repr(error)}, {at} FROM n"
            )
        )


@pytest.fixture
def burst(app: sqlq.App) -> sqlq.App:
    """50,000 failed jobs of three errors in three queues; the newest 10,000 are all of one queue."""
    fail(app, 15_000, "mail", "shop.send", "SMTPError", first=0)
    fail(app, 20_000, "exports", "shop.export", "DiskFull", first=20_000)
    fail(app, 15_000, "bulk", "shop.crunch", "KeyError", first=60_000)
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
    assert group.last_at - group.first_at == pytest.approx(
        timedelta(seconds=15_000), abs=timedelta(seconds=300)
    )
    assert sum(group.over_time) == pytest.approx(15_000, rel=0.05)
    assert min(group.over_time) > 0


def test_an_error_in_several_queues_is_one_group(app: sqlq.App) -> None:
    fail(app, 3, "mail", "shop.send", "SMTPError", first=0)
    fail(app, 4, "bulk", "shop.send", "SMTPError", first=10)
    fail(app, 5, "bulk", "shop.bill", "SMTPError", first=20)
    assert numbers(app) == {("shop.send", "SMTPError"): 7, ("shop.bill", "SMTPError"): 5}
    assert app.jobs.failures()[0][0].newest == 14
    with app.database.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET batch_key = 'b' WHERE id > 13"))
    assert numbers(app, batch="b") == {("shop.bill", "SMTPError"): 5, ("shop.send", "SMTPError"): 1}


def test_a_number_beyond_the_bound_is_an_estimate(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(app, 300_000, "mail", "shop.send", "SMTPError", first=0)
    fail(app, 100, "mail", "shop.send", "Other", first=400_000)
    (queue,) = app.queues.list()
    assert queue.failed == pytest.approx(300_000, rel=0.2)
    assert queue.estimated == ("failed",)
    many, few = app.jobs.failures()[0]
    assert many.number == pytest.approx(300_000, rel=0.2)
    assert many.estimated == ("number",)
    assert (few.number, few.estimated) == (100, ())
    assert sum(many.over_time) == pytest.approx(300_000, rel=0.2)
    assert many.last_at - many.first_at == timedelta(seconds=299_999), "the oldest is not in the sample"
    monkeypatch.setattr(failed, "ROWS", 50)
    monkeypatch.setattr(failed, "TIMES", 50)
    many, few = app.jobs.failures()[0]
    assert (many.estimated, few.estimated) == (("number",), ("number",))


def test_a_sample_has_odd_and_even_ids(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(app, 20_000, "mail", "shop.send", "E", first=0, column="CAST(i % 2 AS CHAR(1))")
    monkeypatch.setattr(failed, "TIMES", 100)
    for each in app.jobs.failures()[0]:
        assert sum(number > 0 for number in each.over_time) > len(each.over_time) / 2, each


@needs("cheap")
def test_a_probe_steps_over_all_jobs_of_an_error(app: sqlq.App) -> None:
    with app.database.read() as conn:
        with received(conn) as got:
            conn.execute(distinct(dialect_of(conn).sql, failed._COLUMNS, 10)).all()
        ((statement, parameters),) = got
        plan = str(conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all())
    for place in ("queue=? AND task=? AND fingerprint<?", "queue=? AND task<?", "queue<?"):
        assert f"failed_jobs_error ({place})" in plan


def test_distinct_errors_without_end_are_bounded(app: sqlq.App) -> None:
    fail(app, 100_000, "mail", "shop.send", "E", first=1_000, column="CAST(i AS CHAR(12))")
    fail(app, 5_000, "mail", "shop.send", "Zzz", first=200_000)
    groups, is_complete = app.jobs.failures()
    assert (len(groups), is_complete) == (failed.KEYS, False)
    assert (groups[0].fingerprint, groups[0].number) == ("Zzz", 5_000), "the sample has what is frequent"
    with app.database.read() as conn:
        found, is_complete = failed.groups(conn, Selection(queue="mail"))
        assert (len(found), is_complete) == (failed.KEYS, False)
        with received(conn) as sent:
            failed.queues(conn, 10)
        assert read(app, conn, sent) < 2_000


def read(app: sqlq.App, conn: Connection, sent: list[tuple[str, Any]]) -> int:
    """Return the most rows of failed_jobs that a plan of these statements reads at once."""
    kind, most = app.database.dialect.name, 0
    for statement, parameters in sent:
        if kind == "postgresql":
            plan = conn.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            most = max(most, _rows_in(plan[0]["Plan"]))
        elif kind == "sqlite":
            plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            scans = [
                row[3] for row in plan if row[3].startswith("SCAN failed_jobs") and "USING" not in row[3]
            ]
            assert not scans, plan
        else:
            plan = conn.exec_driver_sql(f"EXPLAIN {statement}", parameters).mappings().all()
            assert all("index" in str(row["Extra"]) for row in plan), plan
    return most


def _rows_in(node: dict[str, Any]) -> int:
    own = node["Actual Rows"] if "Relation Name" in node else 0
    return int(max([own, *(_rows_in(child) for child in node.get("Plans", ()))]))


def test_a_fingerprint_leaves_out_what_varies() -> None:
    def of(message: str, exception: str = "ValueError") -> str:
        return Failed("error", ErrorText(exception, message)).fingerprint

    assert of("order 17 of 'ada' is gone\nx") == of("order 4711 of 'bob' is gone\ny")
    assert len({of("a"), of("b"), of("a", "KeyError")}) == 3
    assert len(of("a")) == 12
