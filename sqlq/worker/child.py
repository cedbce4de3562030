"""A worker's ties to the supervisor that watches it: what it says to it, what it hears, and the memory they share.

A worker in a program of its own making (`app.worker()`) has no such ties, and `Alone` takes their place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from sqlq.clock import readable
from sqlq.store.dialect import Right
from sqlq.worker.blackbox import BlackBox
from sqlq.worker.link import Link

log = logging.getLogger("sqlq.worker")

ORPHANED_MS = 5_000
"""How long what runs may go on when the supervisor is gone, and nobody watches."""

Stop = Callable[["int | None"], None]
"""Stops a worker, within so many milliseconds or else its own grace time."""
Renewed = Callable[["dict[Right, bool]", float, bool], None]
"""Hears which rights were renewed and whether their end is asked for, when that was sent, and whether the worker is entered."""


class Alone:
    """No supervisor: nobody to tell."""

    supervised = False
    box: BlackBox | None = None

    def listen(self, *, stop: Stop, renewed: Renewed) -> None:
        """Hear the supervisor from now on: when to stop, and which leases it has renewed."""

    def ready(self, **facts: Any) -> None:
        """Say that this worker is up, and what the supervisor needs to know to stand in for it."""

    def leaving(self, why: str, *, replace: bool) -> None:
        """Say that this worker claims no more and ends when what it runs has ended, and whether another should take its place."""

    def pulse(self) -> None:
        """Say that the loop turns."""


class Supervised(Alone):
    """Under a supervisor, at the other end of a link. When the link ends the supervisor is gone, and the worker stops."""

    supervised = True

    def __init__(self, link: Link, box: BlackBox) -> None:
        self._link = link
        self.box: BlackBox = box
        self._over = False
        self.announce: Callable[[], None] = lambda: None
        """Called when the worker is ready, before it starts anything."""

    def listen(self, *, stop: Stop, renewed: Renewed) -> None:
        def run() -> None:
            while (message := self._link.receive()) is not None:
                if "stop" in message:
                    stop(None)
                else:
                    rights = {(id, token): cancelled for id, token, cancelled in message["renewed"]}
                    renewed(rights, message["sent_at"], message["entered"])
            if not self._over:
                log.error("the supervisor is gone: this worker stops within %s", readable(ORPHANED_MS), extra={"event": "stopping"})
            stop(ORPHANED_MS)

        threading.Thread(target=run, name="sqlq-child", daemon=True).start()

    def ready(self, **facts: Any) -> None:
        self.announce()
        self._link.send(ready=facts)

    def leaving(self, why: str, *, replace: bool) -> None:
        self._link.send(leaving=why, replace=replace)

    def ended(self, tally: dict[str, int]) -> None:
        """Say what became of the attempts, as the last word."""
        self._over = True
        self._link.send(ended=tally)

    def pulse(self) -> None:
        self.box.pulse()
