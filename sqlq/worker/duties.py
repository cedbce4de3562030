"""What a worker does beside its jobs: which chores it has, and what calls it to them before they are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlq.errors import SchemaVersionError
from sqlq.schedule import Declarations
from sqlq.schema import version
from sqlq.store.cluster import Look
from sqlq.store.database import Database
from sqlq.task import Registry
from sqlq.worker.chores import (
    Admit,
    Chore,
    Chores,
    Expire,
    LookedFor,
    Prune,
    Rescue,
    SchemaWatch,
    Shared,
    Sweep,
    Unblock,
    Unstarted,
    Vacuum,
)
from sqlq.worker.executors import Executors
from sqlq.worker.giveback import GivesBack
from sqlq.worker.held import Held
from sqlq.worker.lease import Leases
from sqlq.worker.options import WorkerOptions
from sqlq.worker.scheduler import Follow, Ticks
from sqlq.worker.tell import Teller
from sqlq.worker.wake import Wake
from sqlq.worker.watched import Watched


class Duties:
    """The duties of one worker."""

    def __init__(
        self,
        database: Database,
        worker: str,
        options: WorkerOptions,
        *,
        tasks: Registry,
        schedules: Declarations,
        teller: Teller,
        wake: Wake,
        watched: Watched,
        executors: Executors,
        leases: Leases,
        gives_back: GivesBack,
        schema: version.Watch,
        behind: Callable[[SchemaVersionError], None],
        began_at: float | None,
        others: Sequence[Chore],
    ) -> None:
        """`behind` is told when a migration has left this sqlq behind. `began_at` says when the supervisor
        began, where there is one. `others` are the chores of other rooms."""
        self._ticks = Ticks(
            database,
            looked_at=watched.own_leases_at,
            ticked=wake.call,  # on SQLite it would see the commit up to 50 ms later
        )
        self._ticking = Shared(self._ticks, watched.supervisor_looks)
        self._rescue = Rescue(
            database,
            options.lease_ms,
            teller.rescued,
            wake.call,
            looked_at=watched.leases_at,
        )
        self._expire = LookedFor(Expire(database, teller.expired), watched.own_leases_at)
        self._admit = LookedFor(Admit(database, wake.call), watched.own_leases_at)
        self._expiring = Shared(self._expire, watched.supervisor_looks)
        self._admitting = Shared(self._admit, watched.supervisor_looks)
        of_the_host: list[Chore] = [
            Sweep(database),
            Prune(database, options.retention_ms),
            Unblock(database, wake.call),
        ]
        self.chores = Chores(
            [
                self._rescue,
                *self._scheduling(database, options, tasks, schedules, began_at),
                *(Shared(chore, watched.supervisor_looks) for chore in of_the_host),
                self._expiring,
                self._admitting,
                SchemaWatch(database, schema, behind),
                Vacuum(database, lambda: executors.ended),
                Unstarted(database, worker, gives_back.forgotten),
                Held(database, worker, leases.not_started),
                *others,
            ],
            database,
        )

    def expect_tick(self, moment: float) -> None:
        """Tick at a moment at which a schedule is due."""
        self._ticks.expect(moment)
        self.chores.at(self._ticking, moment)

    def heed(self, look: Look) -> None:
        """Do now what a look has found to do."""
        for is_due, chore, entry in (
            (look.expired, self._rescue, self._rescue),
            (look.late, self._expire, self._expiring),
            (look.limited, self._admit, self._admitting),
        ):
            if is_due:
                chore.is_called = True  # guard: a-look-calls-to-chores
                self.chores.call(entry)

    def _scheduling(
        self,
        database: Database,
        options: WorkerOptions,
        tasks: Registry,
        schedules: Declarations,
        began_at: float | None,
    ) -> list[Chore]:
        """Return what is to do for schedules: nothing where a worker only empties the queue."""
        if options.drain:  # guard: a-drain-does-not-tick
            return []
        began = time.monotonic() if began_at is None else began_at
        follow = Follow(
            database,
            schedules.declared,
            schedules.service,
            tasks,
            age_ms=lambda: (time.monotonic() - began) * 1000,
        )
        return [follow, self._ticking]
