"""The services that end pauses, and free the jobs of tasks that are resumed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlq.database.database import Database
from sqlq.store.jobs import paused
from sqlq.store.workers import pauses
from sqlq.worker.maintain.services import NEVER, UNCALLED_SECONDS, FreeingService, at_once

log = logging.getLogger("sqlq.worker")


class FreePaused(FreeingService):
    """Frees jobs that are blocked by the pause of a task which is over, one batch a turn. A resume frees them
    by itself, unless it was killed, or a worker has blocked one just then."""

    doing = "sweeping for jobs of resumed tasks"

    def turn(self) -> float | None:
        began = time.monotonic()
        if not paused.sweep(self._database):  # guard: what-is-left-of-a-pause-is-swept
            return None
        self._freed()
        return at_once(self._database, began)


class EndPauses:
    """Resumes queues and tasks that were paused until a time, when that has come. Any number of hosts may do
    so."""

    doing = "ending pauses"

    def __init__(self, database: Database, ended: Callable[[list[str]], None], free: FreePaused) -> None:
        self._database = database
        self._ended = ended
        self._free = free
        self._frees = False
        """Whether jobs of a task whose pause has ended may still be blocked."""
        self._due_at = NEVER

    def expect(self, pause_ms: float) -> float:
        """Note that the next pause ends in so many milliseconds. Return that time by the monotonic clock."""
        self._due_at = time.monotonic() + max(0.0, pause_ms) / 1000
        return self._due_at

    def run(self) -> float:
        if self._frees:
            if (wait := self._free.turn()) is not None:  # guard: tasks-are-freed-when-their-pause-ends
                return wait
            self._frees = False
        if (wait := self._due_at - time.monotonic()) > 0:
            return min(wait, UNCALLED_SECONDS)
        with self._database.begin() as conn:
            queues, tasks = pauses.end_pauses(conn)
            _, next_ms = pauses.read(conn)
        self._due_at = NEVER
        named = ["all queues" if name == pauses.ALL else f"the queue {name}" for name in queues]
        for what in (*named, *(f"the task {name}" for name in tasks)):
            log.info("the pause of %s is over", what, extra={"event": "resumed"})
        if queues:
            self._ended(queues)
        self._frees = bool(tasks)
        wait = UNCALLED_SECONDS if next_ms is None else self.expect(next_ms) - time.monotonic()
        return 0.0 if self._frees else wait
