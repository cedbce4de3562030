"""Handlers in subprocesses: tasks marked `isolate=True`, and jobs whose last attempt lost its worker.

Such a process runs one job at a time. It can be killed, and its death concerns that job alone. It imports the
App as a worker does. Only its handlers touch the database."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from sqlq.database.batch import Right
from sqlq.model.job import Progress
from sqlq.model.middleware import Scope
from sqlq.model.outcome import ErrorText, Outcome, SelfCompleted
from sqlq.model.retry import failed, given_back, wait_after_loss_ms
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.call import Run, Starting, aexecute, call_handler, execute, late, stopped
from sqlq.worker.attempt.lifespan import entered
from sqlq.worker.attempt.progress import Pace
from sqlq.worker.ipc.pipe import Message, Pipe, Process, Spawn, packed, unpacked

NOT_STARTED_MS = 5_000
"""How long a job waits whose process did not come up: the cause is seldom over at once."""
START_SECONDS = 600.0
"""How long a process may take to import the App and enter its lifespan, when a job waits for it."""
LAST_SECONDS = 5.0
LEAVE_SECONDS = 10.0
"""How long a process that has had its jobs may take to leave its lifespan."""
LOOK_SECONDS = 0.1
INTERRUPT = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""Interrupts a handler. Programs use SIGALRM, SIGUSR1 and SIGUSR2 for purposes of their own."""


class Isolate(Process):
    """A process that runs one job at a time, as its worker sees it."""

    running: Attempt | None = None
    is_up = False
    """Whether it has sent its first message, after it imported the App."""

    def bury(self) -> int:
        """Kill it and close its pipe. Return its exit code."""
        self.process.kill()
        try:
            return self.process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:  # it ends when the kernel lets go of it, as of a disk that is gone
            return -signal.SIGKILL
        finally:
            self.close()


class IsolatedProcesses:
    """The subprocesses of one worker: as many as it needs at a time, kept for the next job.

    A start of Python keeps a core busy, so no more start at a time than there are cores. Many jobs may need
    one at once, as after the death of a whole host. Then the oldest get theirs soon, and other jobs go on
    meanwhile."""

    _starting = 0
    """How many jobs may start a process, and have not done so yet."""
    _closed = False

    def __init__(self, spawn: Spawn, *, at_a_time: int | None = None, setup: Message | None = None) -> None:
        """`setup` is the first message to each."""
        self._spawn, self._setup = spawn, setup
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._at_a_time = at_a_time or cores or 1
        self._lock = threading.Lock()
        self._idle: list[Isolate] = []
        self._all: set[Isolate] = set()
        self._leaving: dict[Isolate, float] = {}
        """Those that leave their lifespan, and since when."""

    def let_in(self, job: Attempt) -> bool:
        """Give a job an idle process, or the right to start one; return False where it has to wait. `execute`
        follows, or `let_out`."""
        with self._lock:
            for dead in [idle for idle in self._idle if idle.process.poll() is not None]:
                self._idle.remove(dead)
                self._all.discard(dead)
                dead.close()
            # guard: isolated-job-gets-an-unused-process
            if self._idle and not (self._closed or job.alone):
                job.isolate = self._idle.pop()
                return True
            starting = self._starting + sum(not isolate.is_up for isolate in self._all)
            if starting >= self._at_a_time and not self._closed:  # guard: starts-are-bounded
                return False
            self._starting += 1
            return True

    def let_out(self, job: Attempt) -> None:
        """Take back the process of a job that does not run, or its right to start one."""
        with self._lock:
            if job.isolate is None:
                self._starting -= 1
            else:
                self._idle.append(job.isolate)

    def execute(self, running: Attempt, began: Starting, up: Callable[[], object]) -> Outcome:
        """Run a job in its process. Return how the attempt ended, also by the end of that process. `began` is
        called when its handler is about to run, and `up` when another process may start."""
        try:
            isolate = running.isolate or self._start()
        except (OSError, RuntimeError, MemoryError) as error:
            running.log_error("isolate_lost", "no process can be started for it: %s", error)
            # guard: what-gets-no-process-is-bounded
            return given_back(running.claimed, delay_ms=NOT_STARTED_MS)
        if isolate is None or self._closed:
            return given_back(running.claimed)
        isolate.running = running
        running.kill = lambda: self._kill(isolate, running)
        hanging = threading.Timer(START_SECONDS, self._kill_hanging, (isolate, running))
        hanging.daemon = True
        try:
            if not isolate.is_up:
                with suppress(RuntimeError):  # without a thread its start goes unwatched
                    hanging.start()  # guard: starts-have-an-end
            outcome = attempt_in(isolate, running, began, up)
        # The exception would end the slot's thread, and the job's lease would be renewed for ever. So the
        # process is killed, and the attempt counts.
        except Exception:  # guard: slot-survives-an-unreadable-message
            running.log_error(
                "isolate_lost", "what its process says cannot be read; the process is killed", exc_info=True
            )
            outcome = None
        finally:
            hanging.cancel()
            running.kill = None
            running.on_cancel(None)
        if outcome is None:
            return self._died(running, isolate)
        with self._lock:
            isolate.running = None
            if running.alone:  # guard: isolates-end-after-their-jobs
                self._leave(isolate)
            else:
                self._idle.append(isolate)
            self._bury()
        if isinstance(outcome, SelfCompleted):  # guard: late-may-have-completed
            return SelfCompleted(late(running) or outcome.otherwise)
        return late(running) or outcome

    def _leave(self, isolate: Isolate) -> None:
        """Let a process leave its lifespan, and end."""
        self._leaving[isolate] = monotonic()
        isolate.link.offer(leave=True)

    def _bury(self) -> None:
        """Forget the processes that have left and ended, and kill those that do not end."""
        for isolate, since in list(self._leaving.items()):
            if isolate.process.poll() is not None:
                del self._leaving[isolate]
                self._all.discard(isolate)
                isolate.close()
            elif monotonic() > since + LEAVE_SECONDS:
                isolate.process.kill()

    def _kill(self, isolate: Isolate, running: Attempt) -> None:
        with self._lock:  # by now it may run the next job
            if isolate.running is running:  # guard: kill-spares-the-next
                isolate.process.kill()

    def _kill_hanging(self, isolate: Isolate, running: Attempt) -> None:
        if running.started is None:  # guard: what-has-begun-does-not-hang
            self._kill(isolate, running)

    def _start(self) -> Isolate | None:
        """Start a process, without the lock, for which all slots and the event loop wait. Return None where
        no more jobs run."""
        try:
            isolate = Isolate(self._spawn, self._setup)  # guard: processes-start-outside-of-locks
            with self._lock:
                self._all.add(isolate)
        finally:
            with self._lock:
                self._starting -= 1
        if self._closed:
            isolate.bury()
            return None
        return isolate

    def _died(self, running: Attempt, isolate: Isolate) -> Outcome:
        status = isolate.bury()  # it closed its pipe, and must not run on without one
        with self._lock:
            self._all.discard(isolate)
            closed = self._closed
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        if running.started is None:
            if not closed:
                running.log_error("isolate_lost", "the process for it %s before it began", how)
            # guard: what-never-comes-up-is-bounded
            return given_back(running.claimed, delay_ms=None if closed else NOT_STARTED_MS)
        outcome, job = late(running), running.claimed
        if outcome is None and (running.stop_requested or running.cancel_requested or closed):
            outcome = stopped(running)
        if outcome is None:
            text = f"the process of its own in which this job ran {how}"
            lost = ErrorText("sqlq.errors.WorkerLostError", text)
            # its row counts no loss for it: the worker lives; guard: second-process-death-is-backed-off
            wait_ms = wait_after_loss_ms(max(job.losses, job.attempts - 1))
            outcome = failed(job, lost, reason="worker_lost", delay_ms=wait_ms)
        # it may have completed its job before; guard: the-dead-may-have-completed
        return SelfCompleted(outcome)

    def leave(self) -> None:
        """Let idle processes leave their lifespan, and end."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for isolate in idle:
                self._leave(isolate)

    def await_left(self, may_wait: Callable[[], bool]) -> None:
        """Wait until the leaving processes have ended, while `may_wait` returns True."""
        for isolate in list(self._leaving):
            while isolate.process.poll() is None and may_wait():
                with suppress(subprocess.TimeoutExpired):
                    isolate.process.wait(LOOK_SECONDS)

    def close(self) -> None:
        """Kill them all; the jobs that they still run have been released."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
            self._all.clear()
        for isolate in processes:
            isolate.process.kill()
        for isolate in processes:
            isolate.bury()


def attempt_in(
    isolate: Isolate, running: Attempt, began: Starting, up: Callable[[], object]
) -> Outcome | None:
    """Have a subprocess run a job, and return the outcome that it sends; None when it died."""
    isolate.link.send(
        job=packed(running.claimed),
        worker=running.worker,
        claimed_at=running.claimed_at,  # by a clock that all processes of a machine have
        schema=running.target.schema,
    )
    # the thread of the deadlines calls it; guard: a-cancel-waits-for-no-process
    running.on_cancel(lambda: isolate.link.offer(cancel=running.right, by_operator=running.cancel_requested))
    # raises for a message that cannot be read: no other may follow, and the slot would wait for ever
    while (reply := isolate.link.receive(strictly=True)) is not None:
        isolate.is_up = True
        report = reply.get("progress")
        if report is not None and tuple(reply["right"]) == running.right:
            if not isinstance(progress := unpacked(report), Progress):
                raise TypeError("a report of progress is none")
            running.report_progress(progress)
        if "outcome" in reply:
            outcome = unpacked(reply["outcome"])
            if not isinstance(outcome, Outcome):  # guard: an-isolate-says-outcomes
                raise TypeError("an outcome is none")
            # guard: isolates-tell-their-trace
            running.trace_id, running.span_id = reply.get("trace", (None, None))
            return outcome
        if "up" in reply:
            up()
        elif "began" in reply:
            isolate.link.flush()  # a cancel that had no room behind the job
            running.mark_started()
            began(running)
    return None


# -- in the subprocess ---------------------------------------------------------------------------------------


def serve(link: Pipe, target: Target, lifespan: Scope | None = None) -> NoReturn:
    """Run the jobs that come over the pipe, one at a time, in the App's lifespan. It ends with the worker at
    the other end, or by a message of it."""
    # one event loop for all jobs: a pooled connection of the handlers' own belongs to the loop that made it
    run = partial(_run, asyncio.Runner().get_loop())
    jobs = _Jobs(link, target, run)
    signal.signal(INTERRUPT, jobs.interrupt)
    threading.Thread(target=jobs.receive, name="sqlq-subprocess", daemon=True).start()
    with nullcontext() if lifespan is None else entered(lifespan, run) as value:
        link.send(up=True)
        while "job" in (message := jobs.messages.get()):
            jobs.serve(message, value)
            del message
    # tracers and the like send their data then; the worker waits, and kills a process that takes too long
    # guard: isolates-call-what-is-called-at-exit
    atexit._run_exitfuncs()  # noqa: SLF001 - there is no other way beside sys.exit, which waits for threads
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a handler may have closed or replaced it
            stream.flush()
    os._exit(0)


class _Jobs:
    """The jobs of one process, made in the thread that runs their handlers."""

    _current: Attempt | None = None

    def __init__(self, link: Pipe, target: Target, run: Run) -> None:
        self._link = link
        self._target = target
        self._run = run
        self._thread = threading.get_ident()
        self._pace = Pace(self._send_progress)
        self._to_stop: dict[Right, bool] = {}
        """The jobs to stop, with whether an operator cancels them."""
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def serve(self, message: Message, lifespan_value: Any) -> None:
        """Run the job of a message."""
        job = unpacked(message["job"])
        own = replace(self._target, schema=message["schema"])
        running = Attempt(job, own.tasks.get(job.task), float("inf"), own)
        running.claimed_at, running.worker = message["claimed_at"], message["worker"]
        running.lifespan = lifespan_value
        running.on_progress = self._pace.note
        self._current = running
        self._stop()
        self._link.send(began=True)
        outcome = self._run(aexecute(running)) if running.is_async else execute(running, run=self._run)
        self._current = None
        self._to_stop.clear()
        running.ended = True
        running.forget()
        # a handler may have closed the pipe, and the worker waits
        if not self._link.send(
            outcome=packed(outcome),
            progress=packed(running.progress),
            right=running.right,
            trace=(running.trace_id, running.span_id),
        ):
            os._exit(1)  # guard: a-subprocess-without-a-pipe-ends

    def receive(self) -> None:
        """Take the messages of the worker until it is gone."""
        while (message := self._link.receive()) is not None:
            if "cancel" in message:  # perhaps for a job that is still among the messages, or over
                with suppress(TypeError):
                    self._to_stop[tuple(message["cancel"])] = bool(message.get("by_operator"))
                self._stop()
            else:
                self.messages.put(message)
        os._exit(128 + signal.SIGTERM)  # nothing runs on unwatched

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise `CancelledError` in a `def` handler."""
        running = self._current
        # in sqlq's own code around it an exception would lose the outcome, and a coroutine is cancelled
        while frame is not None and frame.f_code is not _run.__code__:
            if frame.f_code is call_handler.__code__ and running is not None and running.stop_requested:
                raise asyncio.CancelledError("the job is to stop")  # guard: isolated-handlers-are-interrupted
            frame = frame.f_back

    def _stop(self) -> None:
        running = self._current
        if running is not None and running.right in self._to_stop:
            is_first = not running.stop_requested
            running.cancel_requested = running.cancel_requested or self._to_stop[running.right]
            running.cancel()
            if is_first:  # a second exception would break off what the handler does because of the first
                signal.pthread_kill(self._thread, INTERRUPT)

    def _send_progress(self, jobs: Sequence[Attempt]) -> None:
        for running in jobs:
            if not running.ended:
                self._link.send(progress=packed(running.progress), right=running.right)


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in a copy of this thread's context, so that current_job() is found."""
    task = loop.create_task(coroutine)  # guard: an-isolates-coroutine-knows-its-job
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt):
            # raised by another task: code that awaits that gets it, too; guard: an-isolates-loop-goes-on
            if task.done():
                raise
