"""Makes attempts of claimed jobs: payloads decrypted, results of earlier steps put in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from sqlq.errors import PayloadKeyError
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Failed
from sqlq.model.retry import describe, given_back, put_off_without_key
from sqlq.payload.encryption import HEAD, NO_KEYS, Encryption
from sqlq.store.flows.flows import Filled, filled, takes_results
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.lifespan import Lifespan
from sqlq.worker.attempt.progress import ProgressWriter
from sqlq.worker.options import AppParts
from sqlq.worker.threads.log import log


@dataclass(eq=False)
class Intake:
    """Makes attempts of the jobs that one worker has claimed."""

    _worker: str
    _all_isolated: bool
    _has_isolates: bool
    _app: AppParts
    _progress: ProgressWriter
    _lifespan: Lifespan

    @cached_property
    def target(self) -> Target:
        """The place where a handler completes its job; known once the worker has its row in the database."""
        app, database = self._app, self._app.database.for_loops
        return Target(lambda: app.database, database.encryption, database.schema, app.tasks, app.plan)

    def readable(self, claimed: list[ClaimedJob]) -> Filled:
        """Return claimed jobs with decrypted payloads, and with the results of other steps in their
        arguments."""
        encryption = self._app.database.for_loops.encryption
        if encryption is None and not [job for job in claimed if str(job.payload).startswith(HEAD)]:
            return self._with_results(claimed)
        opened = opened_by(encryption, claimed)
        done = self._with_results(opened.ready)
        return Filled(done.ready, [*opened.unready, *done.unready])

    def _with_results(self, claimed: list[ClaimedJob]) -> Filled:
        """Return claimed jobs with the results of the steps before them in their arguments."""
        if not [job for job in claimed if job.flow_id is not None]:
            return Filled(claimed, [])
        try:
            return filled(self._app.database.for_loops, claimed)
        except Exception as error:
            log.warning(
                "the results of earlier steps could not be read (%s); their jobs are given back", error
            )
            return Filled(
                [job for job in claimed if not takes_results(job)],
                [(job, given_back(job)) for job in claimed if takes_results(job)],
            )

    def running(self, job: ClaimedJob, trusted_until: float) -> Attempt:
        """Return a claimed job as its handler sees it, with its task and how it is to run."""
        task = self._app.tasks.get(job.task)
        if task is not None and (task.on_success is not None or task.on_failure is not None):
            # guard: a-row-without-follow-ups-has-its-tasks
            job = job._replace(
                on_success=task.on_success if job.on_success is None else job.on_success,
                on_failure=task.on_failure if job.on_failure is None else job.on_failure,
            )
        # guard: lost-jobs-run-isolated
        isolates = task is not None and bool(self._all_isolated or task.isolate or job.losses > 0)
        running = Attempt(job, task, trusted_until, self.target, isolated=isolates and self._has_isolates)
        running.worker = self._worker
        running.alone = task is not None and task.isolate == "fresh"
        if self._lifespan.exists:
            running.lifespan = self._lifespan.value
        running.on_progress = self._progress.note
        if task is not None and task.retention_ms is not None:
            self._progress.use()
        return running


def opened_by(encryption: Encryption | None, claimed: Iterable[ClaimedJob]) -> Filled:
    """Return claimed jobs with their payloads decrypted. Return the others with their outcomes: failed, or
    released for a worker with the key. Their rows keep the text, and no job behind them waits."""
    done = Filled([], [])
    for job in claimed:
        try:
            plain = (encryption or NO_KEYS).opened("payload", job.task, job.queue, job.payload)
        except PayloadKeyError as error:
            bad = Failed("bad_signature", describe(error))  # guard: a-bad-signature-fails
            done.unready.append((job, put_off_without_key(job, error) if error.lacks_key else bad))
        else:
            done.ready.append(job._replace(payload=plain))
    return done
