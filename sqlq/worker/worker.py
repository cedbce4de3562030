"""A worker: claims, executes and settles jobs until it is stopped.

    claim ──► Executor ──► outcomes ──► Settler ──► committed
      ▲          (slots)                    │
      └───── room, notifications, times ────┘          Leases renew all the while

`sqlq work` runs it in a child process under a supervisor (see there), a program of your own in itself
(`app.worker()`). Each thread that uses the database has a connection of its own: the loop below (claim), the
settler, the heartbeat and the maintenance (rescue, prune). The poller, the unblocker, the admissions, and the
writer of progress begin when they are needed. No handler ever sees these connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
from contextlib import closing
from dataclasses import replace
from time import monotonic
from typing import Any

from sqlq.database.timeouts import waits_while
from sqlq.errors import (
    ConfigurationError,
    ExecutionError,
    MissingFileError,
    SchemaVersionError,
    SqlqError,
)
from sqlq.model.outcome import Outcome
from sqlq.model.retry import remote_error
from sqlq.payload import codec
from sqlq.schema import version
from sqlq.store.workers.look import Look
from sqlq.store.workers.workers import WORKING
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.lifespan import Lifespan
from sqlq.worker.attempt.progress import ProgressWriter
from sqlq.worker.background import STARTED_BEFORE, Background
from sqlq.worker.claim import Claimer, Intake
from sqlq.worker.ipc.parent import Facts, NoParent
from sqlq.worker.ipc.pipe import unpacked
from sqlq.worker.log import log
from sqlq.worker.loop import Outage, begins, passing_over
from sqlq.worker.maintain.control import Control
from sqlq.worker.maintain.maintenance import Maintenance
from sqlq.worker.maintain.services import Follow, SchemaWatch
from sqlq.worker.options import AppParts, WorkerOptions
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.run.executor import CROWDED_SECONDS, UNSTARTED_SECONDS, Executor
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.run.lease import Deadlines, Leases
from sqlq.worker.settle.after import Admissions, AfterSettling, Unblocker
from sqlq.worker.settle.settle import Settler, Tally
from sqlq.worker.stop import Bounds, Grace, Lifespans, stopped_by_signals
from sqlq.worker.wait.poller import NEVER, LastLook, Poller, look_seconds
from sqlq.worker.wait.wake import wake_for

BACKLOG_SECONDS = 0.005
LOOK_SECONDS = 0.1
IDLE_SECONDS = 10.0
"""A worker that has rested for so long keeps two connections: for claims, and for all else."""


class Worker(Background):
    """A worker in this process. `run()` blocks; `start()`, or a `with` block, runs it in a thread; `stop()`
    may be called from any thread.

    A worker in a program of your own has no subprocesses. There tasks marked `isolate=True`, and jobs that
    lost a worker, run in its threads like all others. A crash takes every job of the process along. A `def`
    handler past its timeout keeps its slot until it ends."""

    _retiring: str | None = None
    _has_left = False
    """Whether outcomes come too late."""
    _claimed = 0
    _fault: SqlqError | None = None
    """Why it has stopped by itself, for `run` to raise."""

    def __init__(
        self,
        app: AppParts,
        options: WorkerOptions,
        *,
        supervision: NoParent | None = None,
        isolates: IsolatedProcesses | None = None,
    ) -> None:
        super().__init__()
        self.id = str(uuid.uuid4())
        self._bounds = Bounds(options)
        self._app = app
        self._database = database = app.database.for_loops
        self._options = options
        self._supervision = supervision or NoParent()
        self._meter = self._supervision.meter(app.tasks)
        self._reporter = reporter = Reporter(app.events, self._meter)
        self._grace = Grace(options.grace_ms, self._supervision.pulse)
        self._ending = threading.Lock()
        self._last_look = LastLook(self._supervision, options.poll_ms)
        self._wake = wake_for(database, self._last_look.is_recent, options.poll_ms)
        self._deadlines = Deadlines(self._stuck, self._supervision.beat)
        schema = version.Watch()
        self._control = Control(
            *(database, self.id, options, self._wake, self._grace, schema, self._supervision, self._retire)
        )
        self._control.leases = self._leases = Leases(
            database,
            self._control.sign_of_life,
            options.lease_ms,
            reporter,
            deadlines=self._deadlines,
            box=self._supervision.box,
        )
        self._progress = ProgressWriter(database)
        self._unblocker = Unblocker(database, self._wake.call, self._after_unblocking)
        self._admissions = Admissions(database, self._admitted, self._after_unblocking, in_use=app.has_limits)
        self._settler = Settler(
            database,
            self._leases,
            reporter,
            self._progress,
            AfterSettling(self._unblocker, self._admissions, self._wake.at, self._after_settling),
            worker=(self.id, f"{socket.gethostname()} pid {os.getpid()}"),
        )
        self._executors = Executor(
            options.concurrency,
            self._leases.starting,
            self._settle,
            isolates,
            may_start=self._settler.has_room,
        )
        own_lifespan = (
            None
            if app.lifespan is None
            else Lifespan(app.lifespan, self._executors.run_coroutine, self._lifespan_fell)
        )
        self._lifespans = Lifespans(own_lifespan, isolates, self._grace)
        self._intake = Intake(
            database,
            self.id,
            app.tasks,
            self._progress,
            own_lifespan,
            isolates is not None,
            options.isolate,
        )
        self._claimer = Claimer(*(database, self.id, options), tasks=app.tasks, newest_first=app.newest_first)
        follow = Follow(
            *(database, app.schedules, app.tasks),
            self._supervision.began_at or monotonic(),
        )
        self._control.maintenance = self._maintenance = Maintenance(
            *(database, options),
            [
                *([] if options.drain else [follow]),  # guard: a-drain-does-not-tick
                SchemaWatch(database, schema, self._stop_for),
                self._control,
            ],
            reporter=reporter,
            freed=self._wake.call,  # on SQLite it would see the commit up to 50 ms later
            pauses_ended=self._control.pauses_ended,
            last_look=self._last_look,
        )
        self._poller = (
            None
            if database.dialect.in_a_file
            else Poller(
                *(database, options, self._wake.hinted),
                last_look=self._last_look,
                looked=self._looked,
                workers=lambda: [self.id],
            )
        )

    # -- from outside ----------------------------------------------------------------------------------------

    async def _arun(self) -> Tally:
        """Run in a thread, and meanwhile `async def` handlers and the lifespan on this event loop. A cancel
        stops it at once."""
        loop = asyncio.get_running_loop()
        self._executors.run_on(loop)
        running = loop.run_in_executor(None, self.run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop(0)
            await running  # guard: a-cancelled-drain-leaves-no-worker
            raise

    def stop(self, grace_ms: int | None = None) -> None:
        """Stop: the first call lets running jobs finish within the grace time, the second leaves at once.

        With `grace_ms` the grace time is no longer than that. Returns at once, and may be called from any
        thread. Do not call it from a signal handler, which may have interrupted the thread whose lock it
        would wait for. Let the signal handler start a thread.
        """
        self._grace.stop(grace_ms)
        self._wake.call()
        self._executors.start_no_more()

    def pause(self) -> None:
        """Claim nothing until `resume`. Running jobs go on; jobs that have not started are released. Returns
        at once, and may be called from any thread."""
        self._control.pause()

    def resume(self) -> None:
        """Claim again."""
        self._control.pause(paused=False)

    def run(self, *, patient: bool | float = False) -> Tally:
        """Work until stopped (or drained, or `max_jobs` is reached), and return how many attempts ended how.

        Raises `SqlqError` when the App's lifespan fails. Raises `SchemaVersionError` at once when this sqlq
        cannot use the tables. When a migration makes them so meanwhile, it raises that after it has stopped
        in good order. Raises `ExecutionError` likewise where it cannot go on by a fault that is not the
        database's. With `patient` it waits for a database that is away at the start, with a number so
        many seconds. After the start it waits out all trouble with the database. Raises `ConfigurationError`
        for a worker that has been run before.

        In the main thread SIGTERM and SIGINT call `stop` meanwhile, unless the program handles them itself.
        """
        if self._has_run:  # its parts have ended; guard: a-worker-runs-once
            raise ConfigurationError(STARTED_BEFORE)
        self._has_run = True
        self._supervision.listen(
            {
                "stop": self.stop,
                "renewed": self._renewed_for_us,
                "events": self._events_of_dead_workers,
                "look": lambda _: self._wake.hinted(),
                **self._control.handlers(),
            },
            self._report,
        )
        with stopped_by_signals(self.stop), waits_while(self._grace.patience):
            if self._control.enter(patient=patient):
                self._intake.target = Target(
                    lambda: self._app.database,
                    self._database.seal,
                    self._database.schema,
                    self._app.tasks,
                    self._app.plan,
                )
                try:
                    with closing(self._executors), self._lifespans.around() as entered:
                        if entered:
                            self._start_and_work()
                finally:
                    self._control.sign_off()
        if self._fault:
            raise self._fault
        return self._settler.tally

    def _start_and_work(self) -> None:
        self._bounds.begin()
        codec.read_quickly()
        if self._app.events.wants("started"):
            self._intake.on_start = self._reporter.started
        self._wake.start()
        if self._poller is not None:
            self._poller.start()
        self._leases.start()
        self._deadlines.start()
        self._settler.start()
        self._admissions.start()
        self._maintenance.start()
        self._supervision.ready(Facts.of(self.id, self._database, self._options))
        self._control.ready()
        self._is_ready.set()
        self._database.on_another_file = self._another_file
        try:
            self._work()
        finally:
            self._shut_down()
            self._database.on_another_file = lambda: None

    def _report(self) -> dict[str, Any]:
        running = self._executors.load()[0]
        self._has_work()
        state = self._control.state
        return {
            "tally": vars(self.tally),
            "running": running,
            "idle_ms": self._bounds.idle_ms(),
            "state": state if state != WORKING else "busy" if running else "idle",
        }

    def _has_work(self) -> bool:
        """Whether this worker holds jobs, or is paused and so waits for none."""
        works = self._executors.load()[0] > 0 or len(self._leases) > 0 or self._control.is_paused
        if works:
            self._bounds.works()
        return works

    @property
    def tally(self) -> Tally:
        """How many attempts ended how, so far."""
        return self._settler.tally

    # -- events from its parts -------------------------------------------------------------------------------

    def _retire(self, why: str, *, replace: bool = True) -> None:
        """Claim no more, and end when all running jobs have ended, however long that takes."""
        if self._retiring is None:
            self._retiring = why
            self._supervision.leaving(why, replace=replace)
            self._wake.call()

    def _stuck(self, job: Attempt) -> None:
        """Retire this process under a supervisor: a thread cannot be killed, only its process. It ends when
        its other jobs have."""
        text = "%s goes on past its timeout, and a thread cannot be stopped; %s"
        if self._supervision.supervised:
            job.log_error("stuck", text, job.task, "this process ends when its other jobs have")
            self._retire("a handler does not stop")
        else:
            job.log_error("stuck", text, job.task, "its slot is lost until it ends")

    def _another_file(self) -> None:
        """Leave at once, and write no outcome. Jobs in another file may have the ids and tokens of those that
        run here."""
        why = "the database file was replaced by another one"
        if not self._has_left:
            self._has_left = True
            log.error("stopping at once: %s", why, event="stopping")
            self._supervision.leaving(why, replace=True)
            self.stop()
            self.stop()
        raise MissingFileError(why)  # guard: outcomes-stay-with-their-file

    def _lifespan_fell(self) -> None:
        log.error(
            "the lifespan has ended by itself: this worker claims no more, and ends when what it runs has"
        )
        self._retire("its lifespan has ended")

    def _renewed_for_us(self, message: dict[str, Any]) -> None:
        renewed = {(id, token): cancelled for id, token, cancelled in message["rights"]}
        self._leases.renewed_for_us(renewed, message["sent_at"], entered=message["entered"])

    def _events_of_dead_workers(self, events: list[Any]) -> None:
        for event in map(unpacked, events):
            error = None if event.error is None else remote_error(event.error)
            self._app.events.tell(replace(event, exception=error))  # guard: deaths-are-told

    def _looked(self, look: Look, at: float) -> None:
        self._control.heed(look.wanted)
        self._maintenance.looked(look, at)

    def _stop_for(self, fault: SqlqError) -> None:
        """Stop in good order: this sqlq cannot go on, or a migration has left it behind."""
        if self._fault is None:  # the service that found it may have another turn before its thread ends
            self._fault = fault
            event = "schema_changed" if isinstance(fault, SchemaVersionError) else "stopping"
            log.error("stopping: %s", fault, event=event)
            if not self._grace.stopping.is_set():
                self.stop()

    # -- the loop --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        outage = Outage("claiming jobs", self._database, is_vital=True)
        quiet = is_last = False
        while not (self._grace.stopping.is_set() or self._retiring):
            self._supervision.pulse()
            if (fault := outage.fault()) is not None:
                self._stop_for(ExecutionError(fault))
                return
            if (why := self._bounds.is_too_large()) is not None:
                self._retire(why)
                return
            if self._bounds.is_idle_for_long() and not self._has_work():
                self._retire("nothing has come for long", replace=False)
                return
            if self._is_held_up():
                continue
            limit = self._room()
            # a drain would leave behind jobs due later; guard: drains-keep-what-waits-for-processes
            if not self._options.drain:
                self._executors.release_crowded()
            self._executors.release_unstarted()  # guard: give-back-unstarted
            if limit == 0:
                if self._claimed == self._options.max_jobs and not self._executors.load()[1]:
                    self._retire("it has had its number of jobs")
                    return
                continue
            # Read before the claim: the claim sees jobs that were settled by then and are due again.
            # A job is handed to the unblocker before it is dropped from the leases.
            held_nothing = not len(self._leases) and self._unblocker.is_idle  # guard: drain-awaits-unblocks
            held_nothing = held_nothing and self._admissions.is_idle  # guard: drain-awaits-a-look-under-way
            try:
                with self._leases.claiming():  # guard: the-loop-says-that-it-claims
                    claimed = self._claim(limit, quiet)
            except Exception as error:
                self._bounds.cannot_look()  # guard: an-outage-is-no-idleness
                self._grace.stopping.wait(outage.wait_after(error))
                continue
            outage.over(wrote=claimed > 0)
            self._bounds.looked()
            if claimed:
                self._bounds.works()
                self._wake.found_work()
            if self._options.drain and not claimed and held_nothing:
                if is_last:
                    self._retire("nothing is available", replace=False)
                    return
                # The next claim sees jobs that a service, or the admitting thread, has freed since this one.
                self._maintenance.await_turn()  # guard: drain-awaits-maintenance
                is_last = not self._admissions.look_now()  # guard: drain-claims-once-more
                if is_last:
                    quiet = False
                    continue
            is_last = False
            if claimed == limit:
                self._supervision.more()
                quiet = False
            else:
                self._admissions.look()
                quiet = not self._wake.wait(self._claimer.next_due)
                quiet = quiet and not self._rested_until_called()

    def _is_held_up(self) -> bool:
        """Whether an operator has paused this worker, or it retires. A paused worker first waits for
        something to happen."""
        self._control.look()
        if not self._control.is_paused:  # guard: paused-workers-claim-nothing
            return self._retiring is not None
        self._executors.release_ready()
        self._wake.wait()
        return True

    def _rested_until_called(self) -> bool:
        """Rest as long as a poller looks for this worker. Return whether something happened. The rest is
        short while jobs wait for slots: no other thread sees when they have waited for too long."""
        # only this worker knows jobs that are due before the poller can see them
        seen_by = monotonic() + look_seconds(self._options.poll_ms)
        due = self._claimer.next_due if self._claimer.next_due < seen_by else NEVER
        began = rested_since = monotonic()
        while self._wake.rests and not (self._grace.stopping.is_set() or self._retiring):
            self._supervision.pulse(rests=True)
            if self._wake.wait(due):
                return True
            if self._bounds.is_idle_for_long() and not self._has_work():
                break
            # guard: who-holds-jobs-rests-no-longer
            if self._executors.load()[1] and monotonic() >= began + UNSTARTED_SECONDS / 4:
                break
            if monotonic() >= rested_since + IDLE_SECONDS:
                rested_since = monotonic()
                self._close_idle_connections()
        return False

    def _close_idle_connections(self) -> None:
        """Close connections that a busy time has left open: all workers together would have many."""
        with passing_over("idle connections could not be closed"):
            self._app.database.close_idle()
            self._database.close_idle(more_than=1)

    def _room(self) -> int:
        """Return how many jobs to claim; 0 after having waited shortly for room."""
        if not self._settler.has_room():
            self._grace.stopping.wait(BACKLOG_SECONDS)
            return 0
        running, waiting = self._executors.load()
        blocked = self._executors.waits_for_isolates_alone()
        done = self._executors.ended, self._executors.busy_seconds
        limit = self._claimer.demand(running, waiting, *done, blocked=blocked)
        if self._options.max_jobs is not None:
            limit = min(limit, self._options.max_jobs - self._claimed)
        if limit == 0 and (waiting or self._claimed != self._options.max_jobs):
            self._executors.wait_for_room(waiting // 2, UNSTARTED_SECONDS / 4)
        return limit

    def _claim(self, limit: int, quiet: bool) -> int:
        sent_at = monotonic()
        claimed = self._claimer.claim(limit, quiet=quiet)
        if self._meter is not None:
            self._meter.claimed(claimed, monotonic() - sent_at)
        if claimed:
            trusted_until = self._leases.trusted_until(sent_at)
            ready, unready = self._intake.readable(claimed)
            running = [self._intake.running(job, trusted_until) for job in ready]
            not_run = [(self._intake.running(job, trusted_until), outcome) for job, outcome in unready]
            if all(job.isolated for job in running):
                # guard: few-are-claimed-in-vain
                self._claimer.passes_again_at = monotonic() + CROWDED_SECONDS
            self._leases.hold([*running, *(job for job, _ in not_run)])
            self._leases.arrived(trusted_until)
            self._executors.offer(running)
            for job, outcome in not_run:
                self._settle(job, outcome)
            self._claimed += len(claimed)
        return len(claimed)

    def _after_settling(self) -> None:
        self._executors.start_ready()
        self._after_unblocking()

    def _admitted(self, starts: list[float]) -> None:
        """Look for jobs that were admitted, now or when they start."""
        for moment in starts or [monotonic()]:
            self._wake.at(moment)

    def _after_unblocking(self) -> None:
        if self._options.drain:
            self._wake.call()

    def _settle(self, job: Attempt, outcome: Outcome) -> None:
        """Take the outcome of a job that has ended, or will not start. The first outcome counts: a handler
        may end just as its job is released."""
        with self._ending:
            if job.ended:  # guard: an-attempt-ends-once
                return
            job.ended = True
        self._deadlines.forget([job.right])
        if not self._has_left:
            self._settler.settle(job, outcome)

    # -- the end ---------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        self._maintenance.end()
        self._executors.start_no_more()
        self._wake.stop()
        if self._poller is not None:
            self._poller.close(self._grace.last_statement())
        self._executors.release_ready()
        if self._executors.load()[0]:
            # its database may take long, and is not waited for
            begins(threading.Thread(target=self._control.stopping, name="sqlq-stopping", daemon=True))
        self._grace.await_running(self._executors)
        if not self._grace.leaves_now:
            self._executors.release_running()
            self._settler.finish(self._grace.patience)
            self._unblocker.finish(self._grace.patience)
            self._admissions.finish(self._grace.patience)
            self._control.sign_off()
        self._has_left = True  # outcomes from here on come too late
        for part in (self._settler, self._unblocker, self._admissions, self._progress):
            part.close(self._grace.last_statement())
        # a connection that comes back after its pool was closed would stay open
        self._maintenance.close(self._grace.last_statement())
        self._leases.close(self._grace.last_statement())
        self._deadlines.close()
        self._tell_the_last()

    def _tell_the_last(self) -> None:
        """Wait until listeners have received all events."""
        may_wait = self._grace.last_wait()
        # guard: events-are-flushed
        while not self._app.events.flush(LOOK_SECONDS) and may_wait():
            pass

    @property
    def left_running(self) -> bool:
        """Whether handlers that could not be stopped, or a lifespan, still run in threads of this process."""
        return bool(self._executors.running()) or self._lifespans.is_open()
