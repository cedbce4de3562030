"""Answers those who wait for jobs, in whatever process, once the end of one of these is committed here.

They say for which they wait; what they have not said for a while is forgotten, since they say it again. Where
nobody has said anything, a settle costs nothing for it. An answer is a hint: who gets none sees the end of
the job when it looks for itself, within a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from sqlq.store import results
from sqlq.store.database import Database
from sqlq.store.records import possible
from sqlq.waiting import ASK_SECONDS
from sqlq.worker.gather import Gatherer

log = logging.getLogger("sqlq.worker")

REMEMBERED_SECONDS = 3 * ASK_SECONDS
LAST_WORDS_SECONDS = 0.5
FORGET_SECONDS = 1.0
MOST_REMEMBERED = 10_000
"""Where more jobs are waited for, the ends of all jobs are told. Who may NOTIFY may ask for any number."""


class Answers(Gatherer[list[int]]):
    """Answers for one worker, from a thread that is started by the first answer there is to give."""

    def __init__(self, database: Database) -> None:
        super().__init__("sqlq-answers", "answering", database)
        self._until: dict[int, float] = {}
        """For which jobs somebody waits, and when that is forgotten, by the monotonic clock."""
        self._any_until = self._latest = self._forget_at = float("-inf")
        self.are_wanted = False
        """Whether somebody waits, for whatever."""
        self._pending: list[int] = []

    def asked(self, ids: Sequence[int] | None) -> None:
        """Note for which jobs somebody waits, as far as is known; None stands for any."""
        moment = time.monotonic()
        with self._changed:
            if moment >= self._forget_at:
                self._forget(moment)
                self._forget_at = moment + FORGET_SECONDS
            self._latest = moment + REMEMBERED_SECONDS
            # guard: what-is-remembered-is-bounded
            if ids is None or len(self._until) + len(ids) > MOST_REMEMBERED:
                self._any_until = self._latest
            else:
                self._until |= dict.fromkeys(possible(ids), self._latest)
            self.are_wanted = True

    def waits_for(self, id: int) -> bool:
        """Whether somebody waits for a job, as far as that was said."""
        moment = time.monotonic()
        return self._until.get(id, 0.0) > moment or self._any_until > moment

    def ended(self, ids: Iterable[int], *, here: bool = False) -> None:
        """Answer those who wait for these jobs, whose ends are committed; returns at once, unless it is to be
        done `here`, which saves them the start of another thread."""
        moment = time.monotonic()
        with self._changed:
            if moment > self._latest:  # all of it is old
                self._until.clear()
            every = moment < self._any_until
            wanted = [id for id in ids if self._until.pop(id, None) is not None or every]
            self.are_wanted = every or bool(self._until)
            if not wanted:
                return
            if not (here or self._begin()):
                return  # who waits looks for itself
        if here:
            self._answer(wanted)
        else:
            self._items.put(wanted)

    def abandon(self, seconds: float = LAST_WORDS_SECONDS) -> None:
        """Let the last answers leave, waiting for a moment at most."""
        if self._thread is not None:
            self._close()
            self._thread.join(min(seconds, LAST_WORDS_SECONDS))

    def _forget(self, moment: float) -> None:
        for id in [id for id, until in self._until.items() if until < moment]:
            del self._until[id]

    def _add(self, item: list[int]) -> None:
        self._pending += item

    def _write(self) -> None:
        ids, self._pending = self._pending, []
        self._answer(ids)

    def _answer(self, ids: list[int]) -> None:
        try:
            results.answer(self._database, ids)
        except Exception as error:
            log.debug("those who wait for jobs were not answered: %s", error)
