"""What comes through LISTEN.

NOTIFY needs no right: each text may be anybody's, and there may be any number of them. So a text is read
strictly or ignored, texts are read up to a size each second, and a connection that is flooded is read at
intervals, and read empty before it is asked anything: what comes with an answer is kept by libpq.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, NamedTuple

from sqlq.config.constants import IDS

log = logging.getLogger("sqlq")

BYTES_A_SECOND = 100_000
"""So much of what notifications say is read; what comes above that in the same second stands for any job."""
STORM_SECONDS, REST_SECONDS = 0.001, 0.005
"""Where the next notification comes so soon after the last ones were read, more of them gather first."""
LONGEST_SECONDS = 0.01
"""How long is read at a time while more comes."""
SAY_EVERY_SECONDS = 60.0
ANY_JOB = "*"
"""Said where too many jobs are meant to name them."""
_IDS = re.compile(rb"[0-9]{1,19}(?:,[0-9]{1,19})*")


class Heard(NamedTuple):
    """What was said since the last time."""

    hinted: bool
    """Whether there may be new jobs."""
    ids: list[int] | None
    """The jobs named; None for any."""


class Hearing:
    """Reads the notifications of a connection that LISTENs to one channel, on behalf of one thread."""

    def __init__(self, prefix: str = "") -> None:
        """With a `prefix`, before the jobs that are named, an empty text is a hint."""
        self._prefix = prefix.encode()
        self._hinted = self._means_any = self._came = False
        self._ids: list[int] = []
        self._left = 0
        self._second_ends = self._read_at = self._said_at = float("-inf")
        self._ignored = 0
        self.is_dry = True
        """Whether all was read that had come."""

    def begin(self, driver: Any) -> None:
        """Read a connection of psycopg from now on."""
        self._pgconn, self.is_dry = driver.pgconn, True
        # What comes with an answer psycopg would decode, and keep in a queue without a bound.
        self._pgconn.notify_handler = self._take

    def read(self, *, all_of_it: bool = False) -> Heard:
        """Return what has come; of a flood a part, if not `all_of_it`. Waits for nothing, but rests a moment
        where notifications come in a storm."""
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
        """Note the jobs that are named; say whether these words are a list of them."""
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
    """Return the jobs that a list of ids names; none of what is no such list, as a whole."""
    if not _IDS.fullmatch(words):  # guard: notifications-are-read-strictly
        return []
    ids = [int(word) for word in words.split(b",")]
    return ids if all(id in IDS for id in ids) else []
