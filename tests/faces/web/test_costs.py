"""How much of the tables the pages read, however many jobs there are. The clock decides nothing here."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.outcome import Finished
from sqlq.store import health
from sqlq.store.jobs.failed import TRACE_CHARACTERS, groups
from sqlq.store.jobs.lookup import Selection
from sqlq.web import pages
from tests import kit
from tests.kit import end, failed, needs
from tests.kit.plans import explained
from tests.kit.plans import pages as pages_of
from tests.kit.visitor import Visitor

WAITING, FAILED = 60_000, 5_000
FILL = """
INSERT INTO jobs (queue, task, payload, priority, available_at, label)
SELECT CASE WHEN n % 100 < 99 THEN 'mail' ELSE 'rare' END, 'shop.send', repeat('x', 200), n % 3,
       now() + ((n % 10 - 8) || ' minutes')::interval, 'tenant-' || n % 1000
  FROM generate_series(1, {waiting}) n;
INSERT INTO finished_jobs (id, {columns}, outcome, finished_at)
SELECT 1000000 + n, {values}, 'finished', t
  FROM (SELECT n, now() - (n * 50 || ' ms')::interval AS t FROM generate_series(1, {waiting}) n) AS ended;
INSERT INTO failed_jobs (id, {columns}, reason, exception, message, traceback, failed_at)
SELECT 2000000 + n, {values}, 'error', 'ValueError', 'order ' || n || ' has no box',
       (SELECT string_agg(md5(n::text || i), '') FROM generate_series(1, 94) i), t
  FROM (SELECT n, now() - (n * 90 || ' ms')::interval AS t FROM generate_series(1, {failed}) n) AS ended;
""".format(
    waiting=WAITING,
    failed=FAILED,
    columns=(
        "queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, lease_token, "
        "unique_until, releases, created_at"
    ),
    values="'mail', 'shop.send', repeat('x', 200), 0, 1, 5, t, t, 1, 'finish', 0, t",
)
STATES = (f"/jobs?state={state}" for state in ("available", "scheduled", "cancelled"))
NOWHERE = (f"/jobs?{field}=nowhere" for field in ("queue", "label", "text"))
PAGES = {"/": 3_500, "/failures": 2_000, "/jobs?since=9d": 1_000, "/queues": 600, "/jobs": 150}
PAGES |= dict.fromkeys((*STATES, *NOWHERE), 500)
PAGES |= dict.fromkeys(("/workers", "/flows", "/schedules", "/limits", "/audit"), 100)
"""The pages of the database that each may touch. Each table has over 2,000, and most looks are at three."""


@pytest.fixture
def crowded(app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> sqlq.App:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql(FILL.replace("%", "%%"))
        conn.exec_driver_sql("VACUUM ANALYZE")
    monkeypatch.setattr(health, "COUNT_LIMIT", 500)
    monkeypatch.setattr(health, "ROW_LIMIT", 5_000)
    monkeypatch.setattr(health, "SAMPLE_JOBS", 100)
    monkeypatch.setattr(pages, "SEARCHED", 1_000)
    return app


def received(visitor: Visitor, path: str) -> list[tuple[str, Any]]:
    """Return the statements that a page sends, with their parameters."""
    engine = visitor.site.reading.app.database.engine
    reading = visitor.site.reading
    reading.forget()
    visitor.page("/queues")
    for address, key in [*reading._kept]:
        if key not in ("summary", "names"):  # which all pages share
            del reading._kept[address, key]
    with kit.received(engine) as got:
        visitor.page(path)
    return got


@needs("plans")
def test_a_page_touches_few_pages_of_large_tables(crowded: sqlq.App, engine: Engine) -> None:
    visitor = Visitor(crowded)
    with engine.begin() as conn:
        for table in ("jobs", "finished_jobs"):
            assert conn.scalar(text(f"SELECT pg_relation_size('{table}') / 8192")) > 2_000
        for path, most in PAGES.items():
            touched, seen = 0, []
            for statement, parameters in received(visitor, path):
                if not re.match(r"\s*(SELECT|WITH)", statement) or "set_config" in statement:
                    continue
                plan = explained(conn, statement, parameters)
                blocks = pages_of(plan)
                touched += blocks
                seen.append((blocks, statement[:300]))
                # from there on PostgreSQL compiles a statement, which takes a third of a second
                assert plan["Total Cost"] < 100_000, f"{path}\n{json.dumps(plan, indent=1)}"
            assert seen, path
            assert touched <= most, (path, touched, sorted(seen, reverse=True)[:3])


def test_the_end_of_a_traceback_is_read(app: sqlq.App) -> None:
    task = app.task(name="send", max_attempts=1)(lambda: None)
    app.enqueue(task.new())
    (id,) = end(app, failed("boom", "é" * 4_000 + "€nd"))
    with app.database.read() as conn:
        (group,) = groups(conn, Selection())[0].values()
    assert group.newest.id == id
    trace = group.newest.traceback
    assert trace == "é" * (TRACE_CHARACTERS - 3) + "€nd"


def test_a_slow_query_is_cached_longer(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, number, moment = Visitor(app).site.reading, itertools.count(), 0.0
    monkeypatch.setattr("sqlq.web.reading.time", SimpleNamespace(monotonic=lambda: moment))

    def look(app: sqlq.App) -> int:
        nonlocal moment
        moment += 0.1
        return next(number)

    assert reading.fresh("slow", look) == 0
    for waited, found in ((1.5, 0), (1.0, 1), (9.0, 1), (1.5, 2)):
        moment += waited
        assert reading.fresh("slow", look) == found, moment


def test_lists_of_jobs_read_no_large_field(app: sqlq.App) -> None:
    secret = "x" * 10_000
    task = app.task(name="send", max_attempts=1)(lambda text="": None)
    for outcome in (Finished(result=f'"{secret}"'), failed("boom", secret)):
        app.enqueue(task.new(secret))
        end(app, outcome)
    app.enqueue(task.new(secret))
    visitor = Visitor(app)
    visitor.page("/jobs")
    ((kept, *_),) = [entry[2:3] for key, entry in visitor.site.reading._kept.items() if "jobs" in str(key)]
    assert len(kept) == 3
    assert secret not in repr(kept)
    assert secret not in visitor.get("/api/v1/jobs").text
    assert all(job.payload["args"] == [secret] for job in app.jobs.list())
    (ended,) = app.jobs.list(state="finished", whole=False)
    assert (ended.payload, ended.result, ended.traceback) == (None, None, None)


def test_kept_answers_are_bounded(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Visitor(app).site.reading
    monkeypatch.setattr("sqlq.web.reading.KEPT_LIMIT", 3)
    for key in ("a", "b", "c", "a", "d"):
        reading.fresh(key, lambda app: 1, seconds=0)
    assert [key for _, key in reading._kept] == ["c", "a", "d"]
