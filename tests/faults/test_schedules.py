"""However workers die, each run of a schedule gets its job, and gets it once."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.store import schedules
from sqlq.testing import tick
from tests.faults import account
from tests.faults.account import HOUR, MINUTE
from tests.faults.dying import dying_process
from tests.faults.points import Points

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
