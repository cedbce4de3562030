"""Reads the notifications that come through LISTEN.

NOTIFY needs no right: any role may send any text, and any number of them. So this parses a text strictly or
ignores it, and reads texts up to a size each second. It reads a flooded connection at intervals. It empties
the connection before each query, since libpq keeps the notifications that come with an answer.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from sqlalchemy import URL

from sqlq.config.constants import IDS

log = logging.getLogger("sqlq")

BYTES_A_SECOND = 100_000
"""The bytes of notifications that are read; further ones in the same second stand for any job."""
STORM_SECONDS, REST_SECONDS = 0.001, 0.005
"""If the next notification comes this soon after the last read, the reader rests, so that more of them
gather."""
LONGEST_SECONDS = 0.01
"""The longest time of one read while more notifications come."""
SAY_EVERY_SECONDS = 60.0
ANY_JOB = "*"
"""The text of a notification about too many jobs to name them."""
_IDS = re.compile(rb"[0-9]{1,19}(?:,[0-9]{1,19})*")


class Heard(NamedTuple):
    """The content of the notifications since the last read."""

    hinted: bool
    """Whether there may be new jobs."""
    ids: list[int] | None
    """The jobs named; None for any."""


class Hearing:
    """Reads the notifications of a connection that LISTENs to one channel, on behalf of one thread."""

    def __init__(self, prefix: str = "") -> None:
        """With a `prefix` before the ids of jobs, an empty text is a notification of new jobs."""
        self._prefix = prefix.encode()
        self._hinted = self._means_any = self._came = False
        self._ids: list[int] = []
        self._left = 0
        self._second_ends = self._read_at = self._said_at = float("-inf")
        self._ignored = 0
        self.is_dry = True
        """Whether the last read emptied the connection."""

    def begin(self, driver: Any) -> None:
        """Read a connection of psycopg from now on."""
        self._pgconn, self.is_dry = driver.pgconn, True
        # Without this handler psycopg would decode notifications that come with an answer, and keep them in
        # an unbounded queue.
        self._pgconn.notify_handler = self._take

    def read(self, *, all_of_it: bool = False) -> Heard:
        """Return the notifications so far; in a flood only a part, unless `all_of_it`. It waits for nothing,
        but in a storm of notifications it rests briefly."""
        if time.monotonic() - self._read_at < STORM_SECONDS:
            time.sleep(REST_SECONDS)
        until, self.is_dry = time.monotonic() + LONGEST_SECONDS, False
        while not self.is_dry and (all_of_it or time.monotonic() < until):
            self._pgconn.consume_input()
            self.is_dry = True
            while (said := self._pgconn.notifies()) is not None:
                self.is_dry = False
                self._take(said)
        heard = Heard(self._hinted, None if self._means_any else self._ids)
        self._read_at = time.monotonic() if self._came else self._read_at
        self._hinted = self._means_any = self._came = False
        self._ids = []
        return heard

    def _take(self, said: Any) -> None:
        words, self._came = bytes(said.extra), True
        if self._prefix and not words:
            self._hinted = True
        elif not words.startswith(self._prefix) or not self._names(words[len(self._prefix) :]):
            self._ignored += 1
            if time.monotonic() >= self._said_at + SAY_EVERY_SECONDS:  # guard: ignored-is-told-seldom
                log.warning(
                    "notifications that are none of sqlq's were ignored: %d by now, the last one by "
                    "server process %d; any role may NOTIFY",
                    *(self._ignored, said.be_pid),
                    extra={"event": "notifications_ignored"},
                )
                self._said_at = time.monotonic()

    def _names(self, words: bytes) -> bool:
        """Add the named jobs; return whether these words are a list of ids."""
        moment = time.monotonic()
        if moment >= self._second_ends:
            self._second_ends, self._left = moment + 1.0, BYTES_A_SECOND
        self._left -= len(words)
        if self._left < 0 or words == ANY_JOB.encode():  # guard: floods-stand-for-any-job
            self._means_any = True
            return True
        ids = named_in(words)
        self._ids += ids
        return bool(ids)


def named_in(words: bytes) -> list[int]:
    """Return the jobs in a list of ids; none if any part is no id."""
    if not _IDS.fullmatch(words):  # guard: notifications-are-read-strictly
        return []
    ids = [int(word) for word in words.split(b",")]
    return ids if all(id in IDS for id in ids) else []


# -- within a process ----------------------------------------------------------------------------------------

_WAITING: dict[Hashable, tuple[Callable[[], None], ...]] = {}
"""The calls that wake the workers of this process, by the places of their databases. It is for
databases without notifications whose commits no connection sees."""


def _place(url: URL) -> Hashable:
    return url.host, url.port, url.database, url.query.get("unix_socket")


def waiting_here(url: URL) -> tuple[Callable[[], None], ...]:
    """Return what wakes the workers of this process that wait for jobs of a database."""
    return _WAITING.get(_place(url), ())


def wait_here(url: URL, wake: Callable[[], None]) -> None:
    """Have `wake` called when this process has enqueued a job there."""
    _WAITING[_place(url)] = (*waiting_here(url), wake)


def wait_no_more(url: URL, wake: Callable[[], None]) -> None:
    """Have it called no more."""
    _WAITING[_place(url)] = tuple(each for each in waiting_here(url) if each != wake)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WAITING.clear)  # the workers are threads of the parent
