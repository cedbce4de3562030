"""A worker: claims, executes and settles jobs until it is stopped.

    claim ──► Executor ──► outcomes ──► Settler ──► committed
      ▲          (slots)                    │
      └───── room, notifications, times ────┘          Leases renew all the while

`sqlq work` runs it in a child process under a supervisor (see there), a program of your own in itself
(`app.worker()`). Each thread that uses the database has a connection of its own: the loop below (claim), the
settler, the heartbeat and the maintenance (rescue, prune). The poller, the unblockers, and the
writer of progress begin when they are needed. No handler ever sees these connections.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from contextlib import closing
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from sqlq.database.timeouts import waits_while
from sqlq.errors import ConfigurationError, ExecutionError, MissingFileError, SchemaVersionError, SqlqError
from sqlq.model.outcome import Outcome, Released
from sqlq.model.retry import remote_error
from sqlq.store import blockers
from sqlq.store.workers.look import Look
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.lifespan import Lifespan
from sqlq.worker.attempt.progress import ProgressWriter
from sqlq.worker.claim.claimer import Claimer, Intake
from sqlq.worker.decide import Act, AwaitRoom, Claim, Claimed, Retire, Signals, Turn, decide
from sqlq.worker.ipc.parent import Facts, NoParent
from sqlq.worker.ipc.pipe import unpacked
from sqlq.worker.lifecycle.stop import (
    STARTED_BEFORE,
    Background,
    Bounds,
    Grace,
    lifespans,
    stopped_by_signals,
)
from sqlq.worker.maintain.control import Control
from sqlq.worker.maintain.maintenance import Maintenance
from sqlq.worker.maintain.services import Follow, SchemaWatch
from sqlq.worker.options import AppParts, WorkerOptions
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.run.executor import CROWDED_SECONDS, UNSTARTED_SECONDS, Executor
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.run.lease import Deadlines, Leases
from sqlq.worker.settle.after import Unblocker
from sqlq.worker.settle.settle import Counts, Settler
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import Outage, begins, passing_over
from sqlq.worker.wait.poller import LastLook, Poller, look_seconds
from sqlq.worker.wait.wake import wake_for

IDLE_SECONDS = 10.0
"""A worker that has rested for this time keeps two connections: for claims, and for all else."""


class Worker(Background):
    """A worker in this process. `run()` blocks; `start()`, or a `with` block, runs it in a thread; `stop()`
    may be called from any thread.

    A worker in a program of your own has no subprocesses. There tasks marked `isolate=True`, and jobs that
    lost a worker, run in its threads like all others. A crash takes every job of the process along. A `def`
    handler past its timeout keeps its slot until it ends."""

    _retirement: Retire | None = None
    _has_left = False
    """Whether outcomes come too late."""
    _claimed = 0
    _passes_at = -inf
    """When jobs may be claimed again past those that wait for subprocesses."""
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
        self._app, self._options, self._isolates = app, options, isolates
        self._database = database = app.database.for_loops
        self._supervision = supervision = supervision or NoParent()
        self._meter = supervision.meter(app.tasks)
        self._reporter = reporter = Reporter(app.events, self._meter)
        self._grace = grace = Grace(options.grace_ms, supervision.pulse)
        self._bounds = Bounds(options.max_rss)
        self._ending = threading.Lock()
        self._last_look = LastLook(supervision, options.poll_ms)
        self._wake = wake_for(database, self._last_look.is_recent, options.poll_ms)
        signals = self._signals()
        self._control = Control(database, self.id, options, self._wake, grace, supervision, signals)
        beats, lease_ms, box = self._control.sign_of_life, options.lease_ms, supervision.box
        self._deadlines = Deadlines(self._stuck, supervision.beat)
        self._leases = leases = Leases(database, beats, lease_ms, reporter, self._deadlines, box)
        self._progress = progress = ProgressWriter(database)
        self._unblockers = unblockers = [
            Unblocker(blocker(), database, signals, in_use=blocker.name in app.declares)
            for blocker in blockers.BLOCKERS
        ]
        self._settler = Settler(database, self.id, leases, reporter, progress, unblockers, signals)
        starting, may_start = leases.starting, self._settler.has_room
        self._executors = Executor(options.concurrency, starting, self._settle, may_start, isolates)
        self._lifespan = Lifespan(app.lifespan, self._executors.run_coroutine, self._lifespan_fell)
        self._claimer = Claimer(database, self.id, options, app.tasks, newest_first=app.newest_first)
        self._intake = Intake(self.id, options.isolate, isolates is not None, app, progress, self._lifespan)
        self._maintenance = self._services()
        self._poller = None if database.dialect.in_a_file else self._own_poller()

    def _signals(self) -> Signals:
        return Signals(
            due_at=self._wake.at,
            settled=self._after_settling,
            cancel=lambda rights: self._leases.cancel(rights),  # noqa: PLW0108 - made later
            state_changed=lambda: self._maintenance.call(self._control),
            pause_ends=lambda ms: self._maintenance.expect_end_of_pause(ms),  # noqa: PLW0108 - made later
            retire=self._retire,
        )

    def _services(self) -> Maintenance:
        app, database = self._app, self._database
        follow = Follow(database, app.schedules, app.tasks, self._supervision.began_at or monotonic())
        return Maintenance(
            database,
            self._options,
            [
                *([] if self._options.drain else [follow]),  # guard: drain-runs-no-schedules
                SchemaWatch(database, self._stop_for),
                self._control,
            ],
            rescued=self._reporter.rescued,
            freed=self._wake.call,  # on SQLite it would see the commit up to 50 ms later
            pauses_ended=self._control.pauses_ended,
            last_look=self._last_look,
        )

    def _own_poller(self) -> Poller:
        return Poller(
            self._database,
            self._options,
            self._wake.hinted,
            last_look=self._last_look,
            on_look=self._receive_look,
            workers=lambda: [self.id],
        )

    # -- from outside ----------------------------------------------------------------------------------------

    async def _arun(self) -> Counts:
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

    def run(self, *, patient: bool | float = False) -> Counts:
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
        with stopped_by_signals(self.stop), waits_while(self._grace.time_left):
            if self._control.enter(patient=patient):
                within_lifespan = lifespans(self._lifespan, self._isolates, self._grace)
                try:
                    with closing(self._executors), within_lifespan as entered:
                        if entered:
                            self._start_and_work()
                finally:
                    self._control.sign_off()
        if self._fault:
            raise self._fault
        return self._settler.counts

    def _start_and_work(self) -> None:
        self._bounds.begin()
        self._wake.start()
        if self._poller is not None:
            self._poller.start()
        for part in (self._leases, self._deadlines, self._settler, *self._unblockers, self._maintenance):
            part.start()
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
        return {
            "counts": vars(self.counts),
            "running": self._executors.load().running,
            "idle_ms": self._idle_ms(),
        }

    def _idle_ms(self) -> float:
        """Return for how long this worker has held no jobs, and was not paused either."""
        if self._executors.load().running or len(self._leases) or self._control.is_paused:
            self._bounds.works()
        return self._bounds.idle_ms()

    @property
    def counts(self) -> Counts:
        """How many attempts ended how, so far."""
        return self._settler.counts

    # -- events from its parts -------------------------------------------------------------------------------

    def _retire(self, retirement: Retire) -> None:
        if self._retirement is None:
            self._retirement = retirement
            self._supervision.leaving(retirement.why, replace=retirement.replace)
            self._wake.call()

    def _stuck(self, job: Attempt) -> None:
        """Retire this process under a supervisor: a thread cannot be killed, only its process. It ends when
        its other jobs have."""
        text = "%s goes on past its timeout, and a thread cannot be stopped: its slot is lost until it ends"
        job.log_error("stuck", text, job.task)
        if self._supervision.supervised:
            self._retire(Retire("a handler does not stop"))

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
        self._retire(Retire("its lifespan has ended"))

    def _renewed_for_us(self, message: dict[str, Any]) -> None:
        renewed = {(id, token): cancelled for id, token, cancelled in message["rights"]}
        self._leases.renewed_for_us(renewed, message["sent_at"], entered=message["entered"])

    def _events_of_dead_workers(self, events: list[Any]) -> None:
        for event in map(unpacked, events):
            error = event.error and remote_error(event.error)
            self._app.events.publish(replace(event, exception=error))  # guard: lost-jobs-publish-events

    def _receive_look(self, look: Look, at: float) -> None:
        self._control.follow(look.wanted)
        self._maintenance.act_on(look, at)

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
        event: Claimed | None = None
        quiet = False
        while not self._ends:
            action = decide(self._options, event or self._turn())
            event = None
            match action:
                case Claim():
                    event = self._try_to_claim(action, outage, quiet=quiet)
                    quiet = quiet and event is None
                case Act.AWAIT_WORK:
                    for unblocker in self._unblockers:
                        unblocker.look()
                    quiet = not (self._wake.wait(self._claimer.next_due) or self._rested_until_called())
                case Act.REPORT_MORE:
                    self._supervision.more()
                case AwaitRoom(low_water):
                    self._executors.wait_for_room(low_water, UNSTARTED_SECONDS / 4)
                case Act.AWAIT_SETTLING:
                    self._grace.stopping.wait(0.005)
                case Act.PAUSE:
                    self._executors.release_ready()
                    self._wake.wait()
                case Retire():
                    self._retire(action)
            self._control.look()
            if (fault := outage.fault()) is not None:
                self._stop_for(ExecutionError(fault))

    @property
    def _ends(self) -> bool:
        """Whether this worker claims no more."""
        return self._retirement is not None or self._grace.stopping.is_set()

    def _turn(self) -> Turn:
        """Show that the loop turns, and release the jobs that have waited for long. Return the state of this
        worker."""
        self._supervision.pulse()
        executors = self._executors
        # a drain would leave behind jobs due later; guard: drains-keep-what-waits-for-processes
        if not self._options.drain:
            executors.release_crowded()
        executors.release_unstarted()  # guard: unstarted-jobs-are-released
        load = executors.load()
        return Turn(
            load.running,
            load.waiting,
            ahead=self._claimer.ahead(executors.ended, executors.busy_seconds),
            max_claim=self._claimer.max_jobs,
            passes=load.waits_for_isolates and monotonic() >= self._passes_at,
            claimed=self._claimed,
            can_settle=self._settler.has_room(),
            paused=self._control.is_paused,
            idle_ms=self._idle_ms(),
            resident=self._bounds.resident(),
        )

    def _try_to_claim(self, claim: Claim, outage: Outage, *, quiet: bool) -> Claimed | None:
        """Claim jobs and have them run; return None where the database does not answer."""
        # Read before the claim: the claim sees jobs that were settled by then and are due again.
        # A job is handed to the unblocker before it is dropped from the leases.
        # guard: drain-awaits-freed-jobs
        was_idle = not len(self._leases) and all(unblocker.is_idle for unblocker in self._unblockers)
        if claim.is_last:
            self._maintenance.await_turn()  # guard: drain-awaits-maintenance
            was_idle = was_idle and not any(unblocker.look_now() for unblocker in self._unblockers)
        try:
            with self._leases.claiming():  # guard: pending-claim-is-announced
                number = self._claim(claim.limit, quiet)
        except Exception as error:
            self._bounds.cannot_look()  # guard: an-outage-is-no-idleness
            self._grace.stopping.wait(outage.wait_after(error))
            return None
        outage.over(wrote=number > 0)
        self._bounds.note_poll()
        if number:
            self._bounds.works()
            self._wake.note_work()
        return Claimed(claim, number, was_idle)

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
                self._passes_at = monotonic() + CROWDED_SECONDS  # guard: crowded-worker-claims-later
            self._leases.hold([*running, *(job for job, _ in not_run)])
            self._leases.arrived(trusted_until)
            self._executors.offer(running)
            for job, outcome in not_run:
                self._settle(job, outcome)
            self._claimed += len(claimed)
        return len(claimed)

    def _rested_until_called(self) -> bool:
        """Rest as long as a poller looks for this worker. Return whether something happened. The rest is
        short while jobs wait for slots: no other thread sees when they have waited for too long."""
        # only this worker knows jobs that are due before the poller can see them
        seen_by = monotonic() + look_seconds(self._options.poll_ms)
        due = self._claimer.next_due if self._claimer.next_due < seen_by else inf
        began = rested_since = monotonic()
        while self._wake.is_resting and not self._ends:
            self._supervision.pulse()
            if self._wake.wait(due):
                return True
            if self._idle_ms() >= (self._options.max_idle_ms or inf):
                break
            # guard: holding-worker-rests-briefly
            if self._executors.load().waiting and monotonic() >= began + UNSTARTED_SECONDS / 4:
                break
            if monotonic() >= rested_since + IDLE_SECONDS:
                rested_since = monotonic()
                with passing_over("idle connections could not be closed"):
                    # a busy time has left them open: all workers together would have many
                    self._app.database.close_idle()
                    self._database.close_idle(more_than=1)
                    self._app.database.for_claims.close_idle(more_than=1)
        return False

    def _after_settling(self) -> None:
        self._executors.start_ready()
        if self._options.drain:
            self._wake.call()

    def _settle(self, job: Attempt, outcome: Outcome) -> None:
        """Take the outcome of a job that has ended, or will not start. The first outcome counts: a handler
        may end just as its job is released."""
        with self._ending:
            if job.ended:  # guard: an-attempt-ends-once
                return
            job.ended = True
        self._deadlines.forget(job.right)
        if not self._has_left:
            self._settler.settle(job, outcome)
        if isinstance(outcome, Released) and outcome.closes and (key := job.claimed.limit_key) is not None:
            self._executors.release_ready(key)  # guard: a-slow-down-releases-what-its-worker-holds

    # -- the end ---------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        self._maintenance.end()
        self._executors.start_no_more()
        self._wake.stop()
        if self._poller is not None:
            self._poller.close(self._grace.last_statement())
        self._executors.release_ready()
        if self._executors.load().running:
            # its database may take long, and is not waited for
            begins(threading.Thread(target=self._control.stopping, name="sqlq-stopping", daemon=True))
        self._grace.await_running(self._executors)
        if not self._grace.leaves_now:
            self._executors.release_running()
            for part in (self._settler, *self._unblockers):
                part.finish(self._grace.time_left)
            self._control.sign_off()
        self._has_left = True  # outcomes from here on come too late
        # a connection that comes back after its pool was closed would stay open
        for loop in (self._settler, *self._unblockers, self._progress, self._maintenance, self._leases):
            loop.close(self._grace.last_statement())
        self._deadlines.close()
        may_wait = self._grace.last_wait()
        # guard: events-are-flushed
        while not self._app.events.flush(0.1) and may_wait():
            pass

    @property
    def left_running(self) -> bool:
        """Whether handlers that could not be stopped, or a lifespan, still run in threads of this process."""
        return bool(self._executors.running()) or self._lifespan.is_open()
