"""The supervisor's stand-in for its children in the database.

It renews their leases, and releases at once the jobs of a child that died. For several workers on PostgreSQL
it also polls and runs the maintenance: each look and service of each worker would be a statement. A worker
reads the time of the last look in shared memory. If that is long ago it polls, and runs its services, itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from sqlq.config.command_hint import escaped, shortened
from sqlq.database.batch import Right
from sqlq.database.database import Address, Database
from sqlq.database.timeouts import SUPERVISOR
from sqlq.errors import SqlqError
from sqlq.events import JobEvent
from sqlq.payload.encryption import Encryption
from sqlq.store.apart import lately
from sqlq.store.blockers import free_after
from sqlq.store.jobs import lease, settle
from sqlq.store.jobs.settle import Rescued
from sqlq.store.workers import notify, workers
from sqlq.store.workers.look import Look
from sqlq.store.workers.workers import STUCK, Requests
from sqlq.worker.ipc.parent import Facts, NoParent
from sqlq.worker.ipc.pipe import Message, Pipe, packed
from sqlq.worker.maintain.maintenance import Maintenance
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.run.lease import heartbeat_seconds
from sqlq.worker.supervise.child import Child, Stage
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import Loop, Outage
from sqlq.worker.wait.poller import LastLook, Poller

LOCKED_SECONDS = 0.05
START_ERROR_LENGTH = 500


@dataclass
class Dead:
    """A worker that died. The jobs that it had started count as attempts that lost their worker, or, if they
    are `late`, met their timeout. The rest never began."""

    worker: str
    started: set[Right] | None
    why: str
    until: float
    """After this its leases have run out."""
    late: Collection[Right] = ()
    """The started jobs that were past their timeouts."""
    rights: list[Right] | None = None
    """The jobs that are still to be released; None until they were read."""


class Deaths:
    """The workers that died, and whose jobs are still to be released. It may fail: the rescue takes jobs that
    are not released here."""

    def __init__(self, rescued: Callable[[Iterable[Rescued], str], object]) -> None:
        """`rescued` reports jobs that were taken from a worker."""
        self._rescued = rescued
        self.waiting: list[Dead] = []
        self.counts: Counter[str] = Counter()
        """How the attempts of dead workers ended."""

    def release(self, database: Database) -> float:
        """Release the jobs of each dead worker. Return in how many seconds there is more to do."""
        for dead in list(self.waiting):
            try:
                self._release(database, dead)
            except Exception as error:  # guard: one-death-keeps-no-other-waiting
                if isinstance(error, DBAPIError) and database.dialect.driver.problem(error).passes:
                    raise
                log.error("jobs of worker %s stay until their leases have run out: %s", dead.worker, error)
                dead.rights = []
            if not dead.rights or monotonic() > dead.until:
                self.waiting.remove(dead)
        return LOCKED_SECONDS if self.waiting else inf

    def _release(self, database: Database, dead: Dead) -> None:
        """Release the jobs of a dead worker, but for those whose rows are locked."""
        worker, why = dead.worker, dead.why
        with database.begin() as conn:
            rights = lease.owned(conn, worker) if dead.rights is None else dead.rights
            # guard: only-what-started-counts
            started = {right for right in rights if dead.started is None or right in dead.started}
            back = settle.give_back(conn, set(rights) - started)
            taken = settle.lose(conn, started, why, late=dead.late) if started else []
            done = {id for id, _ in back} | {job.id for job in taken}
            states = lease.states_of(conn, [right for right in rights if right[0] not in done])
            refused = lately(conn, settle.LOST)["refused"]
            # guard: refused-settle-is-left-to-the-rescue
            locked = [
                r for r, state in states.items() if state is lease.LeaseState.HELD and r[0] not in refused
            ]
            if not locked and not lease.owned(conn, worker):
                workers.leave(conn, worker)
            if done:
                notify.wake_others(conn)
        dead.rights = locked  # guard: locked-rows-are-given-back-later
        free_after(database, [job.row for job in taken if job.failed])
        self._rescued(taken, why)
        ended = Counter("failed" if job.failed else "retried" for job in taken)
        self.counts = self.counts + ended + Counter(released=len(back))  # guard: lost-jobs-are-counted
        if back:
            log.info("%d jobs that worker %s had not started are given back", len(back), worker)


LAST_SECONDS, LAST_STATEMENT_SECONDS = 10.0, 1.0
"""How long the supervisor waits at its end for jobs that are still to be released, and without such jobs."""


class Heartbeat(Loop):
    """Stands in for children in the database: renews their leases, and releases the jobs of one that died.

    In a thread of its own, since a database may be slow to answer. It may fail: a child without news of its
    leases renews them itself, and the rescue takes jobs not released here."""

    _database: Database | None = None
    _next_beat = -inf
    _away = (DBAPIError, SqlqError)

    def __init__(self, lease_ms: int, totals: Totals) -> None:
        # the workers meet the same outage, and log it
        super().__init__("sqlq-heartbeat", Outage("standing in for the workers", quiet=True))
        self._lease_ms = lease_ms
        self._totals = totals
        self._kept: dict[str, Pipe] = {}
        self._stuck: list[tuple[str, bool]] = []
        """The workers whose rows are to have the state `stuck`, or no more."""
        self._start_error: str | None = None
        self._noted_start_error: str | None = None
        self._reporter = Reporter()
        self._unpublished: list[JobEvent] = []
        """Events of the jobs of dead workers, for a live worker to pass on to listeners of the App."""
        self._known: set[str] = set()
        """Workers seen in the database at least once."""
        self.deaths = Deaths(self.rescued)

    def keep(self, facts: Facts, link: Pipe) -> None:
        """Renew the leases of this worker at once and from now on, and report them over its pipe. Callbacks
        of the jobs of dead workers are encrypted as the worker would do it."""
        with self._lock:
            if self._database is None:
                listen = None if facts.listen_url is None else make_url(facts.listen_url)
                self._database = Address(make_url(facts.url), None, facts.schema, listen).open(use=SUPERVISOR)
            # guard: supervisor-has-the-keys
            self._database.encryption = None if facts.encryption is None else Encryption(*facts.encryption)
            self._kept[facts.worker] = link
            self._next_beat = monotonic()
        self.wake()
        self.begin()
        self.publish([])

    def begin(self) -> bool:
        """Begin to renew, once there is a worker. Where no thread can start now, a later call starts it."""
        return self._database is not None and super().begin()

    def keep_no_more(self, worker: str) -> None:
        """Renew for this worker no longer."""
        with self._lock:
            self._kept.pop(worker, None)

    @property
    def database(self) -> Database:
        """The database of its workers."""
        assert self._database is not None
        return self._database

    def knows(self, worker: str) -> bool:
        """Return whether this worker was seen in the database, so that the URL leads to its database."""
        return worker in self._known

    def rescued(self, jobs: Iterable[Rescued], why: str) -> None:
        """Report to the log and, by way of a worker, to listeners of the App."""
        self.publish(self._reporter.rescued(jobs, why))

    def publish(self, events: list[JobEvent]) -> None:
        """Have a worker report events to its listeners, now or when there is one, and count them here."""
        for event in events:
            self._totals.event(event)  # guard: deaths-are-counted
        with self._lock:
            self._unpublished = (self._unpublished + events)[-1_000:]
            link = next(iter(self._kept.values()), None)
            if link is None or not self._unpublished:
                return
            # an exception stays here; its copy in the worker has the same text
            messages = [packed(replace(event, exception=None)) for event in self._unpublished]
            self._unpublished = []
        link.offer(events=messages)

    def worker_stuck(self, worker: str, *, stuck: bool) -> None:
        """Write in the worker's row that it is stuck, or have it write its state itself."""
        self._stuck.append((worker, stuck))
        self.wake()

    def note_start(self, error: str | None) -> None:
        """Write in the rows of the workers why no other process can start; None where one could."""
        self._start_error = error and shortened(escaped(error), START_ERROR_LENGTH)
        self.wake()

    def worker_died(
        self, worker: str, started: set[Right] | None, why: str, late: Collection[Right] = ()
    ) -> None:
        """Release the jobs of a dead worker."""
        self.deaths.waiting.append(Dead(worker, started, why, monotonic() + self._lease_ms / 1000, late))
        self.wake()

    def close(self, seconds: float | None = None) -> None:
        """Release the jobs that are still to be released, and end."""
        super().close(seconds or (LAST_SECONDS if self.deaths.waiting else LAST_STATEMENT_SECONDS))
        if self._database is not None:
            self._database.close()

    # -- the thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        if monotonic() >= self._next_beat:
            self._next_beat = monotonic() + heartbeat_seconds(self._lease_ms)
            self._beat()
        wait = min(self.deaths.release(self.database), self._next_beat - monotonic())
        while self._stuck:
            worker, stuck = self._stuck[0]
            if stuck:
                with self.database.begin() as conn:
                    # it may be stuck in a transaction that has locked its row
                    workers.write_state(conn, worker, STUCK, waits=False)
            elif (link := self._kept.get(worker)) is not None:
                link.offer(write_state=True)
            del self._stuck[0]
        if (error := self._start_error) != self._noted_start_error:
            with self.database.begin() as conn:
                workers.write_start_error(conn, list(self._kept), error)
            self._noted_start_error = error
        self._outage.over()
        return wait

    def _is_over(self) -> bool:
        return super()._is_over() and not self.deaths.waiting

    def _beat(self) -> None:
        with self._lock:
            kept = dict(self._kept)
        if not kept:
            return
        sent_at = monotonic()
        with self.database.single_statements() as conn:
            # guard: supervisor-renews
            entered, renewed = workers.stand_in(conn, kept, lease_ms=self._lease_ms)
        for worker, link in kept.items():
            if worker in entered:
                self._known.add(worker)
            elif worker not in self._known:  # guard: unknown-workers-renew-themselves
                # an engine with a creator of its own may lead elsewhere than its URL: the worker has to renew
                # for itself
                self.keep_no_more(worker)
                continue
            rights = [[id, token, cancelled] for (id, token), cancelled in renewed[worker].items()]
            renewal = {"rights": rights, "sent_at": sent_at, "entered": worker in entered}
            link.offer(droppable=True, renewed=renewal)


HELPERS = 2
"""This number of workers follows one that found more than it could take. A few turns bring all."""


class Dispatcher:
    """Sends workers to claim, the idle ones first, and runs the services of their host."""

    def __init__(self, children: Callable[[], Sequence[Child]], heartbeat: Heartbeat) -> None:
        self._children = children
        self._heartbeat = heartbeat
        self._loops: list[Loop] = []

    def begin(self, facts: Facts) -> None:
        """Begin for the database of the first worker that is ready; later calls do nothing."""
        database = self._heartbeat.database
        if self._loops or database.dialect.in_a_file:
            return
        last_look, options = LastLook(NoParent()), WorkerOptions(**facts.options)
        self._maintenance = Maintenance(
            database,
            options,
            [],
            rescued=self._heartbeat.rescued,
            freed=self.send,
            pauses_ended=lambda names: self.send(),
            last_look=last_look,
            quiet=True,
        )
        poller = Poller(
            database,
            options,
            self.send,
            last_look=last_look,
            on_look=self.receive_look,
            workers=lambda: [child.worker for child in self._children() if child.worker is not None],
            quiet=True,
        )
        # in this order: workers whose host looks leave the services to it
        for loop in (self._maintenance, poller):  # guard: poller-starts-after-its-maintenance
            loop.start()
            self._loops.append(loop)

    def close(self) -> None:
        """End the poller and the services."""
        for loop in self._loops:
            loop.end()
        for loop in self._loops:
            loop.close(LAST_STATEMENT_SECONDS)

    def send(self) -> None:
        """Send the worker with a free slot and the fewest jobs to claim. Among equals it is the one that was
        sent last, whose caches are warm. One that did not react comes last."""
        free = self._free()
        if free:
            # guard: wake-goes-to-a-late-worker-last
            min(free, key=lambda child: (child.is_late(), child.box.started_now(), -child.sent_at)).send()

    def more(self, child: Child) -> None:
        """Send others, those first that rest for longest, after a worker that found more than it could
        take."""
        others = [other for other in self._free() if other is not child]
        for other in sorted(others, key=lambda other: (other.box.started_now(), other.sent_at))[:HELPERS]:
            other.send()

    def receive_look(self, look: Look, at: float) -> None:
        """Pass on what a look has seen, which was answered at this time."""
        self.publish(look.wanted)
        self._maintenance.expect_end_of_pause(look.wanted.pause_ms)
        self._maintenance.act_on(look, at)

    def publish(self, requested: Requests) -> None:
        """Note in the memory of the workers that a look was made for them. Send each the new requests of
        operators to it."""
        requests = {request.worker: list(request) for request in requested.requests}
        for child in self._watched():
            child.box.note_poll(monotonic())
            message: Message = {"all_paused": requested.all_paused}
            if child.worker in requests:
                message["request"] = requests[child.worker]
            if message != child.requests:  # guard: pause-reaches-each-child
                child.requests = message
                child.link.offer(**message)

    def _free(self) -> list[Child]:
        return [
            child
            for child in self._watched()
            if child.stage in (Stage.WORKING, Stage.OUTDATED) and child.box.started_now() < child.slots
        ]

    def _watched(self) -> list[Child]:
        """Return the workers for which the supervisor looks: those in its database."""
        # guard: another-database-is-not-watched
        return [child for child in self._children() if child.worker and self._heartbeat.knows(child.worker)]
