"""A worker: claims, executes and settles jobs until it is told to stop.

    claim ──► Executors ──► outcomes ──► Settler ──► committed
      ▲          (slots)                    │
      └───── room, hints, known moments ────┘          Leases renew all the while

`sqlq work` runs it in a child process under a supervisor (see there), a program of your own in itself (`app.worker()`).
Four threads touch the database, each on a connection of its own: the loop below (claim), the settler, the heartbeat, and
the chores (rescue, prune). None of these connections is ever seen by a handler.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sqlq.clock import readable
from sqlq.errors import SchemaVersionError
from sqlq.job import ClaimedJob, Outcome
from sqlq.schema import version
from sqlq.settings import RESCUE_MS, VERSION
from sqlq.store import cluster, jobs, records
from sqlq.store.database import Database
from sqlq.store.dialect import Right
from sqlq.store.postgresql import is_read_only
from sqlq.task import Registry
from sqlq.worker.child import Alone
from sqlq.worker.claim import Claimer
from sqlq.worker.execute import give_back, late
from sqlq.worker.executors import Executors
from sqlq.worker.isolates import Isolates
from sqlq.worker.lease import Leases
from sqlq.worker.options import WorkerOptions
from sqlq.worker.outage import Outage
from sqlq.worker.running import Home, RunningJob
from sqlq.worker.settle import Settler, Tally
from sqlq.worker.vacuum import VacuumWatch
from sqlq.worker.wake import wake_for

log = logging.getLogger("sqlq.worker")

UNSTARTED_SECONDS = 1.0
"""A job that has not started after this long is given back: another worker may have a free slot."""
LARGEST_BACKLOG = 2_000
"""Outcomes not yet written, at which a worker stops claiming until the database has caught up."""
BACKLOG_SECONDS = 0.005
PRUNE_SECONDS = 60.0
PRUNE_BATCH = 1_000
CANCELLED_KEPT_MS = 24 * 3_600_000
SCHEMA_SECONDS = 60.0
"""How often a worker looks whether a migration has changed the tables."""
CANCELLED_SECONDS = 1.0
LAST_SETTLES_SECONDS = 5.0


class Worker:
    """A worker in this process. `run()` blocks; `stop()` may be called from any thread.

    Without isolates, as in a program of your own, tasks marked `isolate=True` and jobs that lost a worker run in its threads
    like all others: a crash takes every job of the process along, and a `def` handler past its timeout keeps its slot until it
    ends.
    """

    def __init__(
        self, database: Database, tasks: Registry, options: WorkerOptions, *, ties: Alone | None = None, isolates: Isolates | None = None
    ) -> None:
        self.id = str(uuid.uuid4())
        self._database = database = database.for_loops
        self._tasks = tasks
        self._options = options
        self._ties = ties or Alone()
        self._isolates = isolates
        self._grace_ms = options.grace_ms
        self._stopping = threading.Event()
        self._retiring: str | None = None
        self._ended = threading.Event()
        self._leaving_now = threading.Event()
        self._left = threading.Event()
        self._wake = wake_for(database)
        keep_finished = options.retention_ms != 0
        self._keep_finished = keep_finished
        self._leases = Leases(database, self._sign_of_life, options.lease_ms, keep_finished, stuck=self._stuck, box=self._ties.box)
        self._settler = Settler(
            database,
            self._leases,
            keep_finished=keep_finished,
            due_again=self._wake.at,
            settled=self._wake.call if options.drain else lambda: None,
        )
        self._executors = Executors(options.concurrency, self._leases.starting, self._settle, isolates)
        self._claimer = Claimer(database, self.id, options.queues, options.concurrency, options.lease_ms, drain=options.drain)
        self._chores_thread = threading.Thread(target=self._chores, name="sqlq-chores", daemon=True)
        self._claimed = 0
        self._schema = version.Watch()
        self._left_behind: SchemaVersionError | None = None

    # -- from outside ------------------------------------------------------------------------------------------------

    def stop(self, grace_ms: int | None = None) -> None:
        """Stop: the first call lets running jobs finish within the grace time, the second leaves at once.

        With `grace_ms` the grace time is no longer than that. Returns at once, and may be called from any thread; not from a
        signal handler, which may have interrupted the very thread whose lock it would wait for. See `sqlq.cli.work` for one
        way to come from signals to here.
        """
        if grace_ms is not None:
            self._grace_ms = min(grace_ms, self._grace_ms)
        elif self._stopping.is_set():
            self._leaving_now.set()
        self._stopping.set()
        self._wake.call()
        self._executors.start_no_more()

    def run(self, *, patient: bool = False) -> Tally:
        """Work until stopped (or drained, or `max_jobs` or `max_lifetime` is reached), and return how many attempts ended how.

        Raises `SchemaVersionError` when this sqlq cannot use the tables, at once or, when a migration has made them so
        meanwhile, after having stopped in good order. With `patient` a database that is away at the start is waited for; after
        the start all trouble with the database is waited out.
        """
        self._ties.listen(stop=self.stop, renewed=self._renewed_for_us)
        if not self._enter(patient):
            return self._settler.tally
        self._wake.start()
        self._leases.start()
        self._settler.start()
        self._chores_thread.start()
        self._ties.ready(worker=self.id, url=self._database.engine.url.render_as_string(hide_password=False), schema=self._database.schema)
        try:
            self._work()
        finally:
            self._shut_down()
        if self._left_behind:
            raise self._left_behind
        return self._settler.tally

    @property
    def tally(self) -> Tally:
        """How many attempts ended how, so far."""
        return self._settler.tally

    def _enter(self, patient: bool) -> bool:
        """Enter the worker into the database; return False when it was stopped before it could be."""
        outage = Outage("starting")
        while not self._stopping.is_set():
            try:
                with self._database.begin() as conn:
                    self._schema.look(conn, self._database.schema)
                    self._register(conn)
                outage.over()
                self._home = Home(self._database.schema, self._keep_finished)
                return True
            except DBAPIError as error:
                # at the start by hand a database that cannot be reached is a mistake in its URL; a standby is none
                if not self._database.dialect.is_away(error) or not (patient or is_read_only(error)):
                    raise
                self._stopping.wait(outage.met(error))
        return False

    def _retire(self, why: str, *, replace: bool = True) -> None:
        """Claim no more, and end when what runs has ended, however long that takes."""
        if self._retiring is None:
            self._retiring = why
            self._ties.leaving(why, replace=replace)
            self._wake.call()

    def _stuck(self, job: RunningJob) -> None:
        """A thread cannot be killed, only its process: this one takes no new jobs and ends when the others are done."""
        log.error(
            "job %d: %s goes on past its timeout, and a thread cannot be stopped; %s",
            *(job.id, job.task),
            "this process ends when its other jobs have" if self._ties.supervised else "its slot is lost until it ends",
            extra=job.fields("stuck"),
        )
        if self._ties.supervised:
            self._retire("a handler does not stop")

    def _renewed_for_us(self, renewed: dict[Right, bool], sent_at: float, entered: bool) -> None:
        try:
            self._leases.renewed_for_us(renewed, sent_at)
            if not entered:
                with self._database.begin() as conn:
                    self._register(conn)
        except DBAPIError as error:
            log.debug("what the supervisor said could not be looked into: %s", error)

    def _sign_of_life(self, conn: Connection) -> None:
        if not cluster.seen(conn, self.id):
            self._register(conn)

    def _register(self, conn: Connection) -> None:
        cluster.register(
            conn,
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            queues=self._options.queues,
            concurrency=self._options.concurrency,
        )

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        outage, quiet = Outage("claiming jobs"), False
        lifetime_ms = self._options.max_lifetime_ms
        ends_at = float("inf") if lifetime_ms is None else time.monotonic() + lifetime_ms / 1000
        while not (self._stopping.is_set() or self._retiring):
            self._ties.pulse()
            if time.monotonic() >= ends_at:
                self._retire("its lifetime is over")
                return
            limit = self._room()
            if limit == 0:
                if self._claimed == self._options.max_jobs and not self._executors.load()[1]:
                    self._retire("it has had its number of jobs")
                    return
                self._give_back_unstarted()
                continue
            # Looked at before the claim: what was settled by then, and is due again, the claim sees.
            held_nothing = not len(self._leases)
            try:
                claimed = self._claim(limit, quiet)
            except DBAPIError as error:
                self._stopping.wait(outage.met(error))
                continue
            except Exception:
                log.exception("claiming failed; trying again")
                self._stopping.wait(1.0)
                continue
            outage.over(wrote=claimed > 0)
            if claimed:
                self._wake.found_work()
            elif self._options.drain and held_nothing:
                self._retire("nothing is available", replace=False)
                return
            quiet = claimed < limit and not self._wake.wait()

    def _room(self) -> int:
        """Return how many jobs to claim; 0 after having waited a moment for room."""
        if self._settler.backlog() > LARGEST_BACKLOG:
            self._stopping.wait(BACKLOG_SECONDS)
            return 0
        running, ready = self._executors.load()
        limit = self._claimer.demand(running, ready, self._executors.ended)
        if self._options.max_jobs is not None:
            limit = min(limit, self._options.max_jobs - self._claimed)
        if limit == 0 and (ready or self._claimed != self._options.max_jobs):
            self._executors.wait_for_room(ready // 2, UNSTARTED_SECONDS / 4)
        return limit

    def _claim(self, limit: int, quiet: bool) -> int:
        sent_at = time.monotonic()
        claimed = self._claimer.claim(limit, quiet=quiet)
        if claimed:
            trusted_until = self._leases.trusted_until(sent_at)
            running = [self._running(job, trusted_until) for job in claimed]
            self._leases.hold(running)
            self._executors.offer(running)
            self._claimed += len(claimed)
        return len(claimed)

    def _running(self, job: ClaimedJob, trusted_until: float) -> RunningJob:
        task = self._tasks.get(job.task)
        isolated = self._isolates is not None and task is not None and (task.isolate or job.losses > 0)
        return RunningJob(job, task, trusted_until, self._home, isolated=isolated)

    def _give_back_unstarted(self) -> None:
        for job in self._executors.take_back(claimed_before=time.monotonic() - UNSTARTED_SECONDS):
            self._settle(job, give_back(job.claimed))

    def _settle(self, job: RunningJob, outcome: Outcome) -> None:
        if not job.given_up and not self._left.is_set():
            self._settler.settle(job, outcome)

    # -- the chores --------------------------------------------------------------------------------------------------

    def _chores(self) -> None:
        """Rescue what other workers lost, and prune; any number of workers may do so at the same time."""
        outage = Outage("rescuing jobs")
        rescue_seconds = min(RESCUE_MS, self._options.lease_ms / 4) / 1000
        prune_at = time.monotonic() + random.uniform(0, PRUNE_SECONDS)
        look_at = time.monotonic() + SCHEMA_SECONDS
        vacuum = VacuumWatch(self._database)
        wait = 0.0
        while not self._ended.wait(wait):
            try:
                if time.monotonic() >= look_at:
                    self._look_at_schema()
                    look_at = time.monotonic() + SCHEMA_SECONDS * random.uniform(0.8, 1.2)
                self._rescue()
                vacuum.look(self._executors.ended)
                if time.monotonic() >= prune_at:
                    self._prune()
                    prune_at = time.monotonic() + PRUNE_SECONDS * random.uniform(0.8, 1.2)
                outage.over()
                wait = rescue_seconds * random.uniform(0.8, 1.2)
            except DBAPIError as error:
                wait = outage.met(error)
                look_at = 0.0  # perhaps what it does not answer is a question about a column that is gone
            except Exception:
                log.exception("the chores failed; trying again")
                wait = rescue_seconds

    def _look_at_schema(self) -> None:
        """Stop in good order when a migration has left this sqlq behind."""
        try:
            with self._database.read() as conn:
                self._schema.look(conn, self._database.schema)
        except SchemaVersionError as error:
            self._left_behind = error
            log.error("stopping: %s", error, extra={"event": "schema_changed"})
            if not self._stopping.is_set():
                self.stop()

    def _rescue(self) -> None:
        with self._database.begin() as conn:
            rescued = jobs.rescue(conn)
        for job in rescued:
            log.warning(
                "job %d %s (queue %s, attempt %d): worker %s did not renew its lease; %s",
                *(job.id, job.task, job.queue, job.attempts, job.owner),
                "failed, its attempts are spent" if job.failed else "it runs again",
                extra={"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempts, "event": "rescued"},
            )
        if rescued:
            self._wake.call()

    def _prune(self) -> None:
        with self._database.begin() as conn:
            cluster.sweep(conn, silent_ms=24 * 3_600_000)
        if self._options.retention_ms is None:
            return
        # where finished jobs are not kept, those an operator cancelled are, for as long as their old owner may ask for them
        retention_ms = max(self._options.retention_ms, CANCELLED_KEPT_MS if self._options.retention_ms == 0 else 1)
        pruned = PRUNE_BATCH
        while pruned == PRUNE_BATCH and not self._ended.is_set():
            with self._database.begin() as conn:
                pruned = records.prune(conn, finished_older_than_ms=retention_ms, limit=PRUNE_BATCH)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        self._ended.set()
        self._executors.start_no_more()
        self._wake.stop()
        for job in self._executors.take_back():
            self._settle(job, give_back(job.claimed))
        self._await_running()
        if not self._leaving_now.is_set():
            self._end_running()
            if not self._settler.finish(LAST_SETTLES_SECONDS):
                log.error("not all outcomes could be written before leaving; the leases of these jobs run out and they run again")
            try:
                with self._database.begin() as conn:
                    cluster.leave(conn, self.id)
            except DBAPIError as error:
                log.debug("could not sign off: %s", error)
        self._left.set()  # what a handler still ends with comes too late
        self._settler.finish(0)
        # a connection that comes back after its pool was closed would stay open
        self._chores_thread.join(LAST_SETTLES_SECONDS)
        self._leases.stop()
        self._executors.close()

    def _await_running(self) -> None:
        """Wait for what runs: when told to stop for the grace time, when retiring for as long as it takes, but for handlers
        that do not stop."""
        running, _ = self._executors.load()
        until = float("inf")
        while not self._leaving_now.is_set() and time.monotonic() < until:
            self._ties.pulse()
            if self._stopping.is_set() and until == float("inf"):
                until = time.monotonic() + self._grace_ms / 1000
                if running:
                    grace = readable(self._grace_ms)
                    log.info("waiting up to %s for what runs (%d)", grace, running, extra={"event": "stopping"})
            if self._executors.wait_idle(0.1 if until == float("inf") else max(0.0, min(until - time.monotonic(), 0.1))):
                return
            if not self._stopping.is_set() and all(job.timed_out for job in self._executors.running()):
                return

    def _end_running(self) -> None:
        """End what the time did not suffice for: coroutines are cancelled, processes killed, threads left behind."""
        for job in self._executors.running():
            job.cancel()
        self._executors.wait_idle(CANCELLED_SECONDS)
        for job in self._executors.running():
            self._settle(job, late(job) or give_back(job.claimed))
            job.given_up = True

    @property
    def left_running(self) -> bool:
        """Whether handlers that could not be stopped still run in threads of this process."""
        return bool(self._executors.running())
