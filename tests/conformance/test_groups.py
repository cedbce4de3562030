"""Jobs of separate calls that share a `group`: found, counted, waited for, and acted on together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

import sqlq
import sqlq.testing
from sqlq.store.jobs import lookup
from sqlq.testing import inline
from tests.kit import drain, working

IMPORT = "import-42"


@pytest.fixture
def load(app: sqlq.App) -> Any:
    @app.task(name="load", max_attempts=1)
    def load(line: int) -> int:
        if line < 0:
            raise ValueError("no such line")
        return line * 2

    return load


def enqueued(app: sqlq.App, load: Any, *lines: int, group: str = IMPORT, **options: Any) -> list[sqlq.Job]:
    """Enqueue each job by a call of its own."""
    return [app.enqueue(load.new(line).set(group=group, **options)) for line in lines]


def test_a_group_has_the_jobs_of_separate_calls_in_all_tables(app: sqlq.App, load: Any) -> None:
    jobs = enqueued(app, load, 1, -1) + app.enqueue_many([load.new(2).set(group=IMPORT), load.new(3)])[:1]
    drain(app)
    jobs += enqueued(app, load, 4, delay="1h")
    enqueued(app, load, 5, group="import-43")
    found = app.jobs.of_group(IMPORT)
    assert [(job.id, job.task, job.queue) for job in found] == [(job.id, "load", "default") for job in jobs]
    assert [job.state for job in found] == ["finished", "failed", "finished", "scheduled"]
    assert app.jobs.counts(group=IMPORT) == {"finished": 2, "failed": 1, "scheduled": 1}
    assert app.jobs.get(jobs[0].id).group_key == IMPORT
    assert app.jobs.of_group("import") == []
    assert app.jobs.counts(group="import") == {}


def test_a_group_is_waited_for_and_has_results(app: sqlq.App, load: Any) -> None:
    enqueued(app, load, 1, 2, 3)
    with working(app):
        done = app.wait_all(app.jobs.of_group(IMPORT), timeout="30s")
    assert len(done.ended) == 3
    assert not done.pending
    group = app.jobs.of_group(IMPORT)
    assert app.result(group) == [2, 4, 6]
    assert app.result([group[2].id, group[0].id], raw=True) == [6, 2]
    assert asyncio.run(app.aresult(group)) == [2, 4, 6]
    assert asyncio.run(app.jobs.acounts(group=IMPORT)) == {"finished": 3}
    assert app.result(app.jobs.of_group("none")) == []


def test_the_results_of_a_group_raise_for_a_job_that_failed(app: sqlq.App, load: Any) -> None:
    enqueued(app, load, 1, -1)
    drain(app)
    with pytest.raises(sqlq.JobFailedError, match="no such line"):
        app.result(app.jobs.of_group(IMPORT))


def test_a_cancel_takes_a_group_and_leaves_the_others(app: sqlq.App, load: Any) -> None:
    mine = enqueued(app, load, 1, 2)
    other, plain = enqueued(app, load, 3, group="b")[0], app.enqueue(load.new(4))
    assert set(app.jobs.cancel(group=IMPORT)) == {job.id for job in mine}
    assert app.jobs.cancel([other.id], group=IMPORT) == {other.id: "passed over"}
    assert [app.jobs.get(job.id).state for job in (other, plain)] == ["available"] * 2


def test_failed_jobs_of_a_group_are_retried_and_deleted_and_counted(app: sqlq.App, load: Any) -> None:
    mine, other = enqueued(app, load, -1)[0], enqueued(app, load, -2, group="b")[0]
    drain(app)
    found, complete = app.jobs.failures(group="b")
    assert ([each.number for each in found], complete) == ([1], True)
    assert app.jobs.retry(group=IMPORT) == [mine.id]
    assert app.jobs.get(mine.id).group_key == IMPORT
    assert app.jobs.delete(group="b") == [other.id]
    assert app.jobs.reschedule(group=IMPORT, delay="1h") == [mine.id]


def test_replayed_jobs_are_in_their_group(app: sqlq.App, load: Any) -> None:
    job, other = enqueued(app, load, 1)[0], enqueued(app, load, 2, group="b")[0]
    drain(app)
    done = app.jobs.replay(group=IMPORT)
    assert list(done) == [job.id]
    assert [each.id for each in app.jobs.of_group(IMPORT)] == [job.id, done[job.id]]
    assert [each.id for each in app.jobs.of_group("b")] == [other.id]


def test_listings_find_an_old_group(app: sqlq.App, load: Any) -> None:
    job = enqueued(app, load, 1)[0]
    app.enqueue_many([load.new(n) for n in range(5)])
    found = app.jobs.listing(group=IMPORT, within=2)
    assert [each.id for each in found.jobs] == [job.id]
    assert found.complete
    assert app.jobs.ids(states=["available"], limit=10, within=2, group=IMPORT) == [job.id]
    assert [each.id for each in app.jobs.list(group=IMPORT, task="load")] == [job.id]


def test_a_group_comes_by_name_by_replacement_and_by_sql(app: sqlq.App, load: Any) -> None:
    app.enqueue(app.named("load").new(1).set(group=IMPORT))
    app.enqueue(load.new(1).set(unique_key="k"))
    app.enqueue(load.new(2).set(unique_key="k", on_conflict="replace", group=IMPORT))
    app.enqueue(sqlq.chain(load.new(3).set(group=IMPORT), load.new(4)))
    app.enqueue(load.new(5).set(limit=sqlq.Limit("one", running=1), group=IMPORT))
    with app.database.begin() as conn:
        conn.execute(text("INSERT INTO jobs (task, group_key) VALUES ('load', 'import-42')"))
        states = conn.execute(text("SELECT state FROM job_states WHERE group_key = 'import-42'")).all()
    assert len(states) == len(app.jobs.of_group(IMPORT)) == 5


@pytest.mark.parametrize("group", ["", "g" * 256, 7])
def test_a_group_that_no_column_can_have_is_refused(app: sqlq.App, load: Any, group: Any) -> None:
    with pytest.raises(sqlq.EnqueueError, match="group"):
        load.new(1).set(group=group)
    with pytest.raises(sqlq.errors.ConfigurationError, match="group"):
        app.jobs.of_group(group)
    with pytest.raises(sqlq.errors.ConfigurationError, match="group"):
        app.jobs.cancel(group=group)


def test_jobs_run_inline_are_in_their_group(app: sqlq.App, load: Any) -> None:
    with inline(app):
        enqueued(app, load, 1, 2)
        app.enqueue(load.new(3))
        assert app.result(app.jobs.of_group(IMPORT)) == [2, 4]
        assert app.jobs.counts(group=IMPORT) == {"finished": 2}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_index_finds_the_jobs_of_a_group(app: sqlq.App, load: Any) -> None:
    app.enqueue_many([load.new(n) for n in range(2_000)])
    enqueued(app, load, 1)
    with app.database.begin() as conn:
        conn.exec_driver_sql("ANALYZE jobs")
        plan = conn.exec_driver_sql("EXPLAIN SELECT id FROM jobs WHERE group_key = 'import-42' ORDER BY id")
        assert "jobs_group" in "".join(row[0] for row in plan)
        assert lookup.counts(conn, lookup.Selection(group=IMPORT)) == {"available": 1}
