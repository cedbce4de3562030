"""Waiting for jobs to end: one thread polls for all that a process waits for in a database.

Only the tables show that a job has ended. One statement reads all jobs that are waited for: soon after a new
waiter has come, then at growing intervals.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeAlias

from sqlalchemy.exc import DBAPIError

from sqlq.config.background import Background
from sqlq.database.database import Database
from sqlq.database.dialects import refuse_standby
from sqlq.errors import SqlqError
from sqlq.store.jobs import lookup
from sqlq.store.jobs.lookup import Seen

FIRST_SECONDS, MAX_SECONDS = 0.01, 0.25
"""The time between the first two polls after a new waiter has come, and the longest between two polls."""
GROWTH = 1.2
"""By how much each interval is longer: it is about a sixth of the time since the waiter has come."""
AWAY_SECONDS = 1.0
"""The longest time between two tries to reach a database that is away."""
SHARE = 3
"""Polls take at most one part in SHARE of the time, however many jobs they read."""
PRIMARY_SECONDS = 5.0
"""How often a poll checks that the server is no standby, which may show what was."""
IDLE_SECONDS = 30.0
"""How long the thread and its connection stay when nobody waits."""


End: TypeAlias = "tuple[int, Seen | None]"
"""The id of a job, and how it has ended; None if it is in no table."""


class Watch:
    """The jobs of one waiter, and the state in which each of them was seen last."""

    def __init__(self, ids: Iterable[int], *, whole: bool) -> None:
        """`whole` is whether the waiter wants more than their states."""
        self.waits_for: dict[int, Future[End]] = {id: Future() for id in ids}
        self.whole = whole
        self.seen: dict[int, Seen] = {}


class Waiting(Background):
    """Polls for all waiters of a process. Those that are left at its close get a `SqlqError`."""

    thread_name = "sqlq-results"

    def __init__(self, database: Database) -> None:
        self._database = database.for_loops
        super().__init__()

    def begin_anew(self) -> None:
        super().begin_anew()
        self._watches: set[Watch] = set()
        self._interval = FIRST_SECONDS
        self.is_away = False
        """Whether the database did not answer the last poll."""

    def watch(self, watch: Watch) -> None:
        """Begin to poll for the jobs of a watch; returns at once."""
        with self._changed:
            self._begin()
            self._watches.add(watch)
            self._interval = FIRST_SECONDS
            self._changed.notify()

    def stop(self, watch: Watch) -> None:
        """Poll no more for the jobs that a watch still waits for."""
        with self._changed:
            self._watches.discard(watch)

    def may_mend(self, error: Exception) -> bool:
        """Whether an error of the database may pass."""
        if not isinstance(error, DBAPIError):
            return False
        kind = self._database.dialect.driver.problem(error)
        return kind.passes or kind.is_useless

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        was_up = False
        check_at = time.monotonic() + PRIMARY_SECONDS
        while self._has_watches():
            began = time.monotonic()
            try:
                if not was_up:
                    self._database.require_tables()
                was_up = True
                self._poll(checks_primary=began >= check_at)
                check_at = began + PRIMARY_SECONDS if began >= check_at else check_at
                self.is_away = False
            except Exception as error:
                # guard: waiters-hear-of-what-does-not-mend
                self.is_away = was_up and self.may_mend(error)
                if not self.is_away:
                    self._fail(error)
            # not to be interrupted by new waiters, which gather meanwhile
            time.sleep(min((SHARE - 1) * (time.monotonic() - began), MAX_SECONDS))
            self._pause(began)
        self._database.close_idle()

    def _has_watches(self) -> bool:
        """Wait until somebody waits. Return False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._watches or self._closing, IDLE_SECONDS)
            if self._watches and not self._closing:
                return True
            self._thread = None
            if self._closing:
                self._fail(SqlqError("the App was closed while this waited for a job: the job goes on"))
            return False

    def _pause(self, began: float) -> None:
        """Wait for the next poll, after one that began then."""
        with self._changed:
            until = began + self._interval * random.uniform(0.8, 1.0)
            self._interval = min(self._interval * GROWTH, AWAY_SECONDS if self.is_away else MAX_SECONDS)
            if self._watches and not self._closing:
                self._changed.wait(max(0.0, until - time.monotonic()))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            watches, self._watches = self._watches, set()
        for watch in watches:
            next(iter(watch.waits_for.values())).set_exception(error)

    def _poll(self, *, checks_primary: bool) -> None:
        ids: dict[int, bool] = {}
        with self._changed:
            for watch in self._watches:
                ids |= {id: watch.whole or ids.get(id, False) for id in watch.waits_for}
        if not ids:
            return
        with self._database.read() as conn:
            rows = lookup.look(conn, ids)
            if checks_primary or rows.keys() != ids.keys():
                refuse_standby(conn)  # guard: waiters-leave-a-demoted-primary
        ends: list[tuple[Future[End], End]] = []
        with self._changed:
            for watch in self._watches:
                for id in watch.waits_for.keys() & ids.keys():
                    seen = rows.get(id)
                    if seen is not None and not seen.is_over:
                        watch.seen[id] = seen
                    elif ids[id] or not watch.whole:  # a watch that was added meanwhile may want more
                        ends.append((watch.waits_for.pop(id), (id, seen)))
            self._watches = {watch for watch in self._watches if watch.waits_for}
        for future, end in ends:
            future.set_result(end)
