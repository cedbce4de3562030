"""Ticks: enqueues the due jobs of schedules, and writes the schedules that code declares.

Any number of workers tick, and none is a leader. A worker locks the row of a schedule while it decides its
runs. On PostgreSQL the poller sees when the next schedule is due, so that a database without schedules gets
no other query. On SQLite each worker reads one row of an index once a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from sqlq.config.constants import RESCUE_MS
from sqlq.database.database import Database
from sqlq.model.schedule import Declarations
from sqlq.store import schedules

log = logging.getLogger("sqlq.worker")

LOOK_SECONDS = 1.0
"""How often a worker looks for new and changed schedules where no poller does."""
TAKEN_SECONDS = 0.05
"""When to look again for a schedule that another worker is ticking."""
SHORTEST_SECONDS = 0.001
DONE = 3_600.0
NEVER = float("inf")


class Ticks:
    """Enqueues the jobs of schedules, each at its time by the database's clock."""

    doing = "ticking schedules"

    def __init__(
        self,
        database: Database,
        *,
        looked_at: Callable[[], float] = lambda: float("-inf"),
        ticked: Callable[[], None] = lambda: None,
    ) -> None:
        """`looked_at` returns the time of the last look of a poller, which also reads when a schedule is due.
        `ticked` is called when there are new jobs."""
        self._ticked = ticked
        self._database = database
        self._looked_at = looked_at
        self._longest = LOOK_SECONDS if database.dialect.sees_commits else RESCUE_MS / 1000
        self._due_at = NEVER
        """When the next schedule is due, by the monotonic clock; no query is sent before."""

    def expect(self, moment: float) -> None:
        """Note that a schedule is due at a time of the monotonic clock. Any thread may call this."""
        self._due_at = min(self._due_at, moment)

    def run(self) -> float:
        here = time.monotonic()
        if here < self._due_at:
            if here - self._looked_at() < 2 * self._longest:  # guard: the-lookout-asks-for-all
                return min(self._due_at - here, self._longest)
            wait_ms = schedules.next_in(self._database)
            if wait_ms is None or wait_ms > 0:
                return self._wait(wait_ms)
        self._due_at = NEVER
        done = schedules.tick(self._database)
        if done.jobs:
            self._ticked()  # guard: its-own-worker-is-called
        for new, job in done.jobs:
            log.info(
                "schedule %s: job %d for %s",
                *(new.schedule, job.id, "" if new.scheduled_for is None else new.scheduled_for.isoformat()),
                extra={"job_id": job.id, "task": job.task, "queue": job.queue, "event": "ticked"},
            )
        for name, error in done.errors.items():
            log.error("schedule %s: %s", name, error, extra={"event": "not_ticked"})
        wait_ms = schedules.next_in(self._database)  # guard: the-next-moment-is-asked-for
        if wait_ms is None or wait_ms > 0:
            return self._wait(wait_ms)
        self._due_at = time.monotonic()
        # more is due, or another worker ticks it now
        return 0.0 if done.seen else TAKEN_SECONDS

    def _wait(self, wait_ms: float | None) -> float:
        """Return how many seconds to wait for a schedule that is due in so many milliseconds; at most
        `_longest`."""
        if wait_ms is None:
            self._due_at = NEVER
            return self._longest
        wait = max(wait_ms / 1000, SHORTEST_SECONDS)
        self._due_at = time.monotonic() + wait
        return min(wait, self._longest)


class Follow:
    """Writes the declared schedules, once, when a worker starts."""

    doing = "writing the schedules that code declares"

    def __init__(
        self,
        database: Database,
        schedules: Declarations,
        tasks: Mapping[str, object],
        began_at: float,
    ) -> None:
        """`began_at` is the time at which the deploy of this worker started, by the monotonic clock."""
        self._database = database
        self._given = (schedules.declared, schedules.service, tasks)
        self._began_at = began_at
        self._is_done = False

    def run(self) -> float:
        if not self._is_done:
            done = schedules.follow(
                self._database, *self._given, lambda: (time.monotonic() - self._began_at) * 1000
            )
            self._is_done = True
            for word, names in (("added", done.added), ("changed", done.changed), ("retired", done.retired)):
                if names:
                    log.info("schedules %s: %s", word, ", ".join(sorted(names)), extra={"event": "schedules"})
            for name in sorted(done.foreign):
                log.warning(
                    "schedule %s is declared here, and in the database it is another service's, or was added "
                    "at run time: give this one another name",
                    name,
                    extra={"event": "schedules"},
                )
        return DONE
