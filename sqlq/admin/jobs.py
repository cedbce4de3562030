"""`app.jobs`: to look at jobs, and to cancel, reschedule, change, retry, replay, delete and prune them."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Unpack

from sqlalchemy import Connection

from sqlq.admin.batches import Cancellation, cancel, change, delete, move_back, replay
from sqlq.admin.facet import Facet, audited, for_asyncio
from sqlq.admin.failures import Failures, grouped
from sqlq.admin.selections import (
    Chosen,
    Search,
    checked_state,
    delay_ms_of,
    ids_of,
    no_job,
    selection,
    selections,
)
from sqlq.config.durations import Duration, milliseconds
from sqlq.database.database import Database
from sqlq.database.schemas import in_schema
from sqlq.errors import ConfigurationError, JobNotFoundError, PayloadKeyError
from sqlq.events import Events
from sqlq.model.checks import Priority, Rows, checked_queue
from sqlq.model.handle import AnyJob, AnyJobs, Handle, id_of
from sqlq.model.job import Job, JobDetails, NewJob, State
from sqlq.model.task import Registry
from sqlq.payload.encryption import Encryption
from sqlq.results.results import Results
from sqlq.schema import version
from sqlq.schema.types import milliseconds_since_epoch
from sqlq.store.health import Pace, pace_of
from sqlq.store.jobs import failed, insert, lookup, operate
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.operate import JobChange

SEARCH_LIMIT = 100_000
"""A command that searches for jobs reads at most this many of the newest of each table."""
TEXT_SEARCH_LIMIT = 10_000
"""A search in their texts reads at most this number."""


class JobList(builtins.list[JobDetails]):
    """Jobs, the newest first. `complete` is False if the search was bounded, and older jobs may match,
    too."""

    complete = True


class RetriedJobs(builtins.list[int]):
    """The ids of the jobs that were moved back. `held` are those that stay failed, since live jobs hold their
    unique keys."""

    held: Sequence[int] = ()


class Pruned(NamedTuple):
    """How many jobs were deleted."""

    finished: int
    failed: int


class Jobs(Facet):
    """The jobs in a database: `app.jobs`. Each `aX` is `X` in a thread, so that the event loop goes on. A
    write that has begun goes on to its end, even if the awaiting task is cancelled."""

    def __init__(self, database: Database, tasks: Registry, events: Events, results: Results) -> None:
        """`results` knows the jobs that ran in this process."""
        super().__init__(database)
        self._tasks = tasks
        self._events = events
        self._results = results

    # -- look ------------------------------------------------------------------------------------------------

    def get(self, id: AnyJob) -> JobDetails:
        """Return everything about a job, whatever its state. Where its row has no `max_attempts` or timeout,
        those of its task stand there. Raises `JobNotFoundError`.

        >>> app.jobs.get(42).progress  # doctest: +SKIP
        Progress(done=25.0, of=100.0, note='writing')
        """
        here = self._results.job_here(id)
        job: JobDetails | None = here and here.details()
        if job is None:
            job = self._query(lookup.details, id_of(id), self._database.encryption)
            if isinstance(id, Handle):
                id.require_own(None if job is None else milliseconds_since_epoch(job.created_at))
            if job is None:
                raise no_job(id_of(id))
        task = self._tasks.get(job.task)
        if task is None:
            return job
        task = task._in_queue(job.queue)
        return replace(
            job,
            max_attempts=task.max_attempts if job.max_attempts is None else job.max_attempts,
            timeout_ms=task.timeout_ms if job.timeout_ms is None else job.timeout_ms,
        )

    aget = for_asyncio(get)

    def get_by_key(self, queue: str, key: str) -> JobDetails:
        """Return everything about the job that holds a unique key in a queue: the live one, or with
        `unique_until="pruned"` one that has ended. Raises `JobNotFoundError`.

        >>> app.jobs.get_by_key("mail", "receipt-7").state  # doctest: +SKIP
        <State.FINISHED: 'finished'>
        """
        id = self._query(insert.holder, queue, key)
        if id is None:
            raise JobNotFoundError(
                f"no job holds the unique key {key!r} in the queue {queue!r}: a job that has ended holds it "
                'with unique_until="pruned" only, and as long as its row is kept'
            )
        return self.get(id)

    aget_by_key = for_asyncio(get_by_key)

    def list(
        self,
        *,
        state: str | None = None,
        limit: Rows = 100,
        within: Rows | None = None,
        whole: bool = True,
        **search: Unpack[Search],
    ) -> JobList:
        """Return the newest jobs of a state, and of the queue, task, batch or other fields of a search. They
        are at most `limit`.

        With `within` it reads at most that number of the newest jobs of each table. `before` continues after
        the last id of an earlier list. Unless `whole`, payload, result and traceback are not read, and are
        None.

        >>> app.jobs.list(state="failed", label="tenant-7", since=yesterday)  # doctest: +SKIP
        """
        meant = selection(**search)
        if within is not None and meant.text is not None:
            within = min(within, TEXT_SEARCH_LIMIT)
        jobs, complete = self._query(
            lookup.listing,
            state=None if state is None else checked_state(state),
            selection=meant,
            limit=limit,
            within=within,
            whole=whole,
            encryption=self._database.encryption,
        )
        result = JobList(jobs)
        result.complete = complete
        return result

    alist = for_asyncio(list)

    def of_batch(self, batch: str) -> builtins.list[Job[Any]]:
        """Return the jobs of a batch that are there now, in whatever state, in the order of their ids.

        They are as `enqueue` has returned them, to be given to `app.wait_all`, `app.as_completed`,
        `app.result` and `cancel`. Jobs that are kept no more are not among them.

        >>> done = app.wait_all(app.jobs.of_batch("import-42"), timeout="5m")  # doctest: +SKIP
        """
        return self._query(lookup.handles, Selection(batch=batch))

    aof_batch = for_asyncio(of_batch)

    def counts(self, *, batch: str) -> dict[State, int]:
        """Return how many jobs of a batch are in each state; states of no job are missing.

        >>> app.jobs.counts(batch="import-42")  # doctest: +SKIP
        {<State.FINISHED: 'finished'>: 311, <State.FAILED: 'failed'>: 2}
        """
        return self._query(lookup.counts, Selection(batch=batch))

    acounts = for_asyncio(counts)

    def failures(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        batch: str | None = None,
        error: str | None = None,
    ) -> tuple[builtins.list[Failures], bool]:
        """Group failed jobs by task and error, the most frequent first; return also whether all are there.

        It returns about 1,000 groups, the most frequent among them. It counts up to 100,000 jobs of a queue,
        task and error, and 300,000 in all. Larger numbers are estimates. It reads the newest 100,000 jobs
        of a batch. `error` is a fingerprint.
        """
        return self._query(grouped, Selection(task=task, queue=queue, batch=batch, error=error))

    def pace(self, length: Duration, parts: Rows) -> Pace:
        """Return how many jobs finished and failed in each part of the last time, and how long they waited
        and ran. Each part is measured on a sample; jobs with a retention of their own are not in it."""
        return self._query(pace_of, timedelta(milliseconds=max(1, milliseconds(length, "length"))), parts)

    def why(self, id: AnyJob) -> builtins.list[str]:
        """Return why a job does not run now and when it will, or what became of it, in sentences.

        They are those of `sqlq why`. The findings of the doctor about who should run it come last. Raises
        `JobNotFoundError`.

        >>> app.jobs.why(42)  # doctest: +SKIP
        ['no worker serves its queue', 'a cancel ends it without running it']
        """
        from sqlq.admin.doctor.doctor import findings
        from sqlq.admin.why import why

        job = self.get(id)
        return [
            *(reason.text for reason in why(self._database, job)),
            *(finding.said for finding in findings(self._database, job)),
        ]

    awhy = for_asyncio(why)

    def _counts(self, states: Sequence[str], **chosen: Unpack[Chosen]) -> dict[State, int]:
        """Return how many jobs an action means, by state, of each table at most 100,000."""
        counts: Counter[State] = Counter()
        for some in self._meant((), "jobs", **chosen):
            counts.update(self._query(lookup.counts, some, states, SEARCH_LIMIT))
        return dict(counts)

    # -- cancel ----------------------------------------------------------------------------------------------

    def _meant(self, ids: AnyJob | AnyJobs, noun: str, **chosen: Unpack[Chosen]) -> Sequence[Selection]:
        """Return the jobs that a call means, without those that are enqueued from now on: it ends however
        fast they arrive."""
        meant = selections(ids_of(ids, self._read), noun, **chosen)
        with self._read() as conn:
            before = operate.newest(conn) + 1
            meant = [replace(some, before=before) for some in meant]
            first = meant[0]
            if first.error is None:
                return meant
            parts = failed.of_error(conn, first.error, queue=first.queue, task=first.task)
        if not parts:
            raise JobNotFoundError(f"no failed job has the error {first.error!r}: see sqlq failed")
        return [replace(some, queue=each.queue, task=each.task) for some in meant for each in parts]

    @audited("cancel")
    def cancel(
        self,
        ids: AnyJobs = (),
        *,
        force: bool = False,
        reason: str | None = None,
        **chosen: Unpack[Chosen],
    ) -> dict[int, Cancellation]:
        """Cancel live jobs, by ids, task, queue or batch, or `all=True`, and return the effect on each. But
        for ids it cancels those that were there when the call began.

        A waiting job is "cancelled". A running one is "requested": its worker sees that within 2 s, and
        requests the handler to stop. With `force` it is cancelled here and now, and no write of its worker
        counts any more. The other effects on ids are "ended", "unknown", "passed over" (not of the task,
        queue or batch named) and "locked" (try again). The cancelled job has the `reason`, a text of at most
        255 characters, in place of "cancelled on request". `JobCancelledError` has it, too.

        >>> app.jobs.cancel([42, 43]) == {42: "cancelled", 43: "requested"}  # doctest: +SKIP
        True
        """
        return cancel(self._database, self._meant(ids, "jobs", **chosen), force=force, reason=reason)

    acancel = for_asyncio(cancel)

    # -- reschedule ------------------------------------------------------------------------------------------

    @audited("reschedule")
    def reschedule(
        self,
        ids: AnyJobs = (),
        *,
        available_at: datetime | None = None,
        delay: Duration | None = None,
        **chosen: Unpack[Chosen],
    ) -> builtins.list[int]:
        """Move waiting jobs to another time: to `available_at`, a time with a time zone, or by `delay` from
        now, or with neither to now. Return the ids moved.

        By ids, task, queue or batch, or `all=True`. A job that waits for a retry counts as waiting. For one
        that waits under a limit or in a flow this is the time before which it does not start. Running and
        ended jobs stay as they are. A limit on the start (`start_within`) stays, too.

        >>> app.jobs.reschedule(task="shop.send_receipt", delay="1h")  # doctest: +SKIP
        [42, 43]
        """
        delay_ms = delay_ms_of(available_at, delay) or 0
        meant = self._meant(ids, "waiting jobs", **chosen)
        return sorted(change(self._database, meant, at=available_at, delay_ms=delay_ms))

    areschedule = for_asyncio(reschedule)

    @audited("change")
    def change(
        self,
        ids: AnyJobs,
        *,
        queue: str | None = None,
        priority: Priority | None = None,
        available_at: datetime | None = None,
        delay: Duration | None = None,
    ) -> dict[int, JobChange]:
        """Change waiting jobs: their queue, their priority, or the time as `reschedule` does. Return the
        effect on each.

        All that is given changes, or nothing of a job does. The effects are "changed", "not waiting",
        "protected" and "key held". A signed or encrypted job stays in its queue. So does one whose unique key
        another job holds in the other queue. Raises `ConfigurationError` for a wrong value, and if nothing is
        to change.

        >>> app.jobs.change([42, 43], queue="bulk", priority=-10)  # doctest: +SKIP
        {42: <JobChange.CHANGED: 'changed'>, 43: <JobChange.NOT_WAITING: 'not waiting'>}
        """
        values: dict[str, Any] = {} if priority is None else {"priority": priority}
        if queue is not None:
            values["queue"] = checked_queue(queue)
        delay_ms = delay_ms_of(available_at, delay)
        if not values and delay is None and available_at is None:
            raise ConfigurationError("nothing is to change: give a queue, a priority, available_at or delay")
        effects = dict.fromkeys(ids_of(ids, self._read), JobChange.NOT_WAITING)
        meant = self._meant([*effects], "waiting jobs")
        return effects | change(self._database, meant, at=available_at, delay_ms=delay_ms, values=values)

    achange = for_asyncio(change)

    # -- retry and replay ------------------------------------------------------------------------------------

    @audited("retry")
    def retry(self, ids: AnyJobs = (), **chosen: Unpack[Chosen]) -> RetriedJobs:
        """Move failed jobs back to be run again with all their attempts, under the same id; return the ids
        moved.

        By ids, task, queue or batch, or `all=True`; those given together must all fit. A job whose unique
        key a live job holds stays failed: `held` of the answer has it.
        """
        moved, held = move_back(self._database, self._meant(ids, "failed jobs", **chosen))
        retried = RetriedJobs(moved)
        retried.held = held
        return retried

    aretry = for_asyncio(retry)

    @audited("replay")
    def replay(
        self,
        ids: AnyJob | AnyJobs = (),
        **chosen: Unpack[Chosen],
    ) -> dict[int, int]:
        """Enqueue copies of ended jobs; return the new ids by those of the originals.

        By ids, all or none; or in batches by task, queue, batch, error or time of their end. Those given
        together must all fit. `since` and `until` are times with a time zone, or ages, as in "2h". A
        job of which a copy is kept is copied again by its id only, unless that copy was cancelled. So an
        interrupted replay goes on where it was. Cancelled jobs are copied by id or `state`, steps of flows
        never. A replay has the task, arguments, queue, options, headers, label, batch and limit of its
        original (`app.jobs.get(id).replay_of`). It has no unique key, no time limit for its start, and no
        cursor.

        >>> app.jobs.replay(task="shop.send_receipt", since="2h")  # doctest: +SKIP
        {42: 97, 43: 98}
        """
        new: dict[int, int] = {}
        for copies in replay(self._database, self._meant(ids, "ended jobs", **chosen)):
            self._database.after_commit(partial(self._events.replayed, copies))  # guard: replays-are-told
            new |= {each.replay_of: each.id for each in copies}
        return new

    areplay = for_asyncio(replay)

    # -- delete ----------------------------------------------------------------------------------------------

    @audited("delete")
    def delete(self, ids: AnyJobs = (), **chosen: Unpack[Chosen]) -> builtins.list[int]:
        """Delete ended jobs by their ids, or failed ones by task, queue or batch, or `all=True`. Return the
        ids deleted. A finished step stays while another step of its flow may take its result."""
        return sorted(delete(self._database, self._meant(ids, "failed jobs", **chosen)))

    @audited("prune")
    def prune(self, *, finished: Duration | None = None, failed: Duration | None = None) -> Pruned:
        """Delete jobs that finished or were cancelled longer ago than `finished`, and jobs that failed longer
        ago than `failed`; return how many of each. Workers prune finished jobs by themselves, see
        `App(retention=…)`. Jobs with a `retention` of their own are left alone: workers delete them,
        failed ones too, when it is over.

        >>> app.jobs.prune(finished="7d", failed="30d")  # doctest: +SKIP
        Pruned(finished=1200, failed=3)
        """
        if finished is None and failed is None:
            raise ConfigurationError(
                'say what to prune: finished jobs, failed jobs or both, each with an age such as "7d"'
            )
        self._database.require_tables()
        return Pruned(self._prune(finished, failed=False), self._prune(failed, failed=True))

    def _prune(self, age: Duration | None, *, failed: bool) -> int:
        if age is None:
            return 0
        age_ms = milliseconds(age, "age")
        work = partial(operate.prune, older_than_ms=age_ms, limit=lookup.BATCH, failed=failed)
        return self._to_the_end(work, lookup.BATCH)


def enqueued(
    conn: Connection, task: str, schema: str | None, encryption: Encryption | None
) -> Iterator[tuple[int, NewJob]]:
    """Yield the jobs of a task that a transaction sees, with their ids, the oldest first. `encryption`
    decrypts the payloads that it can."""
    version.require(conn, schema)
    with in_schema(conn, schema):
        rows = [*lookup.enqueued(conn, task)]
    for id, job in rows:
        if encryption is not None:
            with suppress(PayloadKeyError):
                job = job._with_payload(encryption.opened("payload", job.task, job.queue, job.payload))
        yield id, job
