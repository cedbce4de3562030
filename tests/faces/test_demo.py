"""`sqlq demo`: what it shows is what happened, and it leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

import sqlq
from tests.faces.command import Command


def _holds(output: str) -> None:
    assert "40 transactions committed an order each" in output
    assert "one more order and its job were rolled back: 40 orders and 40 jobs are there" in output
    assert re.search(r"demo.charge_card .*attempt 1 of 5\) failed .*TimeoutError", output)
    assert re.search(r"demo.charge_card .*attempt 2 of 5\) finished", output)
    assert re.search(r"demo.ship_abroad .*attempt 2 of 2\) failed for good", output)
    assert "1 failed, 41 finished" in output
    assert re.search(r"^demo\.\w+( +0){4} +1 +- +no worker$", output, re.MULTILINE), "as sqlq status has it"
    assert len(output.splitlines()) <= 60


def test_the_demo_needs_nothing_and_leaves_nothing(bare: Command, tmp_path: Path) -> None:
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    before = sorted(tmp_path.iterdir())
    _holds(
        bare.ok(
            "demo",
            env={"TMPDIR": str(elsewhere), "SQLQ_DATABASE_URL": "postgresql://nobody@nowhere.invalid/none"},
        )
    )
    assert sorted(tmp_path.iterdir()) == before
    assert list(elsewhere.iterdir()) == []


def test_the_demo_on_a_database_in_use_touches_only_its_own_jobs(
    bare: Command, database_url: str, app: sqlq.App, engine: Engine
) -> None:
    with engine.begin() as conn:
        conn.execute(text("INSERT INTO jobs (queue, task) VALUES ('mail', 'somebody.elses')"))
    _holds(bare.ok("-d", database_url, "demo"))
    assert [(job.queue, job.task, job.attempts) for job in app.jobs.list()] == [("mail", "somebody.elses", 0)]
    assert not [name for name in inspect(engine).get_table_names() if "demo" in name]
    assert app.workers.list() == []
    assert (app.schedules.list(), app.flows.list()) == ([], [])


def test_the_demo_needs_the_tables_of_a_database_that_is_named(
    bare: Command, empty_database_url: str
) -> None:
    assert "migrate" in bare("-d", empty_database_url, "demo").sentence()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_demo_refuses_to_run_beside_a_worker_of_all_queues(
    sqlq_: Command, bare: Command, database_url: str
) -> None:
    with sqlq_.working():
        sqlq_.wait_for_worker()
        assert "a worker that serves all queues is running" in bare("-d", database_url, "demo").sentence()
