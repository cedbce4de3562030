"""What an operator may do: look at jobs, queues and workers; cancel, pause, prune; move or forget what
failed."""

from __future__ import annotations

import builtins
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection

from sqlq.admin.cancel import Cancellation, Canceller, unblocked_after
from sqlq.config.command_hint import command
from sqlq.config.durations import Duration, milliseconds
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.checks import Rule, checked_name
from sqlq.model.flow import When
from sqlq.model.flow_status import FlowDetails, FlowStatus, StepDetails
from sqlq.model.handle import AnyJob, AnyJobs, Handle, id_of
from sqlq.model.job import JobDetails, State
from sqlq.model.limit import Limit, LimitStatus
from sqlq.payload.encryption import Seal
from sqlq.store.flows import flows as flow_rows
from sqlq.store.flows import unblock
from sqlq.store.health import counts as level_counts
from sqlq.store.health import health
from sqlq.store.health.counts import Vitals, vitals
from sqlq.store.jobs import cancel as cancelling
from sqlq.store.jobs import lookup, retry, settle
from sqlq.store.jobs import prune as pruning
from sqlq.store.jobs.lookup import Failures, Listing, Selection
from sqlq.store.jobs.results import look
from sqlq.store.limits import admit
from sqlq.store.workers import notify
from sqlq.store.workers import pauses as pause_rows
from sqlq.store.workers import workers as workerss
from sqlq.store.workers.pauses import Pauses
from sqlq.store.workers.workers import ALIVE_MS, WORKING, ReservedJob, WorkerRow

LOOKED_AT = 100_000
"""So many of the newest jobs of each table a command looks at, when it searches for some of them."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What a queue holds; `served` says whether a worker that is alive serves it, `oldest_wait_seconds` is
    None when nothing waits. `capped` names the counts that were not brought to an end: there are at least so
    many."""

    queue: str
    available: int
    scheduled: int
    blocked: int
    running: int
    failed: int
    oldest_wait_seconds: float | None
    paused: bool
    served: bool
    capped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker and what it holds; `queues` None means that it serves all. It is taken for `alive` up to 90 s
    after its last heartbeat, which came `silent_seconds` ago by the database's clock. `unstarted` says how
    many jobs it claimed and could not start. `state` is "starting", "idle", "busy", "paused" or "stopping",
    the last four since `state_at` as far as the worker said it itself; or "stuck", since its supervisor noted
    that it gives no sign of life."""

    id: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...] | None
    concurrency: int
    started_at: datetime
    seen_at: datetime
    silent_seconds: float
    alive: bool
    jobs: builtins.list[ReservedJob]
    unstarted: int = 0
    name: str | None = None
    state: str = "idle"
    state_at: datetime | None = None


class Pruned(NamedTuple):
    """How many jobs were deleted."""

    finished: int
    failed: int


class Switched(NamedTuple):
    """What pausing or resuming a queue changed, and whether anything else is known of a queue of that
    name."""

    queue: str
    changed: bool
    known: bool


SKIPPED = "it was skipped by an operator"


class Admin:
    """An operator's view of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- look ------------------------------------------------------------------------------------------------

    def get(self, id: AnyJob) -> JobDetails:
        """Return everything about a job, whatever its state. Raises `JobNotFoundError`."""
        self._database.require_tables()
        number = id_of(id)
        with self._database.read() as conn:
            job = lookup.details(conn, number, self._database.seal)
        lookup.require_own(id, job)
        if job is None:
            raise _no_job(number)
        return job

    def ids_of(self, jobs: Any) -> Any:
        """Return ids in the place of what `enqueue` has answered. Raises `JobNotFoundError` for a job that is
        not there, as after a rollback."""
        if isinstance(jobs, Handle):
            return self.ids_of([jobs])[0]
        if isinstance(jobs, (str, Mapping)) or not isinstance(jobs, Iterable):
            return jobs  # which is refused
        jobs = builtins.list(jobs)
        handles = [job for job in jobs if isinstance(job, Handle)]
        if handles:
            self._database.require_tables()
            with self._database.read() as conn:
                found = look(conn, {job.id: False for job in handles})
            for job in handles:
                seen = found.get(job.id)
                job.require_own(None if seen is None else seen.created)
                if seen is None:
                    raise _no_job(job.id)
        return [id_of(job) for job in jobs]

    def list(
        self, *, state: str | None = None, queue: str | None = None, task: str | None = None, limit: int = 100
    ) -> builtins.list[JobDetails]:
        """Return the newest jobs, of a state, queue or task if given, at most `limit`."""
        return self.listing(state=state, queue=queue, task=task, limit=limit, within=None).jobs

    def listing(
        self,
        *,
        state: str | None = None,
        queue: str | None = None,
        task: str | None = None,
        limit: int = 100,
        within: int | None = LOOKED_AT,
    ) -> Listing:
        """`list`, which looks at no more than the newest `within` jobs of each table, and says whether that
        was enough."""
        if state is not None and state not in builtins.list(State):
            raise ConfigurationError(f"state is {state!r}: it is one of {', '.join(State)}")
        _check_most(limit)
        _check_names(task, queue)
        self._database.require_tables()
        with self._database.read() as conn:
            return lookup.listing(
                conn,
                state=None if state is None else State(state),
                queue=queue,
                task=task,
                limit=limit,
                within=within,
                seal=self._database.seal,
            )

    def failures(
        self, *, task: str | None = None, queue: str | None = None, exact: bool = False
    ) -> tuple[builtins.list[Failures], bool]:
        """Count failed jobs by task and error, the most frequent first, and say whether all were counted:
        unless `exact`, the newest 10,000 are."""
        self._database.require_tables()
        with self._database.read() as conn:
            chosen = Selection(task=task, queue=queue)
            return lookup.failures(conn, chosen, within=None if exact else level_counts.MOST)

    def status(self, *, exact: bool = False) -> builtins.list[QueueStatus]:
        """Return what each queue holds and whether a worker serves it; also queues that are empty but served
        by name.

        A count ends at 10,000, or earlier where there are many queues and priorities, and `capped` names it
        then; with `exact` every job is counted.
        """
        self._database.require_tables()
        with self._database.read() as conn:
            held = level_counts.exact(conn) if exact else level_counts.capped(conn)
            alive = workerss.alive(conn, within_ms=ALIVE_MS)
            paused = pause_rows.paused(conn)
        everything = any(worker.queues is None for worker in alive)
        named = _named(alive)
        found = [QueueStatus(**asdict(stats), served=everything or stats.queue in named) for stats in held]
        empty = (named | paused.keys()) - {s.queue for s in held}
        found += [
            QueueStatus(name, 0, 0, 0, 0, 0, None, paused=name in paused, served=everything or name in named)
            for name in empty
        ]
        return sorted(found, key=lambda s: s.queue)

    def vitals(self) -> Vitals:
        """Return what a scrape of metrics needs beside `status` and `workers`."""
        self._database.require_tables()
        with self._database.read() as conn:
            health.limit_time(conn)
            return vitals(conn)

    def alive(self) -> builtins.list[WorkerRow]:
        """Return the workers that are alive as they have entered themselves, the longest running first."""
        self._database.require_tables()
        with self._database.read() as conn:
            return workerss.alive(conn, within_ms=ALIVE_MS)

    def unknown_queues(self, names: Sequence[str], known: Collection[str]) -> builtins.list[str]:
        """Return which of these queues are not `known`, hold no jobs, and are named by no worker that serves
        other queues than just these."""
        asked = [name for name in names if name not in known]
        if not asked:
            return []
        self._database.require_tables()
        with self._database.read() as conn:
            # workers that were told the very same may have been told the same mistake
            others = [
                worker
                for worker in workerss.alive(conn, within_ms=ALIVE_MS)
                if worker.queues is None or set(json.loads(worker.queues)) != set(names)
            ]
            named = _named(others) | pause_rows.paused(conn).keys()
            return [name for name in asked if name not in named and not cancelling.holds_jobs(conn, name)]

    def workers(self, *, silent: bool = False) -> builtins.list[WorkerStatus]:
        """Return the workers that are alive and what each holds, the longest running first.

        With `silent` also those that neither signed off nor were heard of for up to a day: they died, or are
        cut off.
        """
        self._database.require_tables()
        with self._database.read() as conn:
            entered, held, moment = (
                workerss.entered(conn),
                workerss.reserved(conn),
                workerss.moment(conn),
            )
        found = []
        for row in entered:
            silence = max(0.0, (moment - row.seen_at).total_seconds())
            alive = silence * 1000 <= ALIVE_MS
            if alive or silent:
                queues = None if row.queues is None else tuple(json.loads(row.queues))
                process = (row.id, row.host, row.pid, row.version, queues, row.concurrency)
                seen = (row.started_at, row.seen_at, silence, alive)
                jobs = _held_by(row, held)
                state = row.state if row.state != WORKING else "busy" if jobs else "idle"
                said = (row.unstarted, row.name, state, row.state_at)
                found.append(WorkerStatus(*process, *seen, jobs, *said))
        return found

    # -- mend ------------------------------------------------------------------------------------------------

    def retry_failed(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """Move failed jobs back to be run again with all their attempts, under the same id; return the ids
        moved.

        By ids, task or queue, or `all=True`; ids, task and queue given together must all fit. A job whose
        unique key a live job holds stays failed.
        """
        return self.move_failed_back(ids, task=task, queue=queue, all=all).moved

    def move_failed_back(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> MovedBack:
        """`retry_failed`, and say also which jobs stayed failed because a live job holds their unique key."""
        selections = _selections(self.ids_of(ids), task, queue, all)
        self._database.require_tables()
        return self._move_back(selections)

    def _move_back(self, selections: Iterable[Selection]) -> MovedBack:
        done = MovedBack([], [])
        for chosen in selections:
            last = 0
            while True:
                moved, held = self._database.run(partial(retry.retry_failed, chosen=chosen, after_id=last))
                if not moved and not held:
                    break
                done.moved.extend(moved)
                done.held.extend(held)
                last = max(moved + held)
        return done

    def forget_failed(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """Delete failed jobs for good and return their ids. By ids, task or queue, or `all=True`."""
        selections = _selections(self.ids_of(ids), task, queue, all)
        self._database.require_tables()
        forgotten: builtins.list[int] = []
        for chosen in selections:
            while batch := self._database.run(partial(pruning.forget_failed, chosen=chosen)):
                forgotten += unblocked_after(self._database, batch)
        return forgotten

    # -- limits ----------------------------------------------------------------------------------------------

    def limits(self, prefix: str = "", *, limit: int = 100) -> builtins.list[LimitStatus]:
        """Return the keys of limits that begin so, in their order, with what each allows and holds."""
        _check_most(limit)
        self._database.require_tables()
        with self._database.read() as conn:
            return admit.listing(conn, prefix, limit)

    def set_limit(self, key: str, *, running: int | None = None, rate: str | None = None) -> LimitStatus:
        """Set what a key allows, whatever tasks say, until `clear_limit`. Raises `ConfigurationError` for a
        value out of range, and for another number running where jobs run in order."""
        rule = Limit(checked_name(key, "the key", ConfigurationError), running, rate).rule
        self._database.require_tables()

        def pin(conn: Connection) -> LimitStatus | None:
            known = admit.status(conn, key)
            if known is not None and known.in_order:
                if running not in (None, 1):
                    raise ConfigurationError(
                        f"running is {running}: jobs of the key {key!r} run in order, one at a time; leave "
                        "it out, and set a rate"
                    )
                admit.pin(conn, key, rule._replace(max_running=1, in_order=True, holds=known.holds))
            else:
                admit.pin(conn, key, rule)
            notify.wake_others(conn)
            return admit.status(conn, key)

        found = self._database.run(pin)
        assert found is not None
        return found

    def clear_limit(self, key: str, rule: Rule | None = None) -> LimitStatus:
        """Let tasks say again what a key allows; `rule` is what they say, where that is known. Raises
        `ConfigurationError` for a key that is not known."""
        self._database.require_tables()

        def unpin(conn: Connection) -> LimitStatus | None:
            admit.unpin(conn, key, rule)
            notify.wake_others(conn)
            return admit.status(conn, key)

        with self._database.read() as conn:
            known = admit.status(conn, key)
        found = None if known is None else self._database.run(unpin)
        if found is None:
            lists = command("limit list", self._database.engine.url)
            raise ConfigurationError(f"there is no limit of the key {key!r}: {lists} shows those there are")
        return found

    # -- flows -----------------------------------------------------------------------------------------------

    def flows(self, *, limit: int = 100) -> builtins.list[FlowStatus]:
        """Return the newest flows, and how many steps of each are in which state."""
        _check_most(limit)
        self._database.require_tables()
        with self._database.read() as conn:
            found, counts = flow_rows.newest(conn, limit)
        return [FlowStatus(row.id, row.name, row.created_at, _counted(counts[row.id])) for row in found]

    def flow(self, id: int) -> FlowDetails:
        """Return a flow with all its steps. Raises `JobNotFoundError`."""
        self._database.require_tables()
        with self._database.read() as conn:
            found = flow_rows.rows_of(conn, id)
        if found is None:
            raise JobNotFoundError(f"there is no flow {id}: it never was, or is kept no more")
        row, rows, edges = found
        after: dict[int, dict[int, When]] = {}
        for edge in edges:
            after.setdefault(edge.job_id, {})[edge.depends_on] = edge.on_outcome
        seal = self._database.seal
        steps = tuple(_step(each, after.get(each.id, {}), seal) for each in rows)
        counts = _counted(Counter(each.state for each in rows))
        return FlowDetails(row.id, row.name, row.created_at, counts, steps)

    def cancel_flow(self, id: int, *, force: bool = False) -> dict[int, Cancellation]:
        """Cancel the live steps of a flow, as `cancel` does; what has ended stays. Raises
        `JobNotFoundError`."""
        self._require_flow(id)
        return Canceller(self._database).cancel([Selection(flow_id=id)], force=force)

    def retry_flow(self, id: int) -> builtins.list[int]:
        """Move the failed steps of a flow back to be run again, after which it goes on; return their ids.
        Raises `JobNotFoundError`."""
        self._require_flow(id)
        return self._move_back([Selection(flow_id=id)]).moved

    def skip(self, id: int) -> FlowStatus:
        """Go on as if a step had finished, without a result: one that has failed, or that waits. Return its
        flow.

        What waits for its success runs; what needs its result fails, and says so. Raises `JobNotFoundError`
        for what is no such step, saying what it is.
        """
        found = self.get(id)
        if found.flow_id is None:
            raise JobNotFoundError(
                f"job {id} is a step of no flow: there is nothing that its skip would free"
            )
        if not self._database.run(lambda conn: settle.skip(conn, id, SKIPPED)):
            raise JobNotFoundError(
                f"job {id} is {self.get(id).state}: only a step that waits or has failed can be skipped"
            )
        unblock.after(self._database.for_claims, [id])
        return self.flow(found.flow_id)

    def _require_flow(self, id: int) -> None:
        self._database.require_tables()
        with self._database.read() as conn:
            if not flow_rows.exists(conn, id):
                raise JobNotFoundError(f"there is no flow {id}: it never was, or is kept no more")

    # -- end -------------------------------------------------------------------------------------------------

    def cancel(
        self, ids: AnyJobs = (), *, task: str | None = None, queue: str | None = None, force: bool = False
    ) -> dict[int, Cancellation]:
        """Cancel live jobs, by ids, task or queue, and say of each what became of it; the jobs of a task or
        queue are those there were when the call began.

        A waiting job ends here and now. A running one is asked to: its worker sees that within 2 s. With
        `force` it ends at once as well, and whatever its worker still does with it changes nothing in sqlq's
        tables; what the handler does elsewhere cannot be stopped.
        """
        selections = _selections(self.ids_of(ids), task, queue, all=False, what="jobs")
        self._database.require_tables()
        return Canceller(self._database).cancel(selections, force=force)

    def prune(self, *, finished: Duration | None = None, failed: Duration | None = None) -> Pruned:
        """Delete finished (and cancelled) jobs that ended longer ago than `finished`, and failed ones that
        failed longer ago than `failed`; what is not given is left alone, and so are jobs with a retention of
        their own. In batches, the oldest first; return how many went."""
        finished_ms = None if finished is None else milliseconds(finished, "finished")
        failed_ms = None if failed is None else milliseconds(failed, "failed")
        if finished_ms is None and failed_ms is None:
            raise ConfigurationError(
                'say what to prune: finished jobs, failed jobs or both, each with an age such as "7d"'
            )
        self._database.require_tables()
        gone = Pruned(0, 0)
        if finished_ms is not None:
            work = partial(pruning.prune, finished_older_than_ms=finished_ms, limit=lookup.BATCH)
            gone = gone._replace(finished=self._in_batches(work))
        if failed_ms is not None:
            work = partial(pruning.prune_failed, failed_older_than_ms=failed_ms, limit=lookup.BATCH)
            gone = gone._replace(failed=self._in_batches(work))
        return gone

    def _in_batches(self, prune: Callable[[Connection], int]) -> int:
        total = batch = self._database.run(prune)
        while batch >= lookup.BATCH:
            batch = self._database.run(prune)
            total += batch
        return total

    # -- pause -----------------------------------------------------------------------------------------------

    def pause(self, names: Sequence[str], *, lasting: Duration | None = None) -> builtins.list[Switched]:
        """Let no worker claim from these queues until they are resumed, or for as long as `lasting` says,
        whether or not they are known. What is claimed already still runs; enqueueing goes on as ever."""
        return self._switch(names, partial(pause_rows.pause, lasting_ms=_lasting_ms(lasting)))

    def pause_all(self, *, lasting: Duration | None = None) -> bool:
        """Let no worker claim anything, from queues made later neither, until `resume_all` or for so long;
        return whether that was not so before. Workers see it within 2 s."""
        ms = _lasting_ms(lasting)
        self._database.require_tables()
        return self._database.run(partial(pause_rows.pause, name=pause_rows.ALL, lasting_ms=ms))

    def resume_all(self) -> bool:
        """End the pause of all queues; those paused by name stay so. Return whether there was one."""
        self._database.require_tables()
        return self._database.run(partial(pause_rows.resume, name=pause_rows.ALL))

    def pauses(self) -> Pauses:
        """Return what is paused, since when and until when."""
        self._database.require_tables()
        with self._database.read() as conn:
            return pause_rows.paused(conn)

    def resume(self, names: Sequence[str]) -> builtins.list[Switched]:
        """Let workers claim from these queues again, and wake those that are idle."""
        return self._switch(names, pause_rows.resume)

    def _switch(
        self, names: Sequence[str], switch: Callable[[Connection, str], bool]
    ) -> builtins.list[Switched]:
        if isinstance(names, str):
            raise ConfigurationError(f"the queues are the text {names!r}: give a list, as in [{names!r}]")
        wanted = sorted({checked_name(name, "queue", ConfigurationError) for name in names})
        if not wanted:
            raise ConfigurationError("name at least one queue")
        self._database.require_tables()
        with self._database.read() as conn:
            alive = workerss.alive(conn, within_ms=ALIVE_MS)
            known = _named(alive) | pause_rows.paused(conn).keys()
            known |= {name for name in wanted if name not in known and cancelling.holds_jobs(conn, name)}

        def switch_all(conn: Connection) -> builtins.list[Switched]:
            # in one order everywhere, so that two operators cannot deadlock
            return [Switched(name, switch(conn, name), name in known) for name in wanted]

        return self._database.run(switch_all)


def _lasting_ms(lasting: Duration | None) -> int | None:
    if lasting is None:
        return None
    ms = milliseconds(lasting, "lasting")
    if ms == 0:
        raise ConfigurationError("lasting is zero: a pause has a length, or leave it out for one without end")
    return ms


class MovedBack(NamedTuple):
    """Which failed jobs were moved back, and which stayed because a live job holds their unique key."""

    moved: builtins.list[int]
    held: builtins.list[int]


def _counted(counts: Mapping[str, int]) -> dict[State, int]:
    return {state: counts[state.value] for state in State if counts.get(state.value)}


def _step(row: Any, after: Mapping[int, When], seal: Seal | None) -> StepDetails:
    error = row.reason if row.exception is None else f"{row.exception}: {row.message or ''}"
    shown = lookup.result_shown
    result = None if row.result is None else shown(seal, row.task, row.queue, row.result)
    state = State(row.state)
    return StepDetails(row.id, row.task, row.queue, row.label, state, row.attempts, after, result, error)


def _held_by(worker: WorkerRow, reserved: Iterable[ReservedJob]) -> builtins.list[ReservedJob]:
    waiting = set(workerss.held_in(worker.held_jobs))
    return [job._replace(started=job.id not in waiting) for job in reserved if job.owner == worker.id]


def _named(alive: Sequence[WorkerRow]) -> set[str]:
    """Return the queues that workers serve by name."""
    return {name for worker in alive if worker.queues is not None for name in json.loads(worker.queues)}


def _check_most(limit: int) -> None:
    if not isinstance(limit, int) or not 1 <= limit <= 100_000:
        raise ConfigurationError(f"limit is {limit!r}: it must be a whole number from 1 to 100,000")


def _check_names(task: str | None, queue: str | None) -> None:
    for name, value in (("task", task), ("queue", queue)):
        if value is not None:
            checked_name(value, name, ConfigurationError)


def _selections(
    ids: Sequence[int], task: str | None, queue: str | None, all: bool, what: str = "failed jobs"
) -> Iterator[Selection]:
    """Return what is meant, in portions: a statement takes some ten thousand parameters at most."""
    if isinstance(ids, (str, int)):
        raise ConfigurationError(f"ids is {ids!r}: give a list, as in [42, 43]")
    _check_names(task, queue)
    given = bool(ids) or task is not None or queue is not None
    if not given and not all:
        ways = (
            "by id, by task, by queue, or all of them"
            if what == "failed jobs"
            else "by id, by task or by queue"
        )
        raise ConfigurationError(f"name the {what} that are meant: {ways}")
    if given and all:
        raise ConfigurationError(
            "all failed jobs are meant, but ids, a task or a queue are named too: give one of the two"
        )
    wanted = sorted({id_of(id) for id in ids})
    if not wanted:
        return iter([Selection((), task, queue)])
    return (
        Selection(tuple(wanted[i : i + lookup.BATCH]), task, queue)
        for i in range(0, len(wanted), lookup.BATCH)
    )


def _no_job(id: int) -> JobNotFoundError:
    return JobNotFoundError(
        f"there is no job {id}: it never was, or finished longer ago than finished jobs are kept"
    )
