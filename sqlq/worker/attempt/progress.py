"""The progress of jobs, as their handlers report it: written at most once a second, and when a job ends.

A handler leaves its report on the attempt and goes on. A thread begins with the first report. It writes the
new progress of all jobs in one statement. Heartbeats and settles never wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy.exc import DBAPIError

from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.errors import SqlqError
from sqlq.store.jobs import lease
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import IDLE_SECONDS, Loop, Outage

EVERY_SECONDS = 1.0


class Pace(Loop):
    """Hands over the attempts with new progress, at most once a second."""

    in_use = False
    """Whether attempts may have news. Before that they cost a settle nothing."""

    def __init__(
        self, hand_over: Callable[[Sequence[Attempt]], None], database: Database | None = None
    ) -> None:
        super().__init__("sqlq-progress", Outage("writing progress", database))
        self._hand_over = hand_over
        self._noted: dict[Right, Attempt] = {}

    def note(self, job: Attempt) -> None:
        """Note that an attempt has new progress; returns at once."""
        self.in_use = True
        if job.right in self._noted:  # it is read after it was taken out there, so this progress is, too
            return
        self._noted[job.right] = job
        self.begin()
        self.wake()

    def _turn(self) -> float:
        # one by one, since threads of handlers add others meanwhile; guard: progress-keeps-up
        jobs = [self._noted.popitem()[1] for _ in range(len(self._noted))]
        if jobs:
            self._hand_over(jobs)
            self._closed.wait(EVERY_SECONDS)
        return IDLE_SECONDS


class ProgressWriter(Pace):
    """Writes the progress of a worker's jobs, and the retention of their tasks where SQL inserted them."""

    def __init__(self, database: Database) -> None:
        super().__init__(self._write_new, database)
        self._database = database
        self._writing = threading.Lock()
        """So that earlier progress is never written later."""

    def flush(self, ended: Iterable[Attempt]) -> set[Right]:
        """Write the last progress of jobs that have ended, before they are settled. Return the rights of rows
        that another transaction keeps locked. Raises the driver's error when the database is away."""
        missing = self._write_rows([job for job in ended if _has_news(job)]) if self.in_use else set()
        if not missing:
            return missing
        with self._database.read() as conn:
            states = lease.states_of(conn, missing)
        return {right for right in missing if states[right] is lease.LeaseState.HELD}

    def _write_new(self, jobs: Sequence[Attempt]) -> None:
        running = [job for job in jobs if _has_news(job) and not (job.ended or job.completed)]
        try:
            missing = self._write_rows(running)
        except (DBAPIError, SqlqError):
            missing = {job.right for job in running}
        for job in running:
            if job.right in missing and not job.ended:
                self.note(job)

    def _write_rows(self, jobs: Sequence[Attempt]) -> set[Right]:
        """Write the progress of each job. Return the rights that did not match, because they are locked or
        lost."""
        if not jobs:
            return set()
        with self._writing:
            reports = {job.right: (job, job.progress) for job in jobs}
            try:
                with self._database.single_statements() as conn:
                    written = lease.note(conn, [job.note() for job in jobs])
            except DBAPIError as error:
                if self._database.dialect.driver.problem(error).passes:
                    raise
                log.warning("the database refuses the progress of %d jobs: %s", len(jobs), error.orig)
                written = set(reports)
        for right in written:
            job, progress = reports[right]
            job.progress_written, job.keeps_noted = progress, True
        return reports.keys() - written


def _has_news(job: Attempt) -> bool:
    return job.progress is not job.progress_written or (job.keeps_ms is not None and not job.keeps_noted)
