"""Which jobs a worker holds and has not started: told to those who look, without a write for each job."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from sqlq.store import cluster
from sqlq.store.database import Database
from sqlq.worker.running import RunningJob

HELD_SECONDS = 1.0
"""A job that has not started so long after its claim is noted. Most start within milliseconds."""
BUSY_SECONDS, IDLE_SECONDS = 1.0, 3.0
"""How often a worker looks that holds something, and one that does not."""
MOST = 100
"""So many jobs are noted."""


class Held:
    """Notes in the worker's row which jobs it holds and has not started: those that wait for a process of
    their own, or behind a handler that blocks the event loop. Looks at its memory, and writes when these
    change, which for most workers is never."""

    doing = "noting which jobs have not started"

    def __init__(
        self, database: Database, worker: str, held: Callable[[float], Collection[RunningJob] | None]
    ) -> None:
        """`held` returns what was claimed before a moment and has not started, None where nothing is held."""
        self._database = database
        self._worker = worker
        self._held = held
        self._noted: list[int] = []

    def run(self) -> float:
        held = self._held(time.monotonic() - HELD_SECONDS)
        ids = sorted(job.id for job in held or ())[:MOST]
        if ids != self._noted:  # guard: held-is-noted-when-it-changes
            with self._database.begin() as conn:
                cluster.note_held(conn, self._worker, ids)
            self._noted = ids
        return IDLE_SECONDS if held is None else BUSY_SECONDS
