"""`sqlq demo`: what it shows is what happened, and it leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, inspect, make_url, text

import sqlq
from tests.faces.command import Command


def _rows(said: str, heading: str) -> list[list[str]]:
    after = said[re.search(rf"^{heading}\s*$", said, re.MULTILINE).end() :]  # type: ignore[union-attr]
    return [line.split() for line in after.strip("\n").split("\n\n")[0].splitlines()]


def _holds(said: str) -> None:
    assert "40 transactions" in said
    assert "one more order and its job were rolled back: there are 40 orders and 40 jobs" in said
    assert re.search(r"job \d+ is scheduled", said)
    assert re.search(r"49 jobs ended within [\d.]+ m?s: 1 failed, 48 finished", said)
    assert re.search(r"flow \d+ is a chain: .*; 2 of its 4 jobs are blocked", said)
    assert len(re.findall(r"schedule demo.count_stock\S+: job \d+ for ", said)) == 2
    returned = "a box with a teapot, a box with a cup, 2 boxes posted, thanked for 2 boxes posted"
    assert re.search(rf"flow \d+ is finished, and its steps returned: {returned}", said)
    assert re.search(r"demo.charge_card .*attempt 1 of 5\) failed .*TimeoutError", said)
    assert re.search(r"demo.charge_card .*attempt 2 of 5\) finished", said)
    assert re.search(r"demo.ship_abroad .*attempt 2 of 2\) failed for good", said)
    assert _rows(said, r"task +state +jobs +least +most") == [
        ["demo.charge_card", "finished", "1", "2", "2"],
        ["demo.count_stock", "finished", "2", "1", "1"],
        ["demo.pack", "finished", "2", "1", "1"],
        ["demo.post", "finished", "1", "1", "1"],
        ["demo.remind", "finished", "1", "1", "1"],
        ["demo.send_receipt", "finished", "40", "1", "1"],
        ["demo.ship_abroad", "failed", "1", "2", "2"],
        ["demo.thank", "finished", "1", "1", "1"],
    ]
    ((_, task, attempts, *error),) = _rows(said, r"id +task +attempts +error")
    assert (task, attempts, " ".join(error)) == ("demo.ship_abroad", "2", "LookupError: no such country")


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


def test_the_demo_drops_the_tables_that_it_made(bare: Command, empty_database_url: str) -> None:
    _holds(bare.ok("-d", empty_database_url, "demo"))
    if empty_database_url.startswith("sqlite"):
        assert not Path(make_url(empty_database_url).database or "").exists()
    else:
        engine = create_engine(empty_database_url)
        assert inspect(engine).get_table_names() == ["sqlq_version"]
        engine.dispose()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_demo_refuses_to_run_beside_a_worker_of_all_queues(
    sqlq_: Command, bare: Command, database_url: str
) -> None:
    with sqlq_.working():
        sqlq_.wait_for_worker()
        assert "a worker that serves all queues is running" in bare("-d", database_url, "demo").sentence()
