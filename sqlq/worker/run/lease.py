"""The leases of a worker's jobs. Its supervisor renews them; without one, or without news of it, a thread
does on a connection of its own.

A busy handler or event loop cannot starve either (a C call that keeps the GIL starves the thread). A worker
trusts a lease by its own monotonic clock, counted from when the claim or heartbeat was *sent*, less a margin.
The database counts from a later time, so the lease is never shorter than that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import inf
from time import monotonic

from sqlalchemy import Connection

from sqlq.config.constants import HEARTBEAT_MS, HEARTBEATS_PER_LEASE, LEASE_MARGIN_MS
from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.store.blockers import free_after
from sqlq.store.jobs import lease, settle
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.decide import compare_renewal
from sqlq.worker.ipc.parent import READS, SharedMemory
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import Loop, Outage, passing_over


def heartbeat_seconds(lease_ms: int) -> float:
    """Return the time between two heartbeats."""
    return min(lease_ms / HEARTBEATS_PER_LEASE, HEARTBEAT_MS) / 1000


class Leases(Loop):
    """The jobs of a worker, from the claim until their settlements are committed.

    The leases of jobs still held at the end run out, and the worker that rescues them takes over.
    """

    _renewed_for_us_at = -inf
    _doubts: set[Right] | None = None
    """The rights to release, after a renewal by the supervisor that this worker has to check."""
    _claims_started = _claims_ended = 0

    def __init__(
        self,
        database: Database,
        sign_of_life: Callable[[Connection], None],
        lease_ms: int,
        reporter: Reporter,
        deadlines: Deadlines,
        box: SharedMemory | None,
    ) -> None:
        super().__init__("sqlq-heartbeat", Outage("renewing leases", database, is_vital=True))
        self._database = database
        self._sign_of_life = sign_of_life
        self._lease_ms = lease_ms
        self._every = self.first_wait = heartbeat_seconds(lease_ms)
        self._reporter = reporter
        self._deadlines = deadlines
        self._box = box
        self._trust_seconds = (lease_ms - min(LEASE_MARGIN_MS, lease_ms / 5)) / 1000
        # By right, not by id: a released job may be claimed again here before its last attempt is dropped.
        self._jobs: dict[Right, Attempt] = {}
        self._unwritten: set[Right] = set()
        """Jobs that were started here, and whose outcomes could not be written."""
        self._unknown: dict[Right, int] = {}
        """Jobs of the supervisor's last renewal that this worker does not know. The value is the number of
        claims begun when each was first seen."""

    def trusted_until(self, sent_at: float) -> float:
        """Until when a lease requested at `sent_at` is certainly ours."""
        return sent_at + self._trust_seconds

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Mark a claim as in progress. Until it ends, the database may have leases of this worker that it
        does not know yet."""
        self._claims_started += 1  # one thread claims
        try:
            yield
        finally:
            self._claims_ended += 1

    def hold(self, claimed: Sequence[Attempt]) -> None:
        with self._lock:
            self._jobs |= {job.right: job for job in claimed}
        self._deadlines.watch(claimed)

    def starting(self, job: Attempt) -> None:
        """Note that the arguments of a job are about to be read, or that its handler is about to run. If this
        process dies now, the job may be the cause."""
        if self._box is not None:
            self._box.started(job.right, READS if job.started is None else job.deadline)
        if job.started is not None:
            self._reporter.started(job)

    def drop(self, rights: Iterable[Right]) -> None:
        with self._lock:
            for right in rights:
                self._jobs.pop(right, None)
        if self._box is not None:
            self._box.ended(rights)  # guard: shared-memory-drops-ended-jobs

    def let_go(self, right: Right) -> None:
        """Drop a job whose every outcome the database refuses: the attempt counts as lost.

        Its lease runs out. Where a supervisor renews it, the worker gives it up with the next renewal.
        """
        with self._lock:
            self._unwritten.add(right)
        self.drop([right])

    def arrived(self, trusted_until: float) -> None:
        """Renew all leases where the claim took long to arrive. Large rows, or a wait for the write lock, may
        have used up the lease."""
        # guard: late-rows-are-started
        if monotonic() > trusted_until - self._every:
            # the jobs must be started all the same
            with passing_over("what has just been claimed could not be renewed"):
                self.beat()

    def __len__(self) -> int:
        return len(self._jobs)

    # -- renewing --------------------------------------------------------------------------------------------

    def renewed_for_us(self, renewed: Mapping[Right, bool], sent_at: float, *, entered: bool) -> None:
        """Note that the supervisor has renewed these leases, and whether this worker has a row. While it
        does, the thread here need not, unless something is missing. Does not wait for the database."""
        self._renewed_for_us_at = sent_at
        with self._lock:
            jobs = {right: job for right, job in self._jobs.items() if job.claimed_at < sent_at}
            unknown, lost = compare_renewal(
                renewed, self._jobs, self._unknown, self._claims_started, self._claims_ended
            )
        missing = self._note(jobs, renewed, sent_at)
        self._unknown = unknown
        if missing or lost or not entered:
            # Unknown twice in a row, and the claims under way then have ended: so the reply of a claim was
            # lost. No other worker would take its jobs, since the supervisor renews all that is in this
            # worker's name.
            with self._lock:
                self._doubts = lost  # guard: unknown-claims-are-given-back
            self.wake()

    def _give_back(self, unknown: Set[Right]) -> None:
        with self._lock:
            started = unknown & self._unwritten
        with self._database.begin() as conn:
            released = settle.give_back(conn, unknown - started)  # guard: what-was-started-counts
            lost = settle.lose(conn, started, "could not write its outcome") if started else []
        free_after(self._database.for_claims, [job.row for job in lost if job.failed])
        ended = {job.id for job in lost}
        with self._lock:
            # a job whose end the database refuses was started all the same
            # guard: refused-loss-counts-as-started
            self._unwritten -= {right for right in started if right[0] in ended}
        if released:
            log.warning(
                "%d jobs were claimed in this worker's name without its knowing; they are given back",
                len(released),
            )
        self._reporter.rescued(lost, "could not write the outcome of its attempt")

    def _turn(self) -> float:
        began = monotonic()
        with self._lock:
            doubts, self._doubts = self._doubts, None
        # else the supervisor renews them
        if doubts is not None or began - self._renewed_for_us_at >= 1.5 * self._every:
            if doubts:
                self._give_back(doubts)
            self.beat()
            self._outage.over()
        return began + self._every - monotonic()

    def beat(self) -> None:
        """Renew the leases of all jobs held. Find out for each job that was not renewed whether it is
        lost."""
        with self._lock:
            jobs = dict(self._jobs)
        sent_at = monotonic()
        # each statement commits by itself: a handler that holds the interpreter's lock must not keep rows
        # locked that the supervisor renews
        with self._database.single_statements() as conn:
            self._sign_of_life(conn)
            renewed = lease.extend(conn, jobs, lease_ms=self._lease_ms) if jobs else {}
        if missing := self._note(jobs, renewed, sent_at):
            self._look_at(missing, jobs)

    def _note(self, jobs: dict[Right, Attempt], renewed: Mapping[Right, bool], sent: float) -> list[Right]:
        """Trust the renewed leases. Return the rights to the others."""
        for right, cancel_requested in renewed.items():
            if (job := jobs.get(right)) is not None:
                job.trusted_until = self.trusted_until(sent)
                if cancel_requested:
                    self._cancel(job)
        # for ended jobs the settler finds that out; guard: what-is-settled-is-not-lost
        return [right for right, job in jobs.items() if right not in renewed and not job.ended]

    def cancel(self, rights: Iterable[Right]) -> None:
        """Request a stop of the handlers of these jobs, as far as they are held here: an operator cancels
        them."""
        with self._lock:
            jobs = [self._jobs[right] for right in rights if right in self._jobs]
        for job in jobs:
            self._cancel(job)

    def _cancel(self, job: Attempt) -> None:
        if not (job.cancel_requested and job.stop_requested):  # guard: cancel-is-noted
            job.cancel_requested = True
            job.log_warning("cancel_requested", "an operator cancels it; its handler is asked to stop")
            self._deadlines.request_stop(job)

    def _look_at(self, missing: Sequence[Right], jobs: Mapping[Right, Attempt]) -> None:
        """Find the lost ones among rows that were not renewed. Others are settled by us just now, or locked
        by another transaction, and so not known."""
        completed = {right for right in missing if jobs[right].completed}
        with self._database.read() as conn:
            states = lease.states_of(conn, missing, completed=completed)
        for right, state in states.items():
            job = jobs[right]
            if state is lease.LeaseState.SETTLED:
                job.completed = True  # its row may be pruned while the handler goes on
            elif state is lease.LeaseState.LOST:
                self._reporter.lost(
                    job, "another worker has taken it, or an operator has cancelled it by force"
                )
                job.trusted_until = 0.0
                self.drop([right])
                self._deadlines.request_stop(job)  # guard: a-lost-handler-is-told


OVERDUE_SECONDS = 2.0
"""How long a handler may take after a request to stop. Then its subprocess, if it has one, is killed."""
UNSTARTED_LOOK_SECONDS = 0.05
BEAT_SECONDS = 1.0


class Deadlines(Loop):
    """Watches the jobs that have a timeout, and those with a request to stop, until their handlers end."""

    def __init__(self, stuck: Callable[[Attempt], None], beat: Callable[[], None] = lambda: None) -> None:
        """`stuck` is called with a handler past its timeout that nothing can stop. `beat` is called at least
        each second while this thread can run."""
        super().__init__("sqlq-deadlines", Outage("seeing to the deadlines"))
        self._stuck = stuck
        self._beat = beat
        self._watched: dict[Right, Attempt] = {}

    def watch(self, jobs: Iterable[Attempt]) -> None:
        """Watch those of these jobs that have a timeout."""
        timed = {job.right: job for job in jobs if job.timeout_ms is not None}
        if timed:
            with self._lock:
                self._watched |= timed
            self.wake()

    def request_stop(self, job: Attempt) -> None:
        """Request a stop of a handler, and watch it until it ends."""
        job.cancel()
        with self._lock:
            if not job.ended:
                self._watched[job.right] = job
        self.wake()

    def forget(self, right: Right) -> None:
        """Stop watching a job: its handler has ended, or will not start."""
        if self._watched:
            with self._lock:
                self._watched.pop(right, None)

    # -- the thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        self._beat()
        with self._lock:
            watched = list(self._watched.values())
        now = monotonic()
        next_look = now + BEAT_SECONDS
        for job in watched:
            if job.deadline is not None and job.deadline <= now and not job.timed_out:
                job.timed_out = True
                job.cancel()
            requested_at = job.cancelled_at
            if requested_at is None:  # without a deadline it has not started yet
                due = now + UNSTARTED_LOOK_SECONDS if job.deadline is None else job.deadline
            elif job.kill is None and job.deadline is not None:
                # cancelled before, a thread or coroutine may go on until then
                # guard: a-cancel-does-not-hide-a-timeout
                due = max(requested_at, job.deadline) + OVERDUE_SECONDS
            else:
                due = requested_at + OVERDUE_SECONDS
            if due > now:
                ahead = due if job.timed_out or job.deadline is None else min(due, job.deadline)
                next_look = min(next_look, ahead)
                continue
            self.forget(job.right)
            if not job.ended:  # guard: what-has-ended-is-not-stuck
                if (kill := job.kill) is not None:
                    kill()
                elif job.timed_out:
                    self._stuck(job)
        return next_look - monotonic()
