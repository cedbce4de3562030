"""`app.jobs`: to look at jobs, and to cancel, reschedule, retry, replay, delete and prune them."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from sqlalchemy import Connection

from sqlq.admin.cancel import Cancellation, Canceller, unblocked_after
from sqlq.admin.facet import Facet, audited, check_most, check_names, for_asyncio, portions
from sqlq.admin.failures import Failures, Marks, grouped
from sqlq.admin.reschedule import reschedule
from sqlq.config.constants import IDS
from sqlq.config.durations import Duration, aware, milliseconds
from sqlq.database.database import Database
from sqlq.database.dialect import in_schema
from sqlq.database.dialects import dialect_of
from sqlq.enqueue.prepare import Stamps
from sqlq.errors import ConfigurationError, JobNotFoundError, SealError
from sqlq.events import Events
from sqlq.model.checks import checked_name
from sqlq.model.handle import AnyJob, AnyJobs, Handle, id_of
from sqlq.model.job import Job, JobDetails, State
from sqlq.model.task import Registry
from sqlq.payload.encryption import Encryption
from sqlq.results.results import Results
from sqlq.schema import version
from sqlq.store.health import counts as level_counts
from sqlq.store.health.pace import Pace, pace_of
from sqlq.store.jobs import lookup, retry, unique
from sqlq.store.jobs import prune as pruning
from sqlq.store.jobs.lookup import Listing, Selection
from sqlq.store.jobs.results import look

if TYPE_CHECKING:
    from typing import Unpack

    from sqlq.admin.replay import Replayed, ReplayOptions

LOOKED_AT = 100_000
"""A command that searches for jobs reads at most this many of the newest of each table."""
TEXTS_LOOKED_AT = 10_000
"""A search in their texts reads so many."""


class Search(TypedDict, total=False):
    """Which jobs to look for; all that is given must fit. `header` is a name, or "name=value"; `text` stands
    in the arguments or the error; `since` and `until` are times of creation."""

    task: str | None
    queue: str | None
    label: str | None
    group: str | None
    key: str | None
    limit_key: str | None
    header: str | None
    text: str | None
    since: datetime | None
    until: datetime | None
    before: int | None
    newest: int | None


class Pruned(NamedTuple):
    """How many jobs were deleted."""

    finished: int
    failed: int


class MovedBack(NamedTuple):
    """Which failed jobs were moved back, and which stayed because a live job holds their unique key."""

    moved: builtins.list[int]
    held: builtins.list[int]


class Jobs(Facet):
    """The jobs in a database: `app.jobs`. Each `aX` is `X` in a thread, so that the event loop goes on. A
    write that has begun goes on to its end, even if the awaiting task is cancelled."""

    def __init__(
        self, database: Database, tasks: Registry, events: Events, stamps: Stamps, results: Results
    ) -> None:
        """`results` knows the jobs that ran in this process."""
        super().__init__(database)
        self._tasks = tasks
        self._events = events
        self._stamps = stamps
        self._results = results
        self._marks = Marks()

    # -- look ------------------------------------------------------------------------------------------------

    def get(self, id: AnyJob) -> JobDetails:
        """Return everything about a job, whatever its state. Where its row has no `max_attempts` or timeout,
        those of its task stand there. Raises `JobNotFoundError`.

        >>> app.jobs.get(42).progress  # doctest: +SKIP
        Progress(done=25.0, of=100.0, note='writing')
        """
        here = self._results.job_here(id)
        return self._with_its_task(self._row(id) if here is None else here.details())

    def _row(self, id: AnyJob) -> JobDetails:
        with self._read() as conn:
            return self._row_on(conn, id)

    def _row_on(self, conn: Connection, id: AnyJob) -> JobDetails:
        number = id_of(id)
        job = lookup.details(conn, number, self._database.seal)
        lookup.require_own(id, job)
        if job is None:
            raise _no_job_here(conn, number, self._database.schema_for(conn))
        return job

    def _with_its_task(self, job: JobDetails) -> JobDetails:
        task = self._tasks.get(job.task)
        if task is None or (job.max_attempts is not None and job.timeout_ms is not None):
            return job
        task = task.for_queue(job.queue)
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
        name = checked_name(queue, "queue", ConfigurationError)
        checked_name(key, "the key", ConfigurationError)
        here = self._results.here
        if here is not None and (job := here.holder(name, key)) is not None:
            return self.get(job.id)
        with self._read() as conn:
            id = unique.holder(conn, name, key)
        if id is None:
            raise JobNotFoundError(
                f"no job holds the unique key {key!r} in the queue {name!r}: a job that has ended holds it "
                'with unique_until="pruned" only, and as long as its row is kept'
            )
        return self.get(id)

    aget_by_key = for_asyncio(get_by_key)

    def list(
        self,
        *,
        state: str | None = None,
        queue: str | None = None,
        task: str | None = None,
        group: str | None = None,
        limit: int = 100,
    ) -> builtins.list[JobDetails]:
        """Return the newest jobs, of a state, queue, task or group if given, at most `limit`."""
        chosen: Search = {"queue": queue, "task": task, "group": group}
        return self.listing(state=state, limit=limit, within=None, **chosen).jobs

    alist = for_asyncio(list)

    def listing(
        self,
        *,
        state: str | None = None,
        limit: int = 100,
        within: int | None = LOOKED_AT,
        **chosen: Unpack[Search],
    ) -> Listing:
        """`list`, but reads at most the newest `within` jobs of each table, and returns also whether that
        was enough. `before` goes on after the last id of an earlier listing.

        >>> app.jobs.listing(state="failed", label="tenant-7", since=yesterday).jobs  # doctest: +SKIP
        """
        check_most(limit)
        selection = _searched(chosen)
        if selection.text is not None and within is not None:
            within = min(within, TEXTS_LOOKED_AT)
        with self._read() as conn:
            return lookup.listing(
                conn,
                state=None if state is None else checked_state(state),
                chosen=selection,
                limit=limit,
                within=within,
                seal=self._database.seal,
            )

    def ids(
        self, *, states: Iterable[str], limit: int, within: int = LOOKED_AT, **chosen: Unpack[Search]
    ) -> builtins.list[int]:
        """Return the ids of jobs in these states, the newest first, as `listing` finds them."""
        check_most(limit)
        selection = _searched(chosen)
        if selection.text is not None:
            within = min(within, TEXTS_LOOKED_AT)
        wanted = [checked_state(state) for state in states]
        with self._read() as conn:
            return lookup.ids(conn, wanted, selection, within=within, limit=limit)

    def of_group(self, group: str) -> builtins.list[Job[Any]]:
        """Return the jobs of a group that are there now, in whatever state, in the order of their ids.

        They are as `enqueue` has returned them, to be given to `app.wait`, `app.as_completed`, `app.result`
        and `cancel`. Jobs that are kept no more are not among them.

        >>> done = app.wait(app.jobs.of_group("import-42"), timeout="5m")  # doctest: +SKIP
        """
        chosen = Selection(group=checked_name(group, "group", ConfigurationError))
        here = self._results.here
        found = [] if here is None else [job for job in here.jobs if job.new.group_key == chosen.group]
        if found:
            return [job.answer(created=False) for job in found]
        with self._read() as conn:
            return lookup.handles(conn, chosen)

    aof_group = for_asyncio(of_group)

    def counts(self, *, group: str) -> dict[State, int]:
        """Return how many jobs of a group are in each state; states of no job are missing.

        >>> app.jobs.counts(group="import-42")  # doctest: +SKIP
        {<State.FINISHED: 'finished'>: 311, <State.FAILED: 'failed'>: 2}
        """
        chosen = Selection(group=checked_name(group, "group", ConfigurationError))
        if self._results.here is not None:
            return dict(Counter(job.state for job in self.of_group(group)))
        with self._read() as conn:
            return lookup.counts(conn, chosen)

    acounts = for_asyncio(counts)

    def failures(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        exact: bool = False,
    ) -> tuple[builtins.list[Failures], bool]:
        """Group failed jobs by task and error, the most frequent first; return also whether all were
        counted. Unless `exact`, it reads the newest 10,000."""
        within = None if exact else level_counts.MOST
        with self._read() as conn:
            rows = lookup.failures(conn, Selection(task=task, queue=queue, group=group), within=within)
            found = grouped(rows, self._marks.of(conn, rows))
            return found, within is None or not lookup.more_failed_than(conn, within)

    def failed_alike(self, fingerprint: str) -> builtins.list[int]:
        """Return the ids of the failed jobs with the error of a fingerprint, among the newest 10,000."""
        with self._read() as conn:
            rows = lookup.failures(conn, Selection(), within=level_counts.MOST)
            marks = self._marks.of(conn, rows)
        return [row.id for row, mark in marks.items() if mark.fingerprint == fingerprint]

    def pace(self, length: timedelta, parts: int) -> Pace:
        """Return how many jobs finished and failed in each part of the last time, and how long they waited
        and ran. Each part is measured on a sample; jobs with a retention of their own are not in it."""
        with self._read() as conn:
            return pace_of(conn, length, parts)

    def why(self, id: AnyJob) -> builtins.list[str]:
        """Return why a job does not run now and when it will, or what became of it, in sentences.

        They are those of `sqlq why`. The findings of the doctor about who should run it come last. Raises
        `JobNotFoundError`.

        >>> app.jobs.why(42)  # doctest: +SKIP
        ['no worker serves its queue', 'a cancel ends it without running it']
        """
        from sqlq.admin.why import findings, why

        job = self.get(id)
        reasons = [each.said for each in why(self._database, job)]
        return reasons + [each.said for each in findings(self._database, job)]

    awhy = for_asyncio(why)

    # -- cancel ----------------------------------------------------------------------------------------------

    @audited("cancel")
    def cancel(
        self,
        ids: AnyJobs = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        all: bool = False,
        force: bool = False,
    ) -> dict[int, Cancellation]:
        """Cancel live jobs, by ids, task, queue or group, or `all=True`, and return the effect on each. But
        for ids it cancels those that were there when the call began.

        A waiting job is "cancelled". A running one is "requested": its worker sees that within 2 s, and
        requests the handler to stop. With `force` it is cancelled here and now, and no write of its worker
        counts any more. The other effects on ids are "ended", "unknown", "passed over" (not of the task,
        queue or group named) and "locked" (try again).

        >>> app.jobs.cancel([42, 43]) == {42: "cancelled", 43: "requested"}  # doctest: +SKIP
        True
        """
        selections = _selections(self.ids_of(ids), task, queue, group, all, what="jobs")
        self._database.require_tables()
        return Canceller(self._database).cancel(selections, force=force)

    acancel = for_asyncio(cancel)

    # -- reschedule ------------------------------------------------------------------------------------------

    @audited("reschedule")
    def reschedule(
        self,
        ids: AnyJobs = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        all: bool = False,
        at: datetime | None = None,
        delay: Duration | None = None,
    ) -> builtins.list[int]:
        """Move waiting jobs to another time: to `at`, a time with a time zone, or by `delay` from now, or
        with neither to now. Return the ids moved.

        By ids, task, queue or group, or `all=True`. A job that waits for a retry counts as waiting. For one
        that waits under a limit or in a flow this is the time before which it does not start. Running and
        ended jobs stay as they are. A limit on the start (`expires`) stays, too.

        >>> app.jobs.reschedule(task="shop.send_receipt", delay="1h")  # doctest: +SKIP
        [42, 43]
        """
        selections = _selections(self.ids_of(ids), task, queue, group, all, "waiting jobs")
        if at is not None and delay is not None:
            raise ConfigurationError("at and delay both say when: give one of the two")
        moment = None if at is None else aware(at, "at")
        delay_ms = 0 if delay is None else milliseconds(delay, "delay")
        self._database.require_tables()
        return reschedule(self._database, selections, at=moment, delay_ms=delay_ms)

    areschedule = for_asyncio(reschedule)

    # -- retry and replay ------------------------------------------------------------------------------------

    @audited("retry")
    def retry(
        self,
        ids: AnyJobs = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        all: bool = False,
    ) -> builtins.list[int]:
        """Move failed jobs back to be run again with all their attempts, under the same id; return the ids
        moved.

        By ids, task, queue or group, or `all=True`; those given together must all fit. A job whose unique
        key a live job holds stays failed: `move_back` returns which.
        """
        return self.move_back(ids, task=task, queue=queue, group=group, all=all).moved

    @audited("retry")
    def move_back(
        self,
        ids: AnyJobs = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        all: bool = False,
    ) -> MovedBack:
        """`retry`, and return also which jobs stayed failed because a live job holds their unique key."""
        selections = _selections(self.ids_of(ids), task, queue, group, all)
        self._database.require_tables()
        return move_back(self._database, selections)

    aretry = for_asyncio(retry)

    @audited("replay")
    def replay(self, ids: AnyJob | AnyJobs = (), **options: Unpack[ReplayOptions]) -> Replayed:
        """Enqueue ended jobs once more, as new jobs with ids of their own; return which became which.

        By id, task, queue, group, or the time of their end; all that is given must fit. `since` and `until`
        are times with a time zone, or how long ago, as in "2h". Without `state` it takes finished and failed
        jobs, by id cancelled ones, too. A replay has the task, arguments, queue, priority, options, headers,
        label, group and limit of its original (`app.jobs.get(id).replay_of`). It has no unique key, no time
        limit for its start, and no cursor. `args` and `kwargs` change the arguments of a single job, each as
        a whole. With a `rate`, as in "10/s", the replays are due one after the other. A `dry_run` counts,
        shows the first few, and writes nothing.

        Jobs that were replayed before, and replays, are left out unless `again` is true. Among named ids
        only jobs that were replayed before are left out. Steps of flows are left out, and refused by id. The
        work goes in batches of 500, each in a transaction of its own. After each, `progress` gets the number
        of replays so far, and of all. A repeated call goes on where an interrupted one ended. Raises
        `JobNotFoundError` for an id that is kept no more. Raises `ConfigurationError` for a job that has not
        ended, and where all named jobs have been replayed already. Both come before anything is written.

        >>> app.jobs.replay(42, kwargs={"copy": True}).jobs  # doctest: +SKIP
        {42: 97}
        >>> app.jobs.replay(task="shop.send_receipt", since="2h", rate="10/s").number  # doctest: +SKIP
        311
        """
        from sqlq.admin.replay import Replays

        replays = Replays(self._database, self._tasks, self._events, self._stamps)
        return replays.replay(self.ids_of(ids), **options)

    areplay = for_asyncio(replay)

    # -- delete ----------------------------------------------------------------------------------------------

    @audited("delete")
    def delete(
        self,
        ids: AnyJobs = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        all: bool = False,
    ) -> builtins.list[int]:
        """Delete failed jobs for good and return their ids. By ids, task, queue or group, or `all=True`."""
        selections = _selections(self.ids_of(ids), task, queue, group, all)
        self._database.require_tables()
        deleted: builtins.list[int] = []
        for chosen in selections:
            while batch := self._database.run(partial(pruning.forget_failed, chosen=chosen)):
                deleted += unblocked_after(self._database, batch)
        return deleted

    @audited("prune")
    def prune(self, *, finished: Duration | None = None, failed: Duration | None = None) -> Pruned:
        """Delete jobs that finished or were cancelled longer ago than `finished`, and jobs that failed longer
        ago than `failed`; return how many of each. Workers prune finished jobs by themselves, see
        `App(retention=…)`. Jobs with a `retention` of their own are left alone: workers delete them,
        failed ones too, when it is over.

        >>> app.jobs.prune(finished="7d", failed="30d")  # doctest: +SKIP
        Pruned(finished=1200, failed=3)
        """
        finished_ms = None if finished is None else milliseconds(finished, "finished")
        failed_ms = None if failed is None else milliseconds(failed, "failed")
        if finished_ms is None and failed_ms is None:
            raise ConfigurationError(
                'say what to prune: finished jobs, failed jobs or both, each with an age such as "7d"'
            )
        self._database.require_tables()
        gone = Pruned(0, 0)
        if finished_ms is not None:
            gone = gone._replace(finished=self._prune(finished_ms))
        if failed_ms is not None:
            gone = gone._replace(failed=self._prune(failed_ms, failed=True))
        return gone

    def _prune(self, older_than_ms: int, *, failed: bool = False) -> int:
        work = partial(pruning.prune, older_than_ms=older_than_ms, limit=lookup.BATCH, failed=failed)
        return self._to_the_end(work, lookup.BATCH)

    def ids_of(self, jobs: Any) -> Any:
        """Return ids in place of the answers of `enqueue`. Raises `JobNotFoundError` for a job that is not
        there, as after a rollback."""
        if isinstance(jobs, Handle):
            return self.ids_of([jobs])[0]
        if isinstance(jobs, (str, Mapping)) or not isinstance(jobs, Iterable):
            return jobs  # which is refused
        jobs = builtins.list(jobs)
        handles = [job for job in jobs if isinstance(job, Handle)]
        if handles:
            with self._read() as conn:
                found = look(conn, {job.id: False for job in handles})
            for job in handles:
                seen = found.get(job.id)
                job.require_own(None if seen is None else seen.created)
                if seen is None:
                    raise no_job(job.id)
        return [id_of(job) for job in jobs]


def move_back(database: Database, selections: Iterable[Selection]) -> MovedBack:
    """Move the failed jobs that are selected back to be run again."""
    done = MovedBack([], [])
    for chosen in selections:
        last = 0
        while True:
            moved, held = database.run(partial(retry.retry_failed, chosen=chosen, after_id=last))
            if not moved and not held:
                break
            done.moved.extend(moved)
            done.held.extend(held)
            last = max(moved + held)
    return done


def checked_state(state: str) -> State:
    if state not in builtins.list(State):
        raise ConfigurationError(f"state is {state!r}: it is one of {', '.join(State)}")
    return State(state)


def _searched(chosen: Search) -> Selection:
    check_names(chosen.get("task"), chosen.get("queue"), chosen.get("group"))
    for name, moment in (("since", chosen.get("since")), ("until", chosen.get("until"))):
        if moment is not None:
            aware(moment, name)
    return Selection(**chosen)


def _selections(
    ids: Sequence[int],
    task: str | None,
    queue: str | None,
    group: str | None,
    all: bool,
    what: str = "failed jobs",
) -> Sequence[Selection]:
    if isinstance(ids, (str, int)):
        raise ConfigurationError(f"ids is {ids!r}: give a list, as in [42, 43]")
    check_names(task, queue, group)
    given = bool(ids) or any(value is not None for value in (task, queue, group))
    if not given and not all:
        raise ConfigurationError(
            f"name the {what} that are meant: by id, task, queue or group, or all of them"
        )
    if given and all:
        raise ConfigurationError(
            f"all {what} are meant, but ids, a task, a queue or a group are named too: give one of the two"
        )
    return portions(sorted({id_of(id) for id in ids}), task, queue, group)


def no_job(id: int) -> JobNotFoundError:
    return JobNotFoundError(
        f"there is no job {id}: it never was, or finished longer ago than finished jobs are kept"
    )


def _no_job_here(conn: Connection, id: int, schema: str | None) -> JobNotFoundError:
    """Return the error of an id that no table has, with the reason as far as the newest id shows it."""
    if id not in IDS:
        return JobNotFoundError(f"there is no job {id}: the id of a job is a whole number from 1 on")
    last = dialect_of(conn).last_id(conn)
    if last is None:
        return no_job(id)
    if id <= last:
        return JobNotFoundError(
            f"there is no job {id}: it ended and is kept no more, it was deleted, or its transaction has not "
            "committed, or was rolled back"
        )
    given = f"the newest id given there is {last}" if last else "no job was ever enqueued there"
    return JobNotFoundError(
        f"there is no job {id} in {version.database(conn, schema)}: {given}, so look in another database or "
        "schema"
    )


def enqueued(conn: Connection, task: str, schema: str | None, seal: Encryption | None) -> Iterator[Any]:
    """Yield the jobs of a task that a transaction sees, the oldest first.

    Each is id, task, queue, payload, priority and unique key. `seal` decrypts the payloads that it can.
    """
    version.require(conn, schema)
    with in_schema(conn, schema):
        rows = lookup.enqueued(conn, task)
    for id, name, queue, payload, *rest in rows:
        if seal is not None:
            with suppress(SealError):
                payload = seal.opened("payload", name, queue, payload)
        yield id, name, queue, payload, *rest
