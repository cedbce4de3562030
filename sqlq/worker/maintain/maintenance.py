"""What a process does beside its jobs, and what calls it to that before it is due."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_

from sqlq.config.constants import RESCUE_MS
from sqlq.database.database import Database, asked
from sqlq.database.dialects import is_refused
from sqlq.store.jobs.expire import Expired
from sqlq.store.jobs.settle import Rescued
from sqlq.store.workers.look import Look
from sqlq.worker.maintain.scheduler import Ticks
from sqlq.worker.maintain.services import (
    NEVER,
    Admit,
    Chore,
    Expire,
    LookedFor,
    Prune,
    Rescue,
    SchemaWatch,
    Sweep,
    Unblock,
    jittered,
)
from sqlq.worker.outage import AWAY, Outage

log = logging.getLogger("sqlq.worker")

TURN_SECONDS = 5.0
FAILED_SECONDS = 7.0
"""After so long a chore is tried again that failed for a reason other than the database being away."""


class Chores:
    """Does chores, each when it is due, in a thread of its own; the earliest first."""

    def __init__(
        self,
        chores: Sequence[Chore],
        database: Database | None = None,
        *,
        shared: Sequence[Chore] = (),
        others_do: Callable[[], bool] = lambda: False,
        quiet: bool = False,
    ) -> None:
        """The `shared` chores are left out while `others_do` them. `quiet` where others speak of a `database`
        that is away."""
        self._shared, self._others_do = shared, others_do
        order = itertools.count()
        self._due = [
            (time.monotonic(), next(order), chore, Outage(chore.doing, database, quiet=quiet))
            for chore in (*chores, *shared)
        ]
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._turn = threading.Lock()
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

    def at(self, chore: Chore, moment: float) -> None:
        """Have a chore done at a moment of the monotonic clock, unless it is due before, from any thread."""
        with self._lock:
            self._due = sorted(
                (min(moment, entry[0]) if entry[2] is chore else entry[0], *entry[1:]) for entry in self._due
            )
        self._changed.set()

    def await_turn(self) -> None:
        """Wait for the turn under way, a few seconds at most: what it has written is seen after this."""
        if self._turn.acquire(timeout=TURN_SECONDS):
            self._turn.release()

    def join(self, seconds: float) -> None:
        """Wait for the last turn, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()))
            self._changed.clear()
            moment, _, chore, outage = self._due[0]
            if self._ended.is_set() or time.monotonic() < moment:
                continue
            self._put(partial(is_, chore), NEVER)  # so that a call while it runs is not forgotten
            times, writing = asked.times, asked.writing
            try:
                with self._turn:
                    wait = self._do(chore)
                if asked.times > times:  # guard: who-asked-nothing-knows-nothing
                    outage.over(wrote=asked.writing > writing)  # guard: a-look-is-no-write
                else:
                    outage.forget()
            except AWAY as error:
                wait = outage.met(error)
                # Perhaps what is refused is a question about a column that is gone. In an outage the watch
                # would have nothing to see, and one that hastened itself would ask without a pause.
                # guard: who-watches-does-not-hasten-itself
                if is_refused(error) and not isinstance(chore, SchemaWatch):
                    self._hasten(lambda other: isinstance(other, SchemaWatch))
            except Exception:
                log.exception("%s failed; trying again", chore.doing)
                wait = FAILED_SECONDS
            self.at(chore, time.monotonic() + wait)

    def _do(self, chore: Chore) -> float:
        # guard: chores-are-taken-over
        if chore in self._shared and self._others_do():
            return jittered(RESCUE_MS / 1000)
        return chore.run()

    def _hasten(self, which: Callable[[Chore], bool]) -> None:
        self._put(which, time.monotonic())

    def _put(self, which: Callable[[Chore], bool], moment: float) -> None:
        with self._lock:
            self._due = sorted((moment if which(entry[2]) else entry[0], *entry[1:]) for entry in self._due)


class Duties(Chores):
    """The chores of a host, which its supervisor does for all its workers, or else each of them; and the
    `own` chores of the process."""

    def __init__(
        self,
        database: Database,
        lease_ms: int,
        retention_ms: int | None,
        own: Sequence[Chore],
        *,
        rescued: Callable[[Iterable[Rescued], str], object],
        expired: Callable[[Iterable[Expired]], object],
        freed: Callable[[], None],
        ticked: Callable[[], None] = lambda: None,
        looked_at: Callable[[], float],
        leases_looked_at: Callable[[], float],
        is_ticking: bool,
        others_do: Callable[[], bool] = lambda: False,
        quiet: bool = False,
    ) -> None:
        """`freed` is called when jobs have become available, `ticked` when schedules have enqueued some.
        `looked_at` returns when the process has looked itself for what there is to do, `leases_looked_at`
        when anybody has looked for leases that have run out. A process that is not `is_ticking` only empties
        the queue."""
        self._rescue = Rescue(database, lease_ms, rescued, freed, looked_at=leases_looked_at)
        self._expire = LookedFor(Expire(database, expired), looked_at)
        self._admit = LookedFor(Admit(database, freed), looked_at)
        self._ticks = Ticks(database, looked_at=looked_at, ticked=ticked)
        super().__init__(
            [self._rescue, *own],
            database,
            shared=[
                *([self._ticks] if is_ticking else []),
                Sweep(database),
                Prune(database, retention_ms),
                self._expire,
                Unblock(database, freed),
                self._admit,
            ],
            others_do=others_do,
            quiet=quiet,
        )

    def expect_tick(self, moment: float) -> None:
        """Tick at a moment at which a schedule is due."""
        self._ticks.expect(moment)
        self.at(self._ticks, moment)

    def heed(self, look: Look) -> None:
        """Do now what a look has found to do."""
        for is_due, chore in (
            (look.expired, self._rescue),
            (look.late, self._expire),
            (look.limited, self._admit),
        ):
            if is_due:
                chore.is_called = True  # guard: a-look-calls-to-chores
                self.call(chore)
