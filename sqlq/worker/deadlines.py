"""Handlers that must stop: asked when their time is over, and seen to when they go on.

A thread of its own that never touches the database: a timeout is kept also while the database does not
answer, or while the handler itself holds the lock that all others wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from sqlq.store.dialect import Right
from sqlq.worker.gather import Threaded
from sqlq.worker.running import RunningJob

log = logging.getLogger("sqlq.worker")

OVERDUE_SECONDS = 2.0
"""How long a handler that was asked to stop may take: then its process is killed, where it has one of its
own."""
UNSTARTED_LOOK_SECONDS = 0.05
BEAT_SECONDS = 1.0


class Deadlines(Threaded):
    """Watches the jobs that have a timeout, and those that were asked to stop, until their handlers end."""

    def __init__(self, stuck: Callable[[RunningJob], None], beat: Callable[[], None] = lambda: None) -> None:
        """`stuck` is told of a handler past its timeout that nothing can stop; `beat` is called at least each
        second while this thread can run, and so timeouts are kept."""
        super().__init__("sqlq-deadlines")
        self._stuck = stuck
        self._beat = beat
        self._watched: dict[Right, RunningJob] = {}
        self._changes = 0

    def watch(self, jobs: Iterable[RunningJob]) -> None:
        """Watch those of these jobs that have a timeout."""
        timed = {job.right: job for job in jobs if job.timeout_ms is not None}
        if timed:
            with self._changed:
                self._watched |= timed
                self._changes += 1
                self._changed.notify()

    def ask_to_stop(self, job: RunningJob) -> None:
        """Ask a handler to stop, and see to it if it does not."""
        job.cancel()
        with self._changed:
            if not job.ended:
                self._watched[job.right] = job
                self._changes += 1
                self._changed.notify()

    def forget(self, rights: Iterable[Right]) -> None:
        """Watch these no more: their handlers have ended, or will not start."""
        if self._watched:
            with self._changed:
                for right in rights:
                    self._watched.pop(right, None)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._abandoned.is_set():
            self._beat()
            with self._changed:
                watched, seen = list(self._watched.values()), self._changes
            try:
                next_look = self._look_at(watched)
            except Exception:
                log.exception("seeing to the deadlines failed; trying again")
                next_look = time.monotonic() + 1.0
            with self._changed:
                if not self._abandoned.is_set() and self._changes == seen:
                    wait = next_look - time.monotonic()
                    self._changed.wait(max(0.0, min(wait, BEAT_SECONDS)))

    def _look_at(self, watched: list[RunningJob]) -> float:
        """See to what is due; return when to look again."""
        moment, next_look = time.monotonic(), float("inf")
        for job in watched:
            if job.deadline is not None and job.deadline <= moment and not job.timed_out:
                job.timed_out = True
                job.cancel()
            asked_at = job.cancelled_at
            if asked_at is None:  # without a deadline it has not started yet
                due = moment + UNSTARTED_LOOK_SECONDS if job.deadline is None else job.deadline
            elif job.kill is None and job.deadline is not None:
                # cancelled before, a thread or coroutine may go on until then
                due = max(asked_at, job.deadline) + OVERDUE_SECONDS  # guard: a-cancel-does-not-hide-a-timeout
            else:
                due = asked_at + OVERDUE_SECONDS
            if due > moment:
                ahead = due if job.timed_out or job.deadline is None else min(due, job.deadline)
                next_look = min(next_look, ahead)
                continue
            self.forget([job.right])
            if not job.ended:  # guard: what-has-ended-is-not-stuck
                self._overdue(job)
        return next_look

    def _overdue(self, job: RunningJob) -> None:
        kill = job.kill
        if kill is not None:
            kill()
        elif job.timed_out:
            self._stuck(job)
