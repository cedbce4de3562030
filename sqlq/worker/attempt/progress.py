"""How far jobs have come, by their handlers' word: written at most once a second, and when a job ends.

A handler leaves its word on the job and goes on. A thread, which starts with the first such word, writes what
is new of all jobs in one statement, apart from heartbeats and settles, which never wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy.exc import DBAPIError

from sqlq.database.database import Database
from sqlq.database.dialect import Right
from sqlq.errors import SqlqError
from sqlq.store.jobs import lease, progress
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.gather import Threaded

log = logging.getLogger("sqlq.worker")

EVERY_SECONDS = 1.0


class Pace(Threaded):
    """Hands over the jobs that have something new to say, at most once a second."""

    def __init__(self, hand_over: Callable[[Sequence[Attempt]], None]) -> None:
        super().__init__("sqlq-progress")
        self._hand_over = hand_over
        self._news: dict[Right, Attempt] = {}
        self._something = threading.Event()

    def note(self, job: Attempt) -> None:
        """Note that a job says something new; returns at once."""
        if job.right in self._news:  # it is read after it was taken out there, so this word is, too
            return
        with self._changed:
            self._news[job.right] = job
            self._begin()
        self._something.set()

    def _close(self) -> None:
        self._something.set()

    def _run(self) -> None:
        while not self._abandoned.is_set():
            self._something.wait()
            self._something.clear()
            with self._changed:
                news, self._news = self._news, {}
            if news:
                try:
                    self._hand_over(list(news.values()))
                except Exception:
                    log.exception("writing progress failed; the next word is written again")
            self._abandoned.wait(EVERY_SECONDS)


class ProgressWriter(Pace):
    """Writes what the jobs of a worker say, and of those that SQL inserted how long their task keeps them."""

    def __init__(self, database: Database) -> None:
        super().__init__(self._write_new)
        self._database = database
        self._writing = threading.Lock()
        """So that what was said earlier is never written later."""
        self.in_use = False
        """Whether a job has said anything so far: others cost a settle nothing."""

    def note(self, job: Attempt) -> None:
        """Write a job's new word soon; returns at once."""
        self.in_use = True
        super().note(job)

    def flush(self, ended: Iterable[Attempt]) -> set[Right]:
        """Write the last word of jobs that have ended, before they are settled; return the rights of those
        that another transaction keeps locked, so that it could not be. Raises what the database does when it
        is away."""
        if not self.in_use:
            return set()
        missing = self._write([job for job in ended if _has_news(job)])
        if not missing:
            return set()
        with self._database.read() as conn:
            fates = lease.fates(conn, missing)
        return {right for right in missing if fates[right] is lease.Fate.HELD}

    def _write_new(self, said: Sequence[Attempt]) -> None:
        running = [job for job in said if _has_news(job) and not (job.ended or job.completed)]
        try:
            missing = self._write(running)
        except (DBAPIError, SqlqError) as error:
            log.debug("progress could not be written: %s", error)
            missing = {job.right for job in running}
        for job in running:
            if job.right in missing and not job.ended:
                self.note(job)

    def _write(self, said: Sequence[Attempt]) -> set[Right]:
        """Write the word of each job, and return the rights that did not match, because they are locked or
        lost."""
        if not said:
            return set()
        with self._writing:
            words = {job.right: (job, job.said) for job in said}
            try:
                with self._database.single_statements() as conn:
                    written = progress.write(conn, [job.note() for job in said])
            except DBAPIError as error:
                dialect = self._database.dialect
                if dialect.trouble(error).passes:
                    raise
                log.warning(
                    "the database refuses what %d jobs say of their progress: %s", len(said), error.orig
                )
                written = set(words)
        for right in written:
            job, word = words[right]
            job.said_written, job.keeps_noted = word, True
        return words.keys() - written


def _has_news(job: Attempt) -> bool:
    return job.said is not job.said_written or (job.keeps_ms is not None and not job.keeps_noted)
