"""Reads for the pages: each statement ends after two seconds, and all viewers share one refresh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.config.urls import read_url
from sqlq.database.dialects import missing_grant, refusal

FRESH_SECONDS, MAX_KEPT_SECONDS = 2.0, 10.0
SHARE = 100
"""A look may take this part of the time at most: however large the tables are, viewers do not slow down the
workers."""
UNREAD = "too slow to count, or not to be read"
KEPT_LIMIT = 50
"""The most answers that are kept."""


def unread(error: SQLAlchemyError, app: App, kind: str, otherwise: str = UNREAD) -> str:
    """Return why the database did not serve an App, with the GRANT that a role of this `kind` lacks there."""
    grant = missing_grant(error, app.database.engine.url, kind)
    return f"{refusal(error)}; {grant}" if grant else f"{otherwise}: {refusal(error)}"


class Reading:
    """An App for looking, and the answers that it has kept."""

    def __init__(self, app: App, url: str | URL | None = None) -> None:
        self._app = app
        self._read_url = cache(partial(read_url, url))
        self._read_url(of=app.url)  # one that is none is refused now
        self._lock = threading.Lock()
        self._kept: dict[Any, tuple[float, float, Any]] = {}
        self._turns = [threading.Lock() for _ in range(64)]

    @property
    def app(self) -> App:
        """An App beside the host's own, on the same database or its replica. Its statements end in time."""
        return self._app._for_looking(self._read_url(of=self._app.url))

    @property
    def own(self) -> App:
        """The same on the App's own database, for what decides, or is about its server."""
        return self._app._for_looking(None)

    def fresh(self, key: Hashable, read: Callable[[App], Any], seconds: float = FRESH_SECONDS) -> Any:
        """Return what `read` returned within the last seconds, for whomever, or read now. An answer that took
        long is kept longer."""
        app = self.app
        key = app._connected, key  # the host may move its App
        with self._turns[hash(key) % len(self._turns)]:
            began = time.monotonic()
            is_first = key not in self._kept
            ended, took, value = self._kept.get(key, (float("-inf"), 0.0, None))
            # guard: looks-take-a-small-share
            if began - ended < max(seconds, min(took * SHARE, MAX_KEPT_SECONDS)):
                return value
            value = read(app)
            ended = time.monotonic()
            with self._lock:
                self._kept.pop(key, None)  # the newest stand last
                # the first one may have connected, too
                self._kept[key] = ended, 0.0 if is_first else ended - began, value
                for old in [*self._kept][:-KEPT_LIMIT]:  # guard: kept-answers-are-bounded
                    del self._kept[old]
            return value

    def forget(self) -> None:
        """Read anew: an action has changed something."""
        with self._lock:
            self._kept.clear()
