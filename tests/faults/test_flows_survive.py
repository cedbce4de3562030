"""Flows while their workers are killed: every step runs after what it waits for, and becomes free once."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import sqlq
from tests.faults.load import MODULE
from tests.faults.scorecard import record
from tests.kit import wait_until
from tests.kit.processes import WorkerProcess

pytestmark = pytest.mark.integration

FLOWS, WIDTH = 8, 3
LATE_SECONDS = 60
"""Far more than a sweep takes to come, on a machine that is busy with other things."""


def watch(engine: Engine) -> None:
    """Note each step that becomes free, in the transaction that frees it."""
    frees = "OLD.blocked_by = 'flow' AND NEW.blocked_by IS NULL"
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE freed (id BIGINT NOT NULL)"))
        begins, note = "CREATE TRIGGER note_freed AFTER UPDATE ON jobs", "INSERT INTO freed VALUES (NEW.id);"
        if engine.dialect.name == "sqlite":
            conn.execute(text(f"{begins} WHEN {frees} BEGIN {note} END"))
            return
        if engine.dialect.name == "mariadb":
            conn.execute(text(f"{begins} FOR EACH ROW IF {frees} THEN {note} END IF"))
            return
        conn.execute(
            text(
                "CREATE FUNCTION note_freed() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN {note} RETURN NULL; END $$"
            )
        )
        conn.execute(text(f"{begins} FOR EACH ROW WHEN ({frees}) EXECUTE FUNCTION note_freed()"))


def live(engine: Engine) -> int:
    with engine.connect() as conn:
        return int(conn.scalar(text("SELECT count(*) FROM jobs")) or 0)


def is_down_to(engine: Engine, number: int) -> bool:
    return live(engine) <= number


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_no_step_is_lost_or_freed_twice_while_workers_are_killed(
    app: sqlq.App, database_url: str, engine: Engine, tmp_path: Path, kills: int
) -> None:
    seed = 20_261_125
    chance = random.Random(seed)
    watch(engine)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "work.py").write_text(MODULE)
    note = app.task(name="work.note", max_attempts=50)(lambda n: None)

    def enqueue(some: int) -> None:
        # in one transaction: else a worker has done most of them before the last is there
        with engine.begin() as conn:
            for n in range(some):
                first = note.map([n] * WIDTH)
                steps = sqlq.chain(first, note.new(n), sqlq.group(note.new(n), note.new(n)), note.new(n))
                app.enqueue(steps, session=conn)

    def started() -> WorkerProcess:
        worker = WorkerProcess(folder, "work:app", database_url, "-c", "2", "--lease", "2s")
        worker.wait_ready()
        return worker

    worker = started()
    try:
        for _ in range(kills):
            enqueue(FLOWS)
            until = max(0, live(engine) - chance.randint(1, FLOWS * WIDTH))  # in the middle, wherever that is
            wait_until(partial(is_down_to, engine, until), timeout=60, what="some steps ended")
            worker.kill()
            worker = started()
        wait_until(partial(is_down_to, engine, 0), timeout=120, what="all flows at their ends")
    finally:
        worker.kill()
    with engine.connect() as conn:
        by_state = text("SELECT state, count(*) FROM job_states GROUP BY state")
        states = {row.state: row[1] for row in conn.execute(by_state)}
        freed = list(conn.scalars(text("SELECT id FROM freed")))
        seconds = {
            "postgresql": "EXTRACT(EPOCH FROM f.available_at - max(p.finished_at))",
            "sqlite": "(f.available_at - max(p.finished_at)) / 1000.0",
            "mariadb": "TIMESTAMPDIFF(MICROSECOND, max(p.finished_at), f.available_at) / 1000000",
        }[engine.dialect.name]
        waits = list(
            conn.scalars(
                text(
                    f"SELECT {seconds} FROM finished_jobs f JOIN sqlq_edges e ON e.job_id = f.id "
                    "JOIN finished_jobs p ON p.id = e.depends_on GROUP BY f.id, f.available_at"
                )
            )
        )
        early = conn.scalar(
            text(
                "SELECT count(*) FROM finished_jobs f JOIN sqlq_edges e ON e.job_id = f.id "
                "JOIN finished_jobs p ON p.id = e.depends_on WHERE f.reserved_at < p.finished_at"
            )
        )
    flows = FLOWS * kills
    steps = flows * (WIDTH + 4)
    lost, twice = flows * 4 - len(set(freed)), len(freed) - len(set(freed))
    late = sum(wait > LATE_SECONDS for wait in waits)
    record(
        "G11: flows whose workers are killed",
        cases=steps,
        seed=seed,
        steps_lost=lost,
        steps_unblocked_twice=twice,
        late_unblocks=late,
        early=early,
    )
    assert states == {"finished": steps}
    assert (lost, twice, late, early) == (0, 0, 0, 0)
    assert len(waits) == flows * 4
