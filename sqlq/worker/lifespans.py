"""The App's lifespan around all that a worker runs: in its own process and"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sqlq.worker.grace import Grace
from sqlq.worker.isolates import Isolates
from sqlq.worker.lifespan import Lifespan

log = logging.getLogger("sqlq.worker")


class Lifespans:
    """All lifespans of one worker."""

    def __init__(self, lifespan: Lifespan | None, isolates: Isolates | None, grace: Grace) -> None:
        """`lifespan` is that of this process, where the App has one."""
        self._lifespan = lifespan
        self._isolates = isolates
        self._grace = grace

    @contextmanager
    def around(self) -> Iterator[bool]:
        """Enter the App's lifespan, and leave it after the block; yields False when the worker was stopped
        before it was entered."""
        lifespan = self._lifespan
        try:
            yield lifespan is None or lifespan.enter(self._grace.lasts)
        finally:
            if lifespan is not None:
                self._leave(lifespan)
            elif self._isolates is not None:
                self._isolates.leave(fresh=False)
                self._isolates.await_left(self._grace.last_wait())

    def is_open(self) -> bool:
        """Say whether that of this process has not ended."""
        return self._lifespan is not None and self._lifespan.is_open()

    def _leave(self, lifespan: Lifespan) -> None:
        """Leave the lifespan here and in processes of single jobs; one that does not end within what is left
        of the grace time is left behind."""
        may_wait = self._grace.last_wait()
        if self._isolates is not None:
            self._isolates.leave()  # guard: isolates-leave-their-lifespan
        # guard: a-lifespan-does-not-outlive-the-grace
        left = lifespan.leave(may_wait)
        if not left:
            log.error("the lifespan %s does not end, and is left behind", lifespan.name)
        if self._isolates is not None:
            self._isolates.await_left(may_wait)
