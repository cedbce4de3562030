"""From what was claimed to what can run: payloads opened, results of earlier steps filled in, tasks found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from sqlq.errors import SealError
from sqlq.job import ClaimedJob
from sqlq.outcome import Failed
from sqlq.retry import describe, given_back, put_off_without_key
from sqlq.seal import HEAD, Seal, opened_without_keys
from sqlq.store import flows
from sqlq.store.database import Database
from sqlq.task import Registry
from sqlq.worker.commits import CompletionTarget
from sqlq.worker.lifespan import Lifespan
from sqlq.worker.progress import ProgressWriter
from sqlq.worker.running import RunningJob

log = logging.getLogger("sqlq.worker")


class Intake:
    """What one worker makes of the jobs that it has claimed."""

    target: CompletionTarget
    """Where a handler completes its job; known when the worker is entered into the database."""

    def __init__(
        self,
        database: Database,
        worker: str,
        tasks: Registry,
        progress: ProgressWriter,
        lifespan: Lifespan | None,
        *,
        has_isolates: bool,
        all_isolated: bool,
    ) -> None:
        self._database = database
        self._worker = worker
        self._tasks = tasks
        self._progress = progress
        self._lifespan = lifespan
        self._has_isolates = has_isolates
        self._all_isolated = all_isolated
        self.on_start: Callable[[RunningJob], None] | None = None
        """What is told of each job that starts, where anybody listens."""

    def readable(self, claimed: list[ClaimedJob]) -> flows.Filled:
        """Return claimed jobs with payloads that can be read, the results of other steps in their places."""
        seal = self._database.seal
        if seal is None and not any(str(job.payload).startswith(HEAD) for job in claimed):
            return self._with_results(claimed)
        opened = opened_by(seal, claimed)
        filled = self._with_results(opened.ready)
        return flows.Filled(filled.ready, [*opened.unready, *filled.unready])

    def _with_results(self, claimed: list[ClaimedJob]) -> flows.Filled:
        """Return claimed jobs with the results of the steps before them in their arguments."""
        if all(job.flow_id is None for job in claimed):
            return flows.Filled(claimed, [])
        try:
            return flows.filled(self._database, claimed)
        except Exception as error:
            log.warning(
                "the results of earlier steps could not be read (%s); their jobs are given back", error
            )
            return flows.Filled(
                [job for job in claimed if not flows.takes_results(job)],
                [(job, given_back(job)) for job in claimed if flows.takes_results(job)],
            )

    def running(self, job: ClaimedJob, trusted_until: float) -> RunningJob:
        """Return a claimed job as its handler sees it, with its task and how it is to run."""
        task = self._tasks.get(job.task)
        # guard: lost-jobs-run-isolated
        isolated = self._has_isolates and task is not None and (task.isolate or job.losses > 0)
        if self._all_isolated:
            isolated = self._has_isolates and task is not None
        running = RunningJob(job, task, trusted_until, self.target, isolated=bool(isolated))
        running.worker = self._worker
        running.alone = task is not None and task.isolate == "fresh"
        if self._lifespan is not None:
            running.lifespan = self._lifespan.value
        if self.on_start is not None:
            running.on_start = self.on_start
        running.on_progress = self._progress.note
        if task is not None and task.retention_ms is not None:
            self._progress.in_use = True
        return running


def opened_by(seal: Seal | None, claimed: Iterable[ClaimedJob]) -> flows.Filled:
    """Return claimed jobs with their payloads opened, before anything else is done with them; and those that
    are not opened here, with how their attempts end: failed, or put back for a worker with the key. Their
    rows keep the text as it is, and nothing behind them is held up."""
    done = flows.Filled([], [])
    for job in claimed:
        try:
            if seal is None:
                opened_without_keys("payload", job.payload)
            else:
                job = job._replace(payload=seal.opened("payload", job.task, job.queue, job.payload))
        except SealError as error:
            bad = Failed("bad_signature", describe(error))  # guard: a-bad-seal-fails
            done.unready.append((job, put_off_without_key(job, error) if error.lacks_key else bad))
        else:
            done.ready.append(job)
    return done
