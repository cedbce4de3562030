"""The service that ends pauses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlq.database.database import Database
from sqlq.store.workers import pauses
from sqlq.worker.maintain.services import NEVER, UNCALLED_SECONDS

log = logging.getLogger("sqlq.worker")


class EndPauses:
    """Resumes queues that were paused until a time, when that has come. Any number of hosts may do so."""

    doing = "ending pauses"

    def __init__(self, database: Database, ended: Callable[[list[str]], None]) -> None:
        self._database = database
        self._ended = ended
        self._due_at = NEVER

    def expect(self, pause_ms: float) -> float:
        """Note that the next pause ends in so many milliseconds. Return that time by the monotonic clock."""
        self._due_at = time.monotonic() + max(0.0, pause_ms) / 1000
        return self._due_at

    def run(self) -> float:
        if (wait := self._due_at - time.monotonic()) > 0:
            return min(wait, UNCALLED_SECONDS)
        with self._database.begin() as conn:
            queues = pauses.end_pauses(conn)
            _, next_ms = pauses.read(conn)
        self._due_at = NEVER
        for name in queues:
            which = "all queues" if name == pauses.ALL else f"the queue {name}"
            log.info("the pause of %s is over", which, extra={"event": "resumed"})
        if queues:
            self._ended(queues)
        return UNCALLED_SECONDS if next_ms is None else self.expect(next_ms) - time.monotonic()
