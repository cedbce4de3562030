"""Flows, limits and schedules, as the measures of `measures.waiting` enqueue them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

ONE_KEY, RUNNING, WINDOW = "one key", 10, 10


class Waiting:
    """The commands of a subject that enqueue what waits; each in one transaction, and numbered from 0."""

    chains = True
    ticks = True

    def chain(self, url: str, steps: int) -> None:
        import sqlq

        with _app(url) as (app, noop):
            app.enqueue(sqlq.chain(*map(noop.new, range(steps))))

    def fan(self, url: str, width: int) -> None:
        """Enqueue one step, so many that wait for it, and one that waits for all of these."""
        import sqlq

        with _app(url) as (app, noop):
            app.enqueue(sqlq.chain(noop.new(0), noop.map(range(width)), noop.new(0)))

    def flows(self, url: str, number: int, steps: int) -> None:
        """Enqueue so many chains."""
        import sqlq

        with _app(url) as (app, noop):
            for _ in range(number):
                app.enqueue(sqlq.chain(*map(noop.new, range(steps))))

    def of_one_key(self, url: str, jobs: int, ms: int, running: int = RUNNING) -> None:
        """Enqueue jobs of one key, of which so many may run at a time, each of so many milliseconds."""
        import sqlq
        from benchmarks import tasks

        limit = sqlq.Limit(ONE_KEY, running=running)
        with _app(url) as (app, noop):
            new = [tasks.nap.new(n, ms) if ms else noop.new(n) for n in range(jobs)]
            app.enqueue_many([job.set(limit=limit) for job in new])

    def in_order(self, url: str, keys: int, each: int) -> None:
        """Enqueue jobs of many keys, that run one after the other in each."""
        import sqlq

        with _app(url) as (app, noop):
            limits = [sqlq.Serial(f"key {n}") for n in range(keys)]
            app.enqueue_many(
                [noop.new(n).set(limit=limit) for _ in range(each) for n, limit in enumerate(limits)]
            )

    def at_a_rate(self, url: str, jobs: int, per_second: int) -> None:
        """Enqueue jobs of one key, of which so many may start in a second."""
        import sqlq

        limit = sqlq.Limit(ONE_KEY, rate=f"{per_second}/1s")
        with _app(url) as (app, noop):
            app.enqueue_many([noop.new(n).set(limit=limit) for n in range(jobs)])

    def of_tenants(self, url: str, first: int, tenants: int, each: int, windows: int) -> int:
        """Enqueue so many jobs of each tenant, numbered from `first`, with a window or without.

        Return the time before, in ns of the monotonic clock.
        """
        import sqlq

        with _app(url) as (app, noop):
            new = [
                noop.new(first + n).set(
                    limit=sqlq.Limit(f"tenant {first + n}", running=WINDOW) if windows else None
                )
                for n in range(tenants)
                for _ in range(each)
            ]
            moment = time.monotonic_ns()
            app.enqueue_many(new)
        return moment

    def schedules(self, url: str, number: int, repeats: int) -> None:
        """Add schedules that are due each second, so often, from two seconds later on."""
        starts = datetime.now(UTC) + timedelta(seconds=2)
        with _app(url) as (app, noop):
            for n in range(number):
                app.schedules.add(f"schedule {n}", noop.new(n), every="1s", repeats=repeats, starts=starts)

    def each_second(self, url: str) -> None:
        """Add a schedule that is due at each full second."""
        from benchmarks import tasks

        with _app(url) as (app, _):
            app.schedules.add("each second", tasks.ticked.new(), cron="* * * * * *")

    def blocked(self, url: str, steps: int) -> None:
        """Enqueue one step that is due tomorrow, and so many that wait for it."""
        import sqlq

        with _app(url) as (app, noop):
            for first in range(0, steps, 50_000):
                width = min(50_000, steps - first)
                app.enqueue(sqlq.chain(noop.new(0).set(delay="1d"), noop.map(range(width))))

    def sweeps(self, url: str, times: int) -> dict[str, float]:
        """Return the ms that sweeps take: over what ended lately, over all steps, over all lines."""
        from sqlq.store.flows import unblock
        from sqlq.store.limits import admit

        took = dict.fromkeys(("recent", "all", "lines"), 0.0)
        with _app(url) as (app, _):
            claims = app.database.for_claims
            for turn in range(times + 1):
                for kind in took:
                    begin = time.perf_counter()
                    place: tuple[int, int] | None = (0, 0)
                    if kind == "recent":
                        unblock.sweep_recent(claims, 21_000)
                    elif kind == "lines":
                        admit.sweep(claims, "")
                    else:
                        while place is not None:
                            _, place = unblock.sweep_all(claims, place, 1_000)
                    if turn:  # the first warms up
                        took[kind] += (time.perf_counter() - begin) * 1000 / times
        return took


@contextmanager
def _app(url: str) -> Iterator[tuple[Any, Any]]:
    from benchmarks import tasks

    tasks.app.use(url)
    yield tasks.app, tasks.noop
    tasks.app.close()
