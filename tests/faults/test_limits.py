"""Limits while workers are killed in the middle of their jobs.

Never do more jobs run at a time, no slot is lost, and serial jobs keep their order. Handlers note the begin
and the end of every run.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import sqlq
from tests.faults import guard
from tests.faults.limited import (
    ACCOUNTS,
    MODULE,
    RUNNING,
    intervals,
    kill_one,
    most_at_once,
    notes,
)
from tests.faults.scorecard import record
from tests.kit import wait_until
from tests.kit.processes import worker_process

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("calls", "turns", "kills"), [(20, 4, 3), pytest.param(60, 12, 8, marks=pytest.mark.slow)]
)
def test_workers_that_are_killed_lose_no_slot_and_exceed_no_limit(
    app: sqlq.App, engine: Engine, database_url: str, tmp_path: Path, calls: int, turns: int, kills: int
) -> None:
    guard.install(engine, owners_may_be_known_dead=True)
    folder = tmp_path / "fire"
    folder.mkdir()
    (folder / "fire.py").write_text(MODULE)
    call = app.task(name="fire.call", limit=sqlq.Limit("stripe", running=RUNNING), max_attempts=20)(
        lambda n: None
    )
    book = app.task(name="fire.book", limit=sqlq.Serial("account:{account}"), max_attempts=20)(
        lambda account, n: None
    )
    chance, killed = random.Random(7), dict[int, float]()
    options = ("-c", "6", "-p", "2")
    with (
        worker_process(folder, "fire:app", database_url, *options) as one,
        worker_process(folder, "fire:app", database_url, *options) as two,
    ):
        # ids rise with n in each account
        app.enqueue_many([book.new(account, n) for n in range(turns) for account in range(ACCOUNTS)])
        app.enqueue_many([call.new(n) for n in range(calls)])
        for _ in range(kills):
            wait_until(
                lambda: kill_one(folder, killed, chance) or done(app, calls + ACCOUNTS * turns),
                what="a job to be killed in",
            )
        wait_until(lambda: done(app, calls + ACCOUNTS * turns), timeout=120, what="all jobs done")
        assert guard.ILLEGAL not in one.log.read_text() + two.log.read_text()
    runs = intervals(notes(folder), killed)
    assert killed
    most = most_at_once(runs["stripe"])
    serial = [runs[f"account:{account}"] for account in range(ACCOUNTS)]
    doubled = sum(max(0, most_at_once(each) - 1) for each in serial)
    out_of_order = sum(later[2] < earlier[2] for each in serial for earlier, later in pairwise(each))
    lost = calls - len({n for _, _, n in runs["stripe"]})
    lost += sum(turns - len({n for _, _, n in each}) for each in serial)
    with app.database.read() as conn:
        held = conn.scalar(text("SELECT count(*) FROM jobs WHERE limit_key IS NOT NULL"))
    record(
        "Limits under SIGKILL",
        cases=calls + ACCOUNTS * turns,
        kills=len(killed),
        over_the_limit=max(0, most - RUNNING) + doubled,
        out_of_order=out_of_order,
        lost=lost,
    )
    assert most <= RUNNING
    assert (doubled, out_of_order, lost, held) == (0, 0, 0, 0)
    assert most_at_once(runs["stripe"]) > 1, "nothing ran side by side, so nothing was tried"


def done(app: sqlq.App, number: int) -> bool:
    return len(app.jobs.list(state="finished", limit=1000)) == number
