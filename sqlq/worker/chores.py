"""Duties with a rhythm: each is a small class whose `run` does one bounded turn and says when it is due
again.

Any number of workers may do them at the same time. One thread takes them in turn; a turn is one statement or
batch, so that none holds up another for long.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from typing import Protocol

from sqlalchemy.exc import DBAPIError

from sqlq.errors import SchemaVersionError
from sqlq.schema import version
from sqlq.settings import RESCUE_MS
from sqlq.store import cluster, endings, records
from sqlq.store.database import Database
from sqlq.worker.outage import Outage
from sqlq.worker.vacuum import VacuumWatch

log = logging.getLogger("sqlq.worker")

PRUNE_SECONDS = 60.0
PRUNE_BATCH = 1_000
SWEEP_SECONDS = 600.0
SILENT_MS = 24 * 3_600_000
CANCELLED_KEPT_MS = 24 * 3_600_000
SCHEMA_SECONDS = 60.0
UNSTARTED_SECONDS = 30.0
FAILED_SECONDS = 7.0
"""After so long a chore is tried again that failed for a reason other than the database being away."""


class Chore(Protocol):
    """One duty."""

    doing: str
    """What it is about, for the log: "rescuing jobs"."""

    def run(self) -> float:
        """Do one turn and return in how many seconds the next is due. May raise whatever the database
        raises."""
        ...


class Chores:
    """Does chores, each when it is due, in a thread of its own; the earliest first."""

    def __init__(self, chores: Sequence[Chore], *, quiet: bool = False) -> None:
        """`quiet` where others speak of a database that is away."""
        order = itertools.count()
        self._due = [
            (time.monotonic(), next(order), chore, Outage(chore.doing, quiet=quiet)) for chore in chores
        ]
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqlq-chores", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Begin nothing more."""
        self._ended.set()
        self._changed.set()

    def call(self, chore: Chore) -> None:
        """Have a chore done now, from any thread."""
        self._hasten(partial(is_, chore))
        self._changed.set()

    def join(self, seconds: float) -> None:
        """Wait for the turn under way, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()))
            self._changed.clear()
            moment, _, chore, outage = self._due[0]
            if self._ended.is_set() or time.monotonic() < moment:
                continue
            try:
                wait = chore.run()
                outage.over()
            except DBAPIError as error:
                wait = outage.met(error)
                # perhaps what it does not answer is a question about a column that is gone
                self._hasten(lambda other: isinstance(other, SchemaWatch))
            except Exception:
                log.exception("%s failed; trying again", chore.doing)
                wait = FAILED_SECONDS
            self._put(partial(is_, chore), time.monotonic() + wait)

    def _hasten(self, which: Callable[[Chore], bool]) -> None:
        self._put(which, time.monotonic())

    def _put(self, which: Callable[[Chore], bool], moment: float) -> None:
        with self._lock:
            self._due = sorted((moment if which(entry[2]) else entry[0], *entry[1:]) for entry in self._due)


class Shared:
    """A chore that one of a host does: this worker, while its supervisor does not."""

    def __init__(self, chore: Chore, is_done: Callable[[], bool]) -> None:
        self.doing = chore.doing
        self._chore = chore
        self._is_done = is_done

    def run(self) -> float:
        # guard: chores-are-taken-over
        return jittered(RESCUE_MS / 1000) if self._is_done() else self._chore.run()


def jittered(seconds: float) -> float:
    """Return about so many seconds, so that the chores of many workers do not fall together."""
    return seconds * random.uniform(0.8, 1.2)


class Rescue:
    """Takes jobs from workers that did not renew their leases."""

    doing = "rescuing jobs"

    def __init__(
        self,
        database: Database,
        lease_ms: int,
        tell: Callable[[Iterable[endings.Rescued], str], object],
        rescued: Callable[[], None],
        *,
        looked_at: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        """`looked_at` returns when a lookout, which has this chore called where it finds any, has looked for
        expired leases last."""
        self._database = database
        self._tell = tell
        self._every = min(RESCUE_MS, lease_ms / 4) / 1000
        self._rescued = rescued
        self._looked_at = looked_at
        self.is_called = False

    def run(self) -> float:
        is_looked_after = time.monotonic() - self._looked_at() < 2 * self._every
        if is_looked_after and not self.is_called:
            return jittered(self._every)
        with self._database.begin() as conn:
            rescued = endings.rescue(conn)
        self.is_called = False
        self._tell(rescued, "did not renew its lease")
        if rescued:
            self._rescued()
        return jittered(self._every)


class Prune:
    """Deletes finished jobs whose retention is over, and failed ones that have a retention of their own: one
    batch a turn, at once the next where there may be more."""

    doing = "pruning jobs"

    def __init__(self, database: Database, retention_ms: int | None) -> None:
        self._database = database
        # where finished jobs are not kept, those that an operator cancelled are: their old owner may still
        # ask
        self._older_than_ms = CANCELLED_KEPT_MS if retention_ms == 0 else retention_ms
        self._waits = random.uniform(0, PRUNE_SECONDS)

    def run(self) -> float:
        if self._waits:  # workers that start together do not prune together
            waits, self._waits = self._waits, 0.0
            return waits
        with self._database.begin() as conn:
            older_ms = self._older_than_ms
            pruned = (
                0
                if older_ms is None
                else records.prune(conn, finished_older_than_ms=older_ms, limit=PRUNE_BATCH)
            )
            pruned += records.prune_expired(conn, limit=PRUNE_BATCH - pruned)
        return 0.0 if pruned == PRUNE_BATCH else jittered(PRUNE_SECONDS)


class Sweep:
    """Takes out the entries of workers that fell silent a day ago."""

    doing = "sweeping out workers"

    def __init__(self, database: Database) -> None:
        self._database = database

    def run(self) -> float:
        with self._database.begin() as conn:
            cluster.sweep(conn, silent_ms=SILENT_MS)
        return jittered(SWEEP_SECONDS)


class Unstarted:
    """Gives back what was claimed long ago and does not start, which should not be, and notes, where the
    doctor finds it, how many jobs this worker could not start."""

    doing = "looking for jobs that do not start"

    def __init__(self, database: Database, worker: str, give_back: Callable[[float], int]) -> None:
        """`give_back` gives back what was claimed before a moment and has not started, and returns how many
        jobs could not be started so far."""
        self._database = database
        self._worker = worker
        self._give_back = give_back
        self._noted = 0

    def run(self) -> float:
        number = self._give_back(time.monotonic() - UNSTARTED_SECONDS)
        if number != self._noted:
            with self._database.begin() as conn:
                cluster.note_unstarted(conn, self._worker, number)
            self._noted = number
        return jittered(RESCUE_MS / 1000)


class SchemaWatch:
    """Looks whether a migration has left this sqlq behind."""

    doing = "looking at the tables"

    def __init__(
        self, database: Database, watch: version.Watch, left_behind: Callable[[SchemaVersionError], None]
    ) -> None:
        self._database = database
        self._watch = watch
        self._left_behind = left_behind
        self._seen = False

    def run(self) -> float:
        if self._seen:  # else the worker has looked just now, as it entered
            try:
                with self._database.read() as conn:
                    self._watch.look(conn, self._database.schema)
            except SchemaVersionError as error:
                self._left_behind(error)
        self._seen = True
        return jittered(SCHEMA_SECONDS)


class Vacuum:
    """Warns when dead rows pile up behind an old transaction, in a worker that is busy."""

    doing = "looking at dead rows"

    def __init__(self, database: Database, ended: Callable[[], int]) -> None:
        self._watch = VacuumWatch(database)
        self._ended = ended

    def run(self) -> float:
        self._watch.look(self._ended())
        return jittered(RESCUE_MS / 1000)
