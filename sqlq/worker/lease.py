"""The leases of what a worker holds: renewed by its supervisor or, where it has none or does not hear of it, by a thread and
on a connection of their own.

A busy handler or event loop cannot starve either (a C call that keeps the GIL starves the thread). A worker trusts a lease by
its own monotonic clock, counted from when the claim or heartbeat was *sent*, less a margin: the database counts from a
later moment, so the lease is never shorter than it is trusted to be.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sqlq.job import Released, Settlement
from sqlq.settings import HEARTBEAT_MS, HEARTBEATS_PER_LEASE, LEASE_MARGIN_MS
from sqlq.store import jobs
from sqlq.store.database import Database
from sqlq.store.dialect import Right
from sqlq.worker.blackbox import BlackBox
from sqlq.worker.outage import Outage
from sqlq.worker.running import RunningJob

log = logging.getLogger("sqlq.worker")

UNSTARTED_LOOK_SECONDS = 0.05
OVERDUE_SECONDS = 2.0
"""How long a handler that was asked to stop may take: then its process is killed, where it has one of its own."""
STOP_SECONDS = 5.0
_UNSUPERVISED = float("-inf")


def heartbeat_seconds(lease_ms: int) -> float:
    """Return the time between two heartbeats."""
    return min(lease_ms / HEARTBEATS_PER_LEASE, HEARTBEAT_MS) / 1000


class Leases:
    """What a worker holds, from the claim until its settlement is committed."""

    def __init__(
        self,
        database: Database,
        sign_of_life: Callable[[Connection], None],
        lease_ms: int,
        keep_finished: bool,
        *,
        stuck: Callable[[RunningJob], None],
        box: BlackBox | None = None,
    ) -> None:
        self._database = database
        self._sign_of_life = sign_of_life
        self._lease_ms = lease_ms
        self._keep_finished = keep_finished
        self._stuck = stuck
        self._box = box
        self._trust_seconds = (lease_ms - min(LEASE_MARGIN_MS, lease_ms / 5)) / 1000
        self._lock = threading.Lock()
        # By right, not by id: a job that was put back may be claimed again here before its last attempt is dropped.
        self._held: dict[Right, RunningJob] = {}
        self._watched: dict[Right, RunningJob] = {}
        """Those with a timeout, and those that were asked to stop."""
        self._renewed_for_us_at = _UNSUPERVISED
        self._unknown: Set[Right] = set()
        """What the supervisor renewed last, but is not held here."""
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqlq-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def trusted_until(self, sent_at: float) -> float:
        """Until when a lease asked for at `sent_at` is certainly ours."""
        return sent_at + self._trust_seconds

    def hold(self, claimed: Iterable[RunningJob]) -> None:
        with self._lock:
            for job in claimed:
                self._held[job.right] = job
                if job.claimed.timeout_ms is not None:
                    self._watched[job.right] = job
                    self._changed.set()

    def starting(self, job: RunningJob) -> None:
        """Note that a handler is about to run: should this process die now, it may be this job's doing."""
        if self._box is not None:
            self._box.started(job.right)

    def drop(self, rights: Iterable[Right]) -> None:
        with self._lock:
            for right in rights:
                self._held.pop(right, None)
                self._watched.pop(right, None)
        if self._box is not None:
            self._box.ended(rights)

    def __len__(self) -> int:
        return len(self._held)

    def stop(self) -> None:
        """End the thread. Leases still held run out, and whoever rescues them takes over."""
        self._stop.set()
        self._changed.set()
        self._thread.join(STOP_SECONDS)

    # -- renewing ----------------------------------------------------------------------------------------------------

    def renewed_for_us(self, renewed: Mapping[Right, bool], sent_at: float) -> None:
        """Take note that the supervisor has renewed these leases; while it does, the thread here has no need to."""
        self._renewed_for_us_at = sent_at
        with self._lock:
            held = {right: job for right, job in self._held.items() if job.claimed_at < sent_at}
            unknown = renewed.keys() - self._held.keys()
        self._note(held, renewed, sent_at)
        # Twice in a row: not a claim whose reply is under way, but one whose reply was lost. Nobody else would end it, since
        # the supervisor renews whatever is in this worker's name.
        self._give_back(unknown & self._unknown)
        self._unknown = unknown

    def _give_back(self, unknown: Set[Right]) -> None:
        if unknown:
            with self._database.begin() as conn:
                jobs.settle(conn, [Settlement(id, token, 0, Released()) for id, token in unknown])
            log.warning("%d jobs were claimed in this worker's name without its knowing; they are given back", len(unknown))

    def _run(self) -> None:
        outage = Outage("renewing leases")
        every = heartbeat_seconds(self._lease_ms)
        next_beat = time.monotonic() + every
        while not self._stop.is_set():
            self._changed.wait(max(0.0, min(next_beat, self._enforce()) - time.monotonic()))
            self._changed.clear()
            if time.monotonic() < next_beat or self._stop.is_set():
                continue
            next_beat = time.monotonic() + every
            if self._renewed_for_us_at > next_beat - 2.5 * every:
                continue
            try:
                self.beat()
                outage.over()
            except DBAPIError as error:
                next_beat = time.monotonic() + outage.met(error)
            except Exception:
                log.exception("renewing leases failed; trying again")
                next_beat = time.monotonic() + every / 2

    def beat(self) -> None:
        """Renew everything held, and say of each job that was not renewed whether it is lost."""
        with self._lock:
            held = dict(self._held)
        sent_at = time.monotonic()
        # each statement commits by itself: a handler that holds the interpreter's lock must not keep rows locked that the supervisor renews
        with self._database.alone() as conn:
            self._sign_of_life(conn)
            renewed = jobs.extend(conn, held, lease_ms=self._lease_ms) if held else {}
        self._note(held, renewed, sent_at)

    def _note(self, held: Mapping[Right, RunningJob], renewed: Mapping[Right, bool], sent_at: float) -> None:
        for right, cancel_requested in renewed.items():
            job = held.get(right)
            if job is None:
                continue
            job.trusted_until = self.trusted_until(sent_at)
            if cancel_requested and not job.cancel_requested:
                job.cancel_requested = True
                log.warning("job %d: an operator cancels it; its handler is asked to stop", job.id, extra=job.fields("cancel_requested"))
                self._ask_to_stop(job)
        missing = [right for right in held if right not in renewed]
        if missing:
            self._look_at(missing, held)

    def _look_at(self, missing: Sequence[Right], held: Mapping[Right, RunningJob]) -> None:
        """A row that was not renewed is locked by somebody (not known), settled by us just now, or lost."""
        with self._database.read() as conn:
            fates = jobs.fates(conn, missing, keep_finished=self._keep_finished)
        for right, fate in fates.items():
            if fate is jobs.Fate.LOST:
                job = held[right]
                log.error(
                    "job %d: lease lost, somebody else has taken it; what this attempt still does will not count",
                    job.id,
                    extra=job.fields("lease_lost"),
                )
                job.trusted_until = 0.0
                self.drop([right])
                self._ask_to_stop(job)

    # -- handlers that must stop -------------------------------------------------------------------------------------

    def _ask_to_stop(self, job: RunningJob) -> None:
        with self._lock:
            self._watched[job.right] = job
        job.cancel()
        self._changed.set()

    def _enforce(self) -> float:
        """Ask handlers past their deadline to stop, and see to those that do not; return when to look again."""
        moment, next_look = time.monotonic(), float("inf")
        with self._lock:
            watched = list(self._watched.values())
        for job in watched:
            if job.cancelled_at is None and job.deadline is not None and job.deadline <= moment:
                job.timed_out = True
                job.cancel()
            if job.cancelled_at is not None:
                due = job.cancelled_at + OVERDUE_SECONDS
            else:  # without a deadline it has not started yet
                due = moment + UNSTARTED_LOOK_SECONDS if job.deadline is None else job.deadline
            if due > moment:
                next_look = min(next_look, due)
                continue
            with self._lock:
                self._watched.pop(job.right, None)
            self._overdue(job)
        return next_look

    def _overdue(self, job: RunningJob) -> None:
        kill = job.kill
        if kill is not None:
            kill()
        elif job.timed_out:
            self._stuck(job)
