"""The maintenance services. Each is a small class whose `run` does one bounded turn and returns when the next
is due.

Any number of workers may run them at the same time. One thread runs them in turn. A turn is one statement or
batch, so that none delays another for long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic

from sqlq.config.constants import RESCUE_MS
from sqlq.config.durations import since_boot
from sqlq.database.database import Database
from sqlq.errors import SchemaVersionError
from sqlq.model.schedule import Declarations
from sqlq.schema import version
from sqlq.store import blockers, schedules
from sqlq.store.blockers import Blocker, free_after
from sqlq.store.jobs import prune, settle
from sqlq.store.workers import pauses, workers
from sqlq.worker.threads.log import log

PRUNE_SECONDS = 30.0
SEEN_MS = 20_000
"""How long an ended job is kept in any case: for its caller, and for a worker that lost the reply to its
settle. With the time between two prunes it is less than a minute."""
PRUNE_BATCH = 1_000
RESCUE_BATCH = 300
"""How many jobs one transaction takes from dead workers: 15 to 50 ms, of a core of its own."""
BETWEEN_SECONDS = 0.03
"""SQLite tries to get its write lock at growing intervals, of 25 ms at most in the first tenth of a second. A
lock that is free for longer is found."""
SWEEP_SECONDS = 600.0
SILENT_MS = 24 * 3_600_000
SCHEMA_SECONDS = 60.0
SWEEP_SHARE = 50
NEVER = inf
UNCALLED_SECONDS = 3600.0
"""The wait of a service that runs when it is called."""
SHORTEST_RHYTHM = 0.8
"""The shortest wait of a service, as a share of its rhythm."""


class Service:
    """A part of the maintenance."""

    doing: str
    """Its name in the log: "rescuing jobs"."""
    first_wait = 0.0
    """In how many seconds its first turn is due."""

    def run(self) -> float:
        """Do one turn; return in how many seconds the next is due. May raise any error of the database."""
        raise NotImplementedError


@dataclass(eq=False)
class PolledService(Service):
    """A service for which a poller looks. It runs when the poller has found work, and without a poller in a
    rhythm."""

    _is_watched: Callable[[], bool]
    """Returns whether a poller looks."""
    _every: float = RESCUE_MS / 1000

    calls = _answered = 0
    """How often a poller has found work, and how many of these times it was done."""

    def run(self) -> float:
        # guard: the-poller-asks-for-maintenance
        if self._is_watched() and self.calls == self._answered:
            return jittered(self._every)
        calls = self.calls
        if (wait := self.turn()) is not None:
            return wait
        self._answered = calls  # a look may have called it in between
        return jittered(self._every)

    def turn(self) -> float | None:
        """Do one turn; return in how many seconds the next is due, None where nothing is left."""
        raise NotImplementedError


def unwatched() -> bool:
    """Return that no poller looks."""
    return False


def at_once(database: Database, began: float) -> float:
    """Return in how many seconds the next batch is due after a full one that began then: at once. On a
    database with one writer it is due after about the duration of this one. So others find the lock free."""
    if not database.dialect.in_a_file:
        return 0.0
    return max(BETWEEN_SECONDS, jittered(monotonic() - began))  # guard: rescue-pauses-between-batches


def jittered(seconds: float) -> float:
    """Return about that number of seconds, so that the services of many workers do not fall together."""
    return seconds * random.uniform(SHORTEST_RHYTHM, 2 - SHORTEST_RHYTHM)


class Rescue(PolledService):
    """Takes jobs from workers that did not renew their leases. One batch a turn; the next follows at once,
    until one finds none.

    It waits for half a lease after this process slept, or the database did not answer. Other workers may have
    been away for the same reason, and still run their jobs.
    """

    doing = "rescuing jobs"

    _here_at: float | None = None
    """When a turn ended as it should, by a clock that goes on while the machine sleeps."""
    _waits_until = -NEVER

    def __init__(
        self,
        database: Database,
        lease_ms: int,
        tell: Callable[[Iterable[settle.Rescued], str], object],
        rescued: Callable[[], None],
        *,
        is_watched: Callable[[], bool] = unwatched,
    ) -> None:
        super().__init__(is_watched, min(RESCUE_MS, lease_ms / 4) / 1000)
        self._database = database
        self._tell = tell
        self._patience = lease_ms / 2000
        self._rescued = rescued

    def run(self) -> float:
        here_at = since_boot()
        if self._here_at is not None and here_at - self._here_at > self._patience:
            self._waits_until = here_at + self._patience  # guard: rescue-waits-after-an-absence
        wait = super().run()
        self._here_at = here_at
        return wait

    def turn(self) -> float | None:
        if (wait := self._waits_until - since_boot()) > 0:
            return min(self._every, wait)
        began = monotonic()
        with self._database.begin() as conn:
            rescued = settle.rescue(conn, limit=RESCUE_BATCH)
        goes_on_at = monotonic() + at_once(self._database, began)
        free_after(self._database.for_claims, [job.row for job in rescued if job.failed])
        self._tell(rescued, "did not renew its lease")
        if rescued:
            self._rescued()
        # Not by their number: each batch has the jobs again whose end the database refuses.
        has_more = bool(rescued)  # guard: rescue-repeats-until-empty
        return max(0.0, goes_on_at - monotonic()) if has_more else None  # the others had the time since


class Prune(Service):
    """Deletes finished jobs whose retention is over, and failed ones that have a retention of their own. One
    batch a turn; the next at once where there may be more."""

    doing = "pruning jobs"

    def __init__(self, database: Database, retention_ms: int | None) -> None:
        self._database = database
        # guard: ended-jobs-are-seen
        self._older_than_ms = None if retention_ms is None else max(retention_ms, SEEN_MS)
        # workers that start together do not prune together
        self.first_wait = random.uniform(0, PRUNE_SECONDS)

    def run(self) -> float:
        began = monotonic()
        pruned = 0
        with self._database.begin() as conn:
            if self._older_than_ms is not None:
                pruned = prune.prune(conn, older_than_ms=self._older_than_ms, limit=PRUNE_BATCH)
            pruned += prune.prune_expired(conn, limit=PRUNE_BATCH - pruned, later_ms=SEEN_MS)
        return at_once(self._database, began) if pruned == PRUNE_BATCH else jittered(PRUNE_SECONDS)


@dataclass(eq=False)
class Sweep(Service):
    """Deletes the rows of workers that fell silent a day ago, and unused rows of blocked jobs, such as keys
    of limits. One batch a turn."""

    _database: Database

    doing = "sweeping out workers and what blocked jobs left"

    def run(self) -> float:
        began = monotonic()
        with self._database.begin() as conn:
            workers.sweep(conn, silent_ms=SILENT_MS)
            deleted = [blocker().clear_up(conn, PRUNE_BATCH) for blocker in blockers.BLOCKERS]
        return at_once(self._database, began) if PRUNE_BATCH in deleted else jittered(SWEEP_SECONDS)


class Unblock(PolledService):
    """Frees jobs that a dead process has left blocked for one reason: in at most a fiftieth of the time."""

    def __init__(
        self,
        blocker: Blocker,
        database: Database,
        freed: Callable[[], None],
        *,
        is_watched: Callable[[], bool] = unwatched,
    ) -> None:
        """`freed` is called when there are new jobs to claim."""
        super().__init__(is_watched if blocker.called_by is not None else unwatched)
        self.doing = f"sweeping for jobs blocked by their {blocker.name}"
        self.blocker = blocker
        self._database = database
        self._freed = freed

    def turn(self) -> float | None:
        began = monotonic()
        if (done := self.blocker.sweep(self._database)) is None:
            unused = self.blocker.unused_seconds
            return None if unused is None else jittered(unused)
        if done.number:
            self._freed()
        rest = SWEEP_SHARE * (monotonic() - began)
        return rest if done.has_more or rest > self._every else None


@dataclass(eq=False)
class SchemaWatch(Service):
    """Checks whether a migration has left this sqlq behind."""

    _database: Database
    _watch: version.Watch
    _left_behind: Callable[[SchemaVersionError], None]

    doing = "looking at the tables"
    first_wait = SCHEMA_SECONDS
    """The worker has looked just now, as it entered."""

    def run(self) -> float:
        try:
            with self._database.read() as conn:
                self._watch.look(conn, self._database.schema)
        except SchemaVersionError as error:
            self._left_behind(error)
        return jittered(SCHEMA_SECONDS)


TICK_SECONDS = 1.0
"""How often a worker looks for new and changed schedules where no poller does."""
TAKEN_SECONDS = 0.05
"""When to look again for a schedule that another worker is ticking."""
SHORTEST_TICK_SECONDS = 0.001


class Ticks(Service):
    """Enqueues the jobs of schedules, each at its time by the database's clock.

    Any number of workers tick, and none is a leader. A worker locks the row of a schedule while it decides
    its runs. On PostgreSQL the poller sees when the next schedule is due, so that a database without
    schedules gets no other query. On SQLite each worker reads one row of an index once a second.
    """

    doing = "ticking schedules"

    _due_at = NEVER
    """When the next schedule is due, by the monotonic clock; no query is sent before."""

    def __init__(
        self,
        database: Database,
        *,
        is_watched: Callable[[], bool] = unwatched,
        ticked: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_watched` returns whether a poller looks, which also reads when a schedule is due. `ticked` is
        called when there are new jobs."""
        self._ticked = ticked
        self._database = database
        self._is_watched = is_watched
        self._longest = TICK_SECONDS if database.dialect.in_a_file else RESCUE_MS / 1000

    def expect(self, moment: float) -> None:
        """Note that a schedule is due at a time of the monotonic clock. Any thread may call this."""
        self._due_at = min(self._due_at, moment)

    def run(self) -> float:
        here = monotonic()
        if here < self._due_at:
            if self._is_watched():  # guard: poller-replaces-schedule-queries
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
                job_id=job.id,
                task=job.task,
                queue=job.queue,
                event="ticked",
            )
        for name, error in done.errors.items():
            log.error("schedule %s: %s", name, error, event="not_ticked")
        wait_ms = schedules.next_in(self._database)  # guard: the-next-moment-is-asked-for
        if wait_ms is None or wait_ms > 0:
            return self._wait(wait_ms)
        self._due_at = monotonic()
        # more is due, or another worker ticks it now
        return 0.0 if done.seen else TAKEN_SECONDS

    def _wait(self, wait_ms: float | None) -> float:
        """Return how many seconds to wait for a schedule that is due in a number of milliseconds; at most
        `_longest`."""
        if wait_ms is None:
            self._due_at = NEVER
            return self._longest
        wait = max(wait_ms / 1000, SHORTEST_TICK_SECONDS)
        self._due_at = monotonic() + wait
        return min(wait, self._longest)


@dataclass(eq=False)
class Follow(Service):
    """Writes the declared schedules, once, when a worker starts."""

    _database: Database
    _schedules: Declarations
    _tasks: Mapping[str, object]
    _began_at: float
    """When the deploy of this worker started, by the monotonic clock."""

    doing = "writing the schedules that code declares"

    def run(self) -> float:
        done = schedules.follow(
            *(self._database, self._schedules.declared, self._schedules.service, self._tasks),
            lambda: (monotonic() - self._began_at) * 1000,
        )
        for word, names in (("added", done.added), ("changed", done.changed), ("retired", done.retired)):
            if names:
                log.info("schedules %s: %s", word, ", ".join(sorted(names)), event="schedules")
        for name in sorted(done.foreign):
            log.warning(
                "schedule %s is declared here, and in the database it is another service's, or was added "
                "at run time: give this one another name",
                name,
                event="schedules",
            )
        return NEVER


@dataclass(eq=False)
class EndPauses(Service):
    """Resumes queues that were paused until a time, when that has come. Any number of hosts may do so."""

    _database: Database
    _ended: Callable[[list[str]], None]

    doing = "ending pauses"
    first_wait = UNCALLED_SECONDS

    def run(self) -> float:
        with self._database.begin() as conn:
            queues = pauses.end_pauses(conn)
            _, next_ms = pauses.read(conn)
        for name in queues:
            which = "all queues" if name == pauses.ALL else f"the queue {name}"
            log.info("the pause of %s is over", which, event="resumed")
        if queues:
            self._ended(queues)
        return UNCALLED_SECONDS if next_ms is None else max(0.0, next_ms) / 1000
