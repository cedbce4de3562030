"""Reads for the pages: each statement ends after two seconds, and all viewers share one refresh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.config.urls import read_url
from sqlq.database.dialects import refusal

T = TypeVar("T")

FRESH_SECONDS, LONGEST_SECONDS = 2.0, 10.0
SHARE = 100
"""A look may take this part of the time at most: however large the tables are, viewers do not slow down the
workers."""
MOST_KEPT = 16 << 20
"""How many characters the kept answers may have, written out."""
OLDEST_SECONDS = 60.0


def too_slow(error: SQLAlchemyError) -> str:
    return f"too slow to count, or not to be read: {refusal(error)}"


class Reading:
    """An App for looking, and the answers that it has kept."""

    def __init__(self, app: App, url: str | URL | None = None) -> None:
        self._app = app
        self._url = url
        self._connected: Any = None
        self._reader = app
        read_url(url, of=app.url)  # one that is none is refused now
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[float, float, Any, int]] = {}
        self._busy: dict[Hashable, threading.Lock] = {}

    @property
    def app(self) -> App:
        """An App beside the host's own, on the same database or its replica. Its statements end in time."""
        connected = self._app._connected
        with self._lock:
            if self._connected is not connected:  # the host has moved its App
                replica = read_url(self._url, of=self._app.url)
                self._connected, self._reader = connected, self._app._for_looking(replica)
                self._kept.clear()
            return self._reader

    @property
    def own(self) -> App:
        """The same on the App's own database, for what decides, or is about its server."""
        return self._app._for_looking(None)

    def fresh(self, key: Hashable, read: Callable[[App], T], seconds: float = FRESH_SECONDS) -> T:
        """Return what `read` returned within the last seconds, for whomever, or read now. An answer that took
        long is kept longer."""
        app = self.app
        with self._lock:
            turn = self._busy.setdefault(key, threading.Lock())
        with turn:
            began = time.monotonic()
            is_first = key not in self._kept
            ended, took, value, _ = self._kept.get(key, (float("-inf"), 0.0, None, 0))
            # guard: looks-take-a-small-share
            if began - ended < max(seconds, min(took * SHARE, LONGEST_SECONDS)):
                kept: T = value
                return kept
            answer = read(app)
            ended = time.monotonic()
            took = 0.0 if is_first else ended - began  # the first one may have connected, too
            with self._lock:
                self._kept[key] = (ended, took, answer, len(repr((key, answer))))
                young = {k: entry for k, entry in self._kept.items() if ended - entry[0] < OLDEST_SECONDS}
                # guard: kept-answers-are-bounded
                if sum(entry[3] for entry in young.values()) > MOST_KEPT:
                    young = {key: self._kept[key]}
                self._kept = young
                self._busy = {k: lock for k, lock in self._busy.items() if k in young or lock.locked()}
            return answer

    def forget(self) -> None:
        """Read anew: an action has changed something."""
        with self._lock:
            self._kept.clear()
