"""Handlers in processes of their own: tasks marked `isolate=True`, and jobs whose last attempt lost its worker.

Such a process runs one job at a time, so that what it dies of is that job's doing and takes no other along, and it can be
killed. It imports the App as a worker does, and touches the database only by what its handlers do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import NoReturn

from sqlq.errors import WorkerLostError
from sqlq.job import Cancelled, ErrorText, Outcome, Released
from sqlq.store.dialect import Right
from sqlq.store.jobs import wait_after_loss_ms
from sqlq.task import Registry
from sqlq.worker.execute import BY_OPERATOR, aexecute, again, execute, give_back, late
from sqlq.worker.link import Link, Message, packed, unpacked
from sqlq.worker.running import Home, RunningJob

log = logging.getLogger("sqlq.worker")

NOT_STARTED_MS = 5_000
"""How long a job waits whose process did not come up: that is seldom over at once."""
LAST_SECONDS = 5.0

Spawn = Callable[[int], "subprocess.Popen[bytes]"]
"""Starts an isolate, which inherits the descriptor of its end of a link."""


class Isolate:
    """A process that runs one job at a time, as its worker sees it."""

    def __init__(self, spawn: Spawn) -> None:
        self.link, there = Link.pair()
        with there:
            self.process = spawn(there.fileno())
        self.running: RunningJob | None = None


class Isolates:
    """The isolates of one worker: as many as it needs at a time, kept for the next job."""

    def __init__(self, spawn: Spawn, warm: int = 0) -> None:
        """`warm` says how many are started now, before a job asks for one."""
        self._spawn = spawn
        self._lock = threading.Lock()
        self._idle: list[Isolate] = []
        self._all: set[Isolate] = set()
        self._closed = False
        for _ in range(warm):
            self._idle.append(self._start())

    def execute(self, running: RunningJob) -> Outcome:
        """Run a job in a process of its own and return how the attempt ended, the end of that process included."""
        try:
            isolate = self._take(running)
        except OSError as error:
            log.error("job %d: no process can be started for it: %s", running.id, error, extra=running.fields("isolate_lost"))
            return Released(NOT_STARTED_MS)
        if isolate is None:
            return give_back(running.claimed)
        running.kill = lambda: self._kill(isolate, running)
        try:
            outcome = self._attempt(isolate, running)
        finally:
            running.kill = None
            running.on_cancel(None)
        if outcome is None:
            return self._died(running, isolate)
        with self._lock:
            isolate.running = None
            self._idle.append(isolate)
        return late(running) or outcome

    def _attempt(self, isolate: Isolate, running: RunningJob) -> Outcome | None:
        """Have the isolate run a job, and return what it says of it; None when it died."""
        home = running.home
        assert home is not None
        isolate.link.send(job=packed(running.claimed), schema=home.schema, keep_finished=home.keep_finished)
        running.on_cancel(lambda: isolate.link.send(cancel=running.right))
        while (reply := isolate.link.receive()) is not None:
            if "outcome" in reply:
                outcome: Outcome = unpacked(reply["outcome"])
                return outcome
            running.mark_started()
        return None

    def _take(self, running: RunningJob) -> Isolate | None:
        with self._lock:
            if self._closed:
                return None
            isolate = self._idle.pop() if self._idle else self._start()
            isolate.running = running
            return isolate

    def _kill(self, isolate: Isolate, running: RunningJob) -> None:
        with self._lock:  # by now it may run the next job
            if isolate.running is running:
                isolate.process.kill()

    def _start(self) -> Isolate:
        isolate = Isolate(self._spawn)
        self._all.add(isolate)
        return isolate

    def _died(self, running: RunningJob, isolate: Isolate) -> Outcome:
        isolate.process.kill()  # it closed its link, and is not to run on unheard
        status = isolate.process.wait()
        isolate.link.close()
        with self._lock:
            self._all.discard(isolate)
            closed = self._closed
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        if running.started is None:
            if not closed:
                log.error("job %d: the process for it %s before it began", running.id, how, extra=running.fields("isolate_lost"))
            return Released(0 if closed else NOT_STARTED_MS)
        if (outcome := late(running)) is not None:
            return outcome
        if running.cancel_requested:
            return Cancelled(BY_OPERATOR)
        if running.asked_to_stop or closed:
            return give_back(running.claimed)
        name = f"{WorkerLostError.__module__}.{WorkerLostError.__name__}"
        lost = ErrorText(name, f"the process that ran this job alone {how}")
        return again(running, lost, "worker_lost", delay_ms=wait_after_loss_ms(running.claimed.losses))

    def close(self) -> None:
        """Kill them all; what they still run has been given back."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
            self._all.clear()
        for isolate in processes:
            isolate.process.kill()
        for isolate in processes:
            isolate.process.wait(LAST_SECONDS)


# -- in the isolate --------------------------------------------------------------------------------------------------------


def serve(link: Link, tasks: Registry) -> NoReturn:
    """Run jobs that come over the link, one at a time, until it ends with the worker at its other side."""
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    current: list[RunningJob] = []
    to_stop: set[Right] = set()

    def stop() -> None:
        for running in current:
            if running.right in to_stop:
                running.cancel()

    def receive() -> None:
        while (message := link.receive()) is not None:
            if "job" in message:
                messages.put(message)
            else:  # perhaps for a job that is still among the messages, or over
                to_stop.add(tuple(message["cancel"]))
                stop()
        os._exit(128 + signal.SIGTERM)  # nothing runs on unwatched

    threading.Thread(target=receive, name="sqlq-isolate", daemon=True).start()
    while True:
        message = messages.get()
        job = unpacked(message["job"])
        running = RunningJob(job, tasks.get(job.task), float("inf"), Home(message["schema"], message["keep_finished"]))
        current[:] = [running]
        stop()
        link.send(began=True)
        outcome = asyncio.run(aexecute(running)) if running.is_async else execute(running)
        current.clear()
        to_stop.clear()
        link.send(outcome=packed(outcome))
