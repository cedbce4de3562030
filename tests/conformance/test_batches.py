"""Jobs of separate calls that share a `batch`: found, counted, waited for, and acted on together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

import sqlq
import sqlq.testing
from sqlq.store.jobs import lookup
from tests.kit import drain, needs, working

pytestmark = pytest.mark.each_database

IMPORT = "import-42"


@pytest.fixture
def load(app: sqlq.App) -> Any:
    @app.task(name="load", max_attempts=1)
    def load(line: int) -> int:
        if line < 0:
            raise ValueError("no such line")
        return line * 2

    return load


def enqueued(app: sqlq.App, load: Any, *lines: int, batch: str = IMPORT, **options: Any) -> list[sqlq.Job]:
    """Enqueue each job by a call of its own."""
    return [app.enqueue(load.new(line).set(batch=batch, **options)) for line in lines]


def test_a_batch_has_the_jobs_of_separate_calls_in_all_tables(app: sqlq.App, load: Any) -> None:
    jobs = enqueued(app, load, 1, -1) + app.enqueue_many([load.new(2).set(batch=IMPORT), load.new(3)])[:1]
    drain(app)
    jobs += enqueued(app, load, 4, delay="1h")
    enqueued(app, load, 5, batch="import-43")
    found = app.jobs.of_batch(IMPORT)
    assert [(job.id, job.task, job.queue) for job in found] == [(job.id, "load", "default") for job in jobs]
    assert [job.state for job in found] == ["finished", "failed", "finished", "scheduled"]
    assert app.jobs.counts(batch=IMPORT) == {"finished": 2, "failed": 1, "scheduled": 1}
    assert app.jobs.get(jobs[0].id).batch_key == IMPORT
    assert app.jobs.of_batch("import") == []
    assert app.jobs.counts(batch="import") == {}


def test_a_batch_is_waited_for_and_has_results(app: sqlq.App, load: Any) -> None:
    enqueued(app, load, 1, 2, 3)
    with working(app):
        done = app.wait_all(app.jobs.of_batch(IMPORT), timeout="30s")
    assert len(done.ended) == 3
    assert not done.pending
    batch = app.jobs.of_batch(IMPORT)
    assert app.result(batch) == [2, 4, 6]
    assert app.result([batch[2].id, batch[0].id], raw=True) == [6, 2]
    assert asyncio.run(app.aresult(batch)) == [2, 4, 6]
    assert asyncio.run(app.jobs.acounts(batch=IMPORT)) == {"finished": 3}
    assert app.result(app.jobs.of_batch("none")) == []


def test_the_results_of_a_batch_raise_for_a_job_that_failed(app: sqlq.App, load: Any) -> None:
    enqueued(app, load, 1, -1)
    drain(app)
    with pytest.raises(sqlq.JobFailedError, match="no such line"):
        app.result(app.jobs.of_batch(IMPORT))


def test_failed_jobs_of_a_batch_are_counted_and_stay_in_it_when_they_run_again(
    app: sqlq.App, load: Any
) -> None:
    mine, other = enqueued(app, load, -1)[0], enqueued(app, load, -2, batch="b")[0]
    drain(app)
    found, complete = app.jobs.failures(batch="b")
    assert ([each.number for each in found], complete) == ([1], True)
    (copy,) = app.jobs.replay(batch="b").values()
    assert [each.id for each in app.jobs.of_batch("b")] == [other.id, copy]
    assert app.jobs.retry(batch=IMPORT) == [mine.id]
    assert app.jobs.get(mine.id).batch_key == IMPORT


def test_listings_find_an_old_batch(app: sqlq.App, load: Any) -> None:
    job = enqueued(app, load, 1)[0]
    app.enqueue_many([load.new(n) for n in range(5)])
    found = app.jobs.list(batch=IMPORT, within=2)
    assert [each.id for each in found] == [job.id]
    assert found.complete
    assert [each.id for each in app.jobs.list(state="available", limit=10, within=2, batch=IMPORT)] == [
        job.id
    ]
    assert [each.id for each in app.jobs.list(batch=IMPORT, task="load")] == [job.id]


def test_a_batch_comes_by_name_by_replacement_and_by_sql(app: sqlq.App, load: Any) -> None:
    app.enqueue(app.named("load").new(1).set(batch=IMPORT))
    app.enqueue(load.new(1).set(unique_key="k"))
    app.enqueue(load.new(2).set(unique_key="k", on_conflict="replace", batch=IMPORT))
    app.enqueue(sqlq.chain(load.new(3).set(batch=IMPORT), load.new(4)))
    app.enqueue(load.new(5).set(limit=sqlq.Limit("one", running=1), batch=IMPORT))
    with app.database.begin() as conn:
        conn.execute(text("INSERT INTO jobs (task, batch_key) VALUES ('load', 'import-42')"))
        states = conn.execute(text("SELECT state FROM job_states WHERE batch_key = 'import-42'")).all()
    assert len(states) == len(app.jobs.of_batch(IMPORT)) == 5


@needs("plans")
def test_an_index_finds_the_jobs_of_a_batch(app: sqlq.App, load: Any) -> None:
    app.enqueue_many([load.new(n) for n in range(2_000)])
    enqueued(app, load, 1)
    with app.database.begin() as conn:
        conn.exec_driver_sql("ANALYZE jobs")
        plan = conn.exec_driver_sql("EXPLAIN SELECT id FROM jobs WHERE batch_key = 'import-42' ORDER BY id")
        assert "jobs_batch" in "".join(row[0] for row in plan)
        assert lookup.counts(conn, lookup.Selection(batch=IMPORT)) == {"available": 1}
