"""The maintenance services. Each is a small class whose `run` does one bounded turn and returns when the next
is due.

Any number of workers may run them at the same time. One thread runs them in turn. A turn is one statement or
batch, so that none delays another for long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
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
from sqlq.store.jobs import operate, settle
from sqlq.store.workers import workers
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
SCHEMA_SECONDS = 60.0
UNCALLED_SECONDS = 3600.0
"""The wait of a service that runs when it is called."""
MIN_RHYTHM_SHARE = 0.8
"""The shortest wait of a service, as a share of its rhythm."""


@dataclass(eq=False)
class Service:
    """A part of the maintenance."""

    database: Database
    _: KW_ONLY
    freed: Callable[[], object] = lambda: None
    """Called when there are new jobs to claim."""
    is_watched: Callable[[], bool] = lambda: False
    """Returns whether a poller looks."""

    activity = ""
    """Its name in the log: "rescuing jobs"."""
    first_wait = 0.0
    """In how many seconds its first turn is due."""

    def run(self) -> float:
        """Do one turn; return in how many seconds the next is due. May raise any error of the database."""
        raise NotImplementedError


class PolledService(Service):
    """A service for which a poller looks. It runs when the poller has found work, and without a poller in a
    rhythm."""

    calls = _answered = 0
    """How often a poller has found work, and how many of these times it was done."""

    @property
    def every(self) -> float:
        """The seconds between two turns without a poller."""
        return RESCUE_MS / 1000

    def run(self) -> float:
        calls = self.calls
        # guard: the-poller-asks-for-maintenance
        if not (self.is_watched() and calls == self._answered):
            if (wait := self.turn()) is not None:
                return wait
            self._answered = calls  # a look may have called it in between
        return jittered(self.every)

    def turn(self) -> float | None:
        """Do one turn; return in how many seconds the next is due, None where nothing is left."""
        raise NotImplementedError


def at_once(database: Database, began: float) -> float:
    """Return in how many seconds the next batch is due after a full one that began then: at once. On a
    database with one writer it is due after about the duration of this one. So others find the lock free."""
    if not database.dialect.in_a_file:
        return 0.0
    return max(BETWEEN_SECONDS, jittered(monotonic() - began))  # guard: rescue-pauses-between-batches


def jittered(seconds: float) -> float:
    """Return about that number of seconds, so that the services of many workers do not fall together."""
    return seconds * random.uniform(MIN_RHYTHM_SHARE, 2 - MIN_RHYTHM_SHARE)


@dataclass(eq=False)
class Rescue(PolledService):
    """Takes jobs from workers that did not renew their leases. One batch a turn; the next follows at once,
    until one finds none.

    It waits for half a lease after this process slept, or the database did not answer. Other workers may have
    been away for the same reason, and still run their jobs.
    """

    lease_ms: int
    report: Callable[[Iterable[settle.Rescued], str], object]

    activity = "rescuing jobs"
    _here_at = inf
    """When a turn ended as it should, by a clock that goes on while the machine sleeps."""
    _waits_until = -inf

    @property
    def every(self) -> float:
        return min(RESCUE_MS, self.lease_ms / 4) / 1000

    def run(self) -> float:
        here_at, half_a_lease = since_boot(), self.lease_ms / 2000
        if here_at - self._here_at > half_a_lease:
            self._waits_until = here_at + half_a_lease  # guard: rescue-waits-after-an-absence
        wait = super().run()
        self._here_at = here_at
        return wait

    def turn(self) -> float | None:
        if (wait := self._waits_until - since_boot()) > 0:
            return min(self.every, wait)
        began = monotonic()
        with self.database.begin() as conn:
            rescued = settle.rescue(conn, limit=RESCUE_BATCH)
        next_at = monotonic() + at_once(self.database, began)
        free_after(self.database.for_claims, [job.row for job in rescued if job.failed])
        self.report(rescued, "did not renew its lease")
        # Not by their number: each batch has the jobs again whose end the database refuses.
        if not rescued:  # guard: rescue-repeats-until-empty
            return None
        self.freed()
        return max(0.0, next_at - monotonic())  # the others had the time since


@dataclass(eq=False)
class Prune(Service):
    """Deletes finished jobs whose retention is over, and failed ones that have a retention of their own. One
    batch a turn; the next at once where there may be more."""

    retention_ms: int | None

    activity = "pruning jobs"

    def __post_init__(self) -> None:
        # workers that start together do not prune together
        self.first_wait = random.uniform(0, PRUNE_SECONDS)

    def run(self) -> float:
        began = monotonic()
        pruned = 0
        with self.database.begin() as conn:
            if self.retention_ms is not None:
                # guard: ended-jobs-are-seen
                pruned = operate.prune(conn, older_than_ms=max(self.retention_ms, SEEN_MS), limit=PRUNE_BATCH)
            pruned += operate.prune_expired(conn, limit=PRUNE_BATCH - pruned, later_ms=SEEN_MS)
        return at_once(self.database, began) if pruned == PRUNE_BATCH else jittered(PRUNE_SECONDS)


class Sweep(Service):
    """Deletes the rows of workers that fell silent a day ago, and unused rows of blocked jobs, such as keys
    of limits. One batch a turn."""

    activity = "sweeping out workers and what blocked jobs left"

    def run(self) -> float:
        began = monotonic()
        with self.database.begin() as conn:
            workers.sweep(conn, silent_ms=24 * 3_600_000)
            deleted = [blocker().clear_up(conn, PRUNE_BATCH) for blocker in blockers.BLOCKERS]
        return at_once(self.database, began) if PRUNE_BATCH in deleted else jittered(SWEEP_SECONDS)


@dataclass(eq=False)
class Unblock(PolledService):
    """Frees jobs that a dead process has left blocked for one reason: in at most a fiftieth of the time."""

    blocker: Blocker

    def __post_init__(self) -> None:
        self.activity = f"sweeping for jobs blocked by their {self.blocker.name}"
        if self.blocker.called_by is None:
            self.is_watched = lambda: False

    @property
    def every(self) -> float:
        return self.blocker.rhythm_seconds if self.database.dialect.in_a_file else super().every

    def turn(self) -> float | None:
        began = monotonic()
        if (done := self.blocker.sweep(self.database)) is None:
            unused = self.blocker.unused_seconds
            return None if unused is None else jittered(unused)
        if done.number:
            self.freed()
        rest = self.blocker.share * (monotonic() - began)
        if not self.blocker.has_wakes:  # its sweep alone finds what ended lately, and limits the rest itself
            rest = min(rest, self.every)
        return rest if done.has_more or rest > self.every else None


@dataclass(eq=False)
class SchemaWatch(Service):
    """Checks whether a migration has left this sqlq behind."""

    left_behind: Callable[[SchemaVersionError], None]

    activity = "looking at the tables"
    first_wait = SCHEMA_SECONDS
    """The worker has looked just now, as it entered."""

    def run(self) -> float:
        try:
            with self.database.read() as conn:
                version.watch(conn, self.database.schema)
        except SchemaVersionError as error:
            self.left_behind(error)
        return jittered(SCHEMA_SECONDS)


TICK_SECONDS = 1.0
"""How often a worker looks for new and changed schedules where no poller does."""
TAKEN_SECONDS = 0.05
"""When to look again for a schedule that another worker is ticking."""


class Ticks(Service):
    """Enqueues the jobs of schedules, each at its time by the database's clock.

    Any number of workers tick, and none is a leader. A worker locks the row of a schedule while it decides
    its runs. On PostgreSQL the poller sees when the next schedule is due, so that a database without
    schedules gets no other query. On SQLite each worker reads one row of an index once a second.
    """

    activity = "ticking schedules"

    _due_at = inf
    """When the next schedule is due, by the monotonic clock; no query is sent before."""

    @property
    def _max_wait(self) -> float:
        return TICK_SECONDS if self.database.dialect.in_a_file else RESCUE_MS / 1000

    def expect(self, due_at: float) -> None:
        """Note that a schedule is due at a time of the monotonic clock. Any thread may call this."""
        self._due_at = min(self._due_at, due_at)

    def run(self) -> float:
        now = monotonic()
        if now < self._due_at:
            # the poller reads, too, when one is due
            if self.is_watched():  # guard: poller-replaces-schedule-queries
                return min(self._due_at - now, self._max_wait)
            if wait := self._wait():
                return wait
        self._due_at = inf
        done = schedules.tick(self.database)
        if done.jobs:
            self.freed()  # guard: its-own-worker-is-called
        for new, job in done.jobs:
            log.info(
                "schedule %s: job %d for %s",
                new.schedule,
                job.id,
                "" if new.scheduled_for is None else new.scheduled_for.isoformat(),
                job_id=job.id,
                task=job.task,
                queue=job.queue,
                event="ticked",
            )
        for name, error in done.errors.items():
            log.error("schedule %s: %s", name, error, event="not_ticked")
        # without a wait more is due, or another worker ticks it now
        return self._wait() or (0.0 if done.seen else TAKEN_SECONDS)  # guard: next-tick-is-looked-up

    def _wait(self) -> float:
        """Return how many seconds to wait for the next schedule, at most `_max_wait`; 0 where one is due."""
        wait_ms = schedules.next_in(self.database)
        wait = inf if wait_ms is None else max(0.0, wait_ms / 1000)
        self._due_at = monotonic() + wait
        return min(wait, self._max_wait)


@dataclass(eq=False)
class Follow(Service):
    """Writes the declared schedules, once, when a worker starts."""

    schedules: Declarations
    tasks: Mapping[str, object]
    began_at: float
    """When the deploy of this worker started, by the monotonic clock."""

    activity = "writing the schedules that code declares"

    def run(self) -> float:
        done = schedules.follow(
            self.database,
            self.schedules.declared,
            self.schedules.service,
            self.tasks,
            lambda: (monotonic() - self.began_at) * 1000,
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
        return inf


@dataclass(eq=False)
class EndPauses(Service):
    """Resumes queues that were paused until a time, when that has come. Any number of hosts may do so."""

    ended: Callable[[list[str]], None]

    activity = "ending pauses"
    first_wait = UNCALLED_SECONDS

    def run(self) -> float:
        with self.database.begin() as conn:
            queues = workers.end_pauses(conn)
            next_ms = workers.paused(conn).next_end_ms
        for name in queues:
            log.info(
                "the pause of %s is over",
                "all queues" if name == workers.ALL_QUEUES else f"the queue {name}",
                event="resumed",
            )
        if queues:
            self.ended(queues)
        return UNCALLED_SECONDS if next_ms is None else max(0.0, next_ms) / 1000
