"""Rates: starts spread evenly, so that no period has more than its number, wherever it begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from sqlalchemy import text

import sqlq
from sqlq.model.checks import Rule
from sqlq.store.limits import admit
from sqlq.store.limits.grant import Grant
from tests.kit import for_each, wait_until

MOMENT = datetime(2030, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)


def turn(rule: Rule, next_free_at: datetime | None = None) -> Grant:
    return Grant("api", rule, MOMENT, next_free_at, 1000)


@for_each(("rate", "period_ms"), [(100, 60_000), (7, 1_000), (3_000, 1_000), (1, 250)])
def test_starts_are_never_closer_than_the_rate(rate: int, period_ms: int) -> None:
    """Lot after lot, as wakes come: any window of one period has at most `rate` starts."""
    starts: list[datetime] = []
    moment, next_free_at = MOMENT, None
    for _ in range(200):
        lot = Grant("api", Rule(rate=rate, period_ms=period_ms), moment, next_free_at, 1000)
        lot.ids = list(range(lot.number))
        starts += [start for _, start in lot.starts() if start]
        next_free_at = lot.start(lot.number)
        (again,) = (wake.moment for wake in lot.again())
        assert again is not None
        moment = max(again, moment)
    period = timedelta(milliseconds=period_ms)
    assert starts == sorted(starts)
    for first, later in zip(starts, starts[rate:], strict=False):
        assert later - first >= period
    # and not much slower either: what is lost is less than a millisecond for each lot
    slowest = period * (len(starts) / rate) + MS * 200
    assert starts[-1] - starts[0] <= slowest


def test_no_start_is_granted_beyond_the_look_ahead() -> None:
    rule = Rule(rate=10, period_ms=1_000)
    assert turn(rule).number == 2  # now and in 100 ms
    assert turn(rule, MOMENT + 100 * MS).number == 1
    assert turn(rule, MOMENT + 101 * MS).number == 0
    assert turn(rule, MOMENT - timedelta(hours=1)).number == 2  # what was not used is not made up for


def test_a_rate_and_a_number_running_hold_together(app: sqlq.App) -> None:
    @app.task(name="call", limit=sqlq.Limit("api", running=3, rate="1000/1s"))
    def call() -> None: ...

    app.enqueue_many([call.new() for _ in range(50)])
    done = admit.look(app.database)
    assert done.number == 3
    assert admit.look(app.database, ["api"]).number == 0


def test_a_key_without_free_starts_has_a_next_wake(app: sqlq.App) -> None:
    @app.task(name="call", limit=sqlq.Limit("api", rate="20/1s"))
    def call() -> None: ...

    app.enqueue_many([call.new() for _ in range(9)])
    done = admit.look(app.database)
    assert done.number == 3  # at 0, 50 and 100 ms
    assert done.next_ms is not None
    assert done.next_ms <= 100  # half of what is granted ahead before the next is free


def test_workers_keep_a_rate(app: sqlq.App) -> None:
    @app.task(name="call", limit=sqlq.Limit("api", rate="50/1s"))
    def call(n: int) -> None: ...

    done = app.enqueue_many([call.new(n) for n in range(30)])
    worker = app.worker(concurrency=10)
    starts = run_until_finished(app, worker, [job.id for job in done])
    granted = sorted(starts)
    gaps = [later - earlier for earlier, later in pairwise(granted)]
    assert min(gaps) >= 20 * MS
    assert granted[-1] - granted[0] < timedelta(seconds=30)


def run_until_finished(app: sqlq.App, worker: Any, ids: list[int]) -> list[datetime]:
    """Run a worker until these jobs have finished; return when each was allowed to start."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(worker.run)
        wait_until(lambda: len(app.jobs.list(state="finished", limit=1000)) == len(ids), timeout=60)
        worker.stop()
        running.result(60)
    found = [app.jobs.get(id) for id in ids]
    for job in found:
        assert job.available_at is not None
        assert job.reserved_at is not None
        assert job.reserved_at >= job.available_at
    return [job.available_at for job in found if job.available_at is not None]


def test_a_job_that_is_tried_again_takes_another_start(app: sqlq.App) -> None:
    failed: list[int] = []

    @app.task(name="call", limit=sqlq.Limit("api", rate="100/1s"), backoff="0s")
    def call(n: int) -> None:
        if n not in failed:
            failed.append(n)
            raise ValueError("not yet")

    app.enqueue_many([call.new(n) for n in range(3)])
    run_until_finished(app, app.worker(concurrency=3), list(range(1, 4)))
    with app.database.read() as conn:
        assert conn.scalar(text("SELECT count(*) FROM sqlq_limits WHERE next_free_at IS NOT NULL")) == 1
