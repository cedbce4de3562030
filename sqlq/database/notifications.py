"""Reads the notifications that come through LISTEN.

NOTIFY needs no right: any role may send any text, and any number of them. So only an empty text counts, and
this reads a flooded connection at intervals. It empties the connection before each query, since libpq keeps
the notifications that come with an answer.
"""

from __future__ import annotations

import logging
import time
from typing import Any

log = logging.getLogger("sqlq")

STORM_SECONDS, REST_SECONDS = 0.001, 0.005
"""If the next notification comes this soon after the last read, the reader rests, so that more of them
gather."""
MAX_SECONDS = 0.01
"""The longest time of one read while more notifications come."""
WARNING_SECONDS = 60.0


class Hearing:
    """Reads the notifications of a connection that LISTENs to one channel, on behalf of one thread."""

    def __init__(self) -> None:
        self._hinted = self._came = False
        self._read_at = self._warned_at = float("-inf")
        self._ignored = 0
        self.is_dry = True
        """Whether the last read emptied the connection."""

    def begin(self, driver: Any) -> None:
        """Read a connection of psycopg from now on."""
        self._pgconn, self.is_dry = driver.pgconn, True
        # Without this handler psycopg would decode notifications that come with an answer, and keep them in
        # an unbounded queue.
        self._pgconn.notify_handler = self._take

    def read(self) -> bool:
        """Read the notifications so far, in a flood only a part. Return whether there may be new jobs. In a
        storm of notifications it rests briefly."""
        if time.monotonic() - self._read_at < STORM_SECONDS:
            time.sleep(REST_SECONDS)
        until, self.is_dry = time.monotonic() + MAX_SECONDS, False
        while not self.is_dry and time.monotonic() < until:
            self._pgconn.consume_input()
            self.is_dry = True
            while (notification := self._pgconn.notifies()) is not None:
                self.is_dry = False
                self._take(notification)
        hinted = self._hinted
        self._read_at = time.monotonic() if self._came else self._read_at
        self._hinted = self._came = False
        return hinted

    def _take(self, notification: Any) -> None:
        self._came = True
        if not notification.extra:  # guard: notifications-are-read-strictly
            self._hinted = True
            return
        self._ignored += 1
        if time.monotonic() >= self._warned_at + WARNING_SECONDS:  # guard: ignored-are-logged-rarely
            log.warning(
                "notifications that are none of sqlq's were ignored: %d by now, the last one by "
                "server process %d; any role may NOTIFY",
                self._ignored,
                notification.be_pid,
                extra={"event": "notifications_ignored"},
            )
            self._warned_at = time.monotonic()
