"""However workers die, each run of a schedule gets its job, and gets it once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.store import schedules
from sqlq.testing import tick
from tests.faults import account
from tests.faults.account import HOUR, MINUTE
from tests.faults.dying import dying_process
from tests.faults.points import Points
from tests.kit import wait_until
from tests.kit.processes import worker_process

pytestmark = pytest.mark.integration

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def test_a_process_that_dies_in_a_tick_leaves_it_undone_or_done(
    app: sqlq.App, engine: Engine, database_url: str
) -> None:
    task = app.task(name="note")(lambda n: n)
    names = ["hourly", "minutely"]
    app.schedules.add("hourly", task.new(1), every="1h", catch_up="all")
    app.schedules.add("minutely", task.new(2), cron="* * * * *", catch_up="all")
    tick(app, NOON, since=NOON)
    with dying_process() as dying:
        points = Points(app, engine, partial(dying, database_url), "tick")
        points.all(lambda n: (NOON + n * MINUTE).isoformat())
    last = len(points.moments) + 1
    wanted = {
        "minutely": [NOON + n * MINUTE for n in range(1, last + 1)],
        "hourly": [NOON + HOUR] if last >= 60 else [],
    }
    account.demand("schedules: death in a tick", account.ticks(app.jobs.list(limit=10_000), wanted))
    assert sum(app.schedules.get(name).ticks for name in names) == sum(map(len, wanted.values()))


def test_a_clock_that_steps_either_way_loses_and_doubles_no_tick(app: sqlq.App) -> None:
    """The database's clock, which alone counts, is put forward and back between ticks."""
    task = app.task(name="note")(lambda: None)
    app.schedules.add("minutely", task.new(), cron="* * * * *", catch_up="all")
    chance = random.Random(7)
    tick(app, NOON, since=NOON)
    clock = furthest = NOON
    for _ in range(60):
        clock += chance.choice((MINUTE, 7 * MINUTE, -13 * MINUTE, timedelta(seconds=20)))
        furthest = max(furthest, clock)
        schedules.tick(app.database, at=clock)
    tick(app, furthest)
    wanted = [NOON + n * MINUTE for n in range(1, (furthest - NOON) // MINUTE + 1)]
    account.demand(
        "schedules: the clock stepped", account.ticks(app.jobs.list(limit=10_000), {"minutely": wanted})
    )


def test_the_new_release_decides_the_plan_in_a_rolling_deploy(
    app: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    def state(name: str) -> tuple[str, str]:
        found: dict[str, Any] = {each.name: each for each in app.schedules.list()}
        return (found[name].state, str(found[name].plan)) if name in found else ("", "")

    with worker_process(tmp_path, "tests.programs.release_one:app", database_url) as old:
        wait_until(lambda: state("beat") == ("active", "every 1 s"), what="the old schedule")
        # workers that start within a second may be of one deploy
        wait_until(lambda: app.schedules.get("gone").ticks > 2, what="ticks of more than a second")
        with worker_process(tmp_path, "tests.programs.release_two:app", database_url) as new:
            wait_until(lambda: state("beat") == ("active", "every 2 s"), what="the new schedule")
            assert state("gone")[0] == "retired"
            # an old child that dies is started anew with old code, and changes nothing back
            (child,) = old.children()
            known = {worker.pid for worker in app.workers.list()}
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: set(old.children()) - {child}, what="another child of the old supervisor")
            wait_until(lambda: {worker.pid for worker in app.workers.list()} - known, what="it is entered")
            ticks = app.schedules.get("beat").ticks
            wait_until(lambda: app.schedules.get("beat").ticks >= ticks + 2, what="two more ticks")
            assert state("beat") == ("active", "every 2 s")
            assert state("gone")[0] == "retired"
            assert (old.stop(), new.stop()) == (0, 0)
    had = Counter((job.schedule, job.scheduled_for) for job in app.jobs.list(limit=10_000))
    assert set(had.values()) == {1}
