"""What a process does beside its jobs, and what calls it to that before it is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sqlq.store.cluster import Look
from sqlq.store.database import Database
from sqlq.store.endings import Rescued
from sqlq.store.expiry import Expired
from sqlq.worker.chores import Admit, Chore, Chores, Expire, LookedFor, Prune, Rescue, Sweep, Unblock
from sqlq.worker.scheduler import Ticks


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
