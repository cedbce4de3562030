"""`app.schedules`: the schedules in the database, to be looked at, added, paused and run at run time."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, TypeVar, Unpack

from sqlalchemy import Connection, Row

from sqlq.admin.facet import Facet, audited, for_asyncio
from sqlq.config.json_text import AsJson
from sqlq.database.database import Database
from sqlq.enqueue.enqueue import Enqueuer
from sqlq.errors import ConfigurationError, SqlqError
from sqlq.model.job import Job, NewJob, State, error_line
from sqlq.model.schedule import Options, Schedule, checked_template, planned, read
from sqlq.payload.codec import decoded
from sqlq.payload.encryption import Encryption, Unopened, readable
from sqlq.store import schedules
from sqlq.store.jobs import lookup
from sqlq.store.schedules import follow

__all__ = ["LastJob", "ScheduleDetails", "Schedules", "follow", "tick_all"]
T = TypeVar("T")

UPCOMING = 10


@dataclass(frozen=True, slots=True)
class LastJob:
    """A job that a schedule has enqueued: its state, the time of its run, and its error if it has failed.
    `state` is "gone" where it is kept no longer."""

    COLUMNS = ("id", "state", "for=scheduled_for", "error")
    id: int
    state: str
    scheduled_for: datetime | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleDetails(AsJson):
    """A schedule as it is in the database.

    `state` is "active", "failing", "paused", "retired" or "ended". A failing schedule could not be ticked:
    `error` has the reason. No code declares a retired one any more. An ended one has no further run.

    `ticks` counts the jobs enqueued for runs, `skipped` the runs without a job. Those were missed, or a job
    of the schedule had not ended at their time. After an outage up to 1,000 are counted.
    """

    COLUMNS = (
        *("name", "state", "when=plan", "task", "next=next_at"),
        *("ticks", "skipped", "last job=last_job"),
    )
    name: str
    state: str
    plan: Schedule | None
    """When it is due; None where what is in the database cannot be read."""
    task: str
    queue: str
    payload: str
    """Its arguments as JSON; if these keys do not open them, the reason."""
    service: str | None
    is_declared: bool
    """Whether code declares it; else it was added at run time."""
    ticks: int
    skipped: int
    last_at: datetime
    """All runs up to this time are decided."""
    upcoming: tuple[datetime, ...]
    """The times of the next runs, at most ten."""
    jobs: tuple[LastJob, ...]
    """The last jobs, the newest first: one in a list, up to ten of `get`."""
    error: str | None
    error_at: datetime | None
    paused_at: datetime | None
    retired_at: datetime | None
    created_at: datetime

    @property
    def next_at(self) -> datetime | None:
        return self.upcoming[0] if self.upcoming else None

    @property
    def last_job(self) -> str | None:
        """The last job, or the reason why the schedule fails."""
        if self.error is not None:
            return f"error: {self.error}"
        for job in self.jobs[:1]:
            return f"{job.id} {job.state}" + (f": {job.error}" if job.error else "")
        return None

    def as_json(self) -> dict[str, Any]:
        plan = self.plan and str(self.plan)
        return {**asdict(self), "plan": plan, "payload": decoded(self.payload)}


class Schedules(Facet):
    """The schedules of a database: `app.schedules`.

    Each call writes at once, in a transaction of its own, or with `session` in the caller's. `session` is of
    any kind that `enqueue` takes. `aadd`, `apause` and so on are the same for asynchronous code, with a
    session that `App.aenqueue` takes, or in a thread. Workers see a change within two seconds.
    Raises `ConfigurationError`, before anything is written, for a schedule that is not there and for what
    cannot be.
    """

    def __init__(
        self, database: Database, enqueuer: Enqueuer, prepare: Callable[[NewJob[Any]], NewJob[Any]]
    ) -> None:
        """`prepare` adds to a job what its queue and task define."""
        super().__init__(database)
        self._enqueuer = enqueuer
        self._prepare = prepare

    # -- write -----------------------------------------------------------------------------------------------

    @audited("schedules add")
    def add(
        self,
        name: str,
        job: NewJob[Any],
        when: Schedule | str | None = None,
        /,
        *,
        session: Any = None,
        **options: Unpack[Options],
    ) -> None:
        """Add a schedule that stays until it is removed, whatever code declares. The options are those of
        `sqlq.Schedule`. Refuses a name that is taken, and a schedule without a run to come.

        >>> app.schedules.add("report 7", report.new(7), cron="0 3 * * *")  # doctest: +SKIP
        """
        plan = planned(when, **options)
        template = self._prepare(checked_template(job, name))
        if (encryption := self._database.encryption) is not None:
            template = template._protected_by(encryption)  # guard: schedules-are-protected
        self._do(session, lambda conn: schedules.add(conn, name, plan, template))

    @audited("schedules pause")
    def pause(self, name: str, *, session: Any = None) -> bool:
        """Enqueue nothing for a schedule until it is resumed, across deploys, too; return whether it was not
        paused before. Runs that pass meanwhile are not caught up."""
        return self._do(session, lambda conn: schedules.pause(conn, name))

    @audited("schedules resume")
    def resume(self, name: str, *, session: Any = None) -> bool:
        """Go on with a schedule, from its next run; return whether it was paused."""
        return self._do(session, lambda conn: schedules.resume(conn, name))

    @audited("schedules remove")
    def remove(self, name: str, *, session: Any = None) -> None:
        """Take a schedule out; jobs that it has enqueued stay. One that code declares is added again by the
        next worker that starts with that code: `pause` holds."""
        self._do(session, lambda conn: schedules.remove(conn, name))

    @audited("schedules run")
    def run(self, name: str, *, session: Any = None) -> Job[Any]:
        """Enqueue a job of a schedule now, beside its planned runs; also while it is paused or retired."""
        return self._do(session, lambda conn: schedules.run(conn, name))

    def _do(self, session: Any, work: Callable[[Any], T]) -> T:
        if session is not None:
            return self._enqueuer.join(session, work)
        self._database.require_tables()
        return self._database.run(work)

    # -- look ------------------------------------------------------------------------------------------------

    def get(self, name: str) -> ScheduleDetails:
        """Return a schedule with its next ten runs and its last ten jobs."""
        with self._read() as conn:
            row = schedules.get(conn, name)
            ids = schedules.recent(row.recent_jobs)
            return _details(row, ids, _last_jobs(conn, ids), self._database.encryption)

    def list(self) -> builtins.list[ScheduleDetails]:
        """Return all schedules by name, each with its next ten runs and its last job."""
        with self._read() as conn:
            rows = schedules.rows(conn)
            last = {row.name: schedules.recent(row.recent_jobs)[-1:] for row in rows}
            last_jobs = _last_jobs(conn, [id for ids in last.values() for id in ids])
        return [_details(row, last[row.name], last_jobs, self._database.encryption) for row in rows]

    # -- the same for asynchronous code ----------------------------------------------------------------------

    aadd = for_asyncio(add)
    apause = for_asyncio(pause)
    aresume = for_asyncio(resume)
    aremove = for_asyncio(remove)
    arun = for_asyncio(run)
    aget = for_asyncio(get)
    alist = for_asyncio(list)


def _last_jobs(conn: Connection, ids: Sequence[int]) -> dict[int, LastJob]:
    """Return those of the last jobs of schedules that are kept."""
    last_jobs: dict[int, LastJob] = {}
    for job in lookup.of_ids(conn, ids):
        error = job.reason
        if job.state is State.FAILED:
            error = error_line(job.reason, job.exception, job.message)
        last_jobs[job.id] = LastJob(job.id, job.state.value, job.scheduled_for, error)
    return last_jobs


def _details(
    row: Row[Any], ids: Sequence[int], last_jobs: dict[int, LastJob], encryption: Encryption | None
) -> ScheduleDetails:
    payload, _ = readable(encryption, "payload", row.task, row.queue, row.payload)
    try:
        plan, error = read(row.plan), row.error
    except ConfigurationError as refused:
        plan, error = None, str(refused)
    upcoming: tuple[datetime, ...] = ()
    if plan is not None and row.paused_at is None and row.retired_at is None:
        left = UPCOMING if plan.repeats is None else max(0, plan.repeats - row.ticks)
        upcoming = tuple(islice(plan.moments(max(row.last_at, row.moment)), min(left, UPCOMING)))
    if row.retired_at is not None:
        state = "retired"
    elif row.paused_at is not None:
        state = "paused"
    elif error is not None:
        state = "failing"
    else:
        state = "active" if upcoming or row.next_at is not None else "ended"
    return ScheduleDetails(
        **{name: getattr(row, name) for name in _COLUMNS},
        state=state,
        plan=plan,
        payload=payload.why if isinstance(payload, Unopened) else payload,
        is_declared=row.declared_at is not None,
        upcoming=upcoming,
        jobs=tuple(last_jobs.get(id, LastJob(id, "gone")) for id in reversed(ids)),
        error=error,
    )


_COLUMNS = (
    *("name", "task", "queue", "service", "ticks", "skipped"),
    *("last_at", "error_at", "paused_at", "retired_at", "created_at"),
)
"""The fields of a schedule that its row has as they are."""


def tick_all(database: Database, *, at: datetime, since: datetime | None = None) -> builtins.list[Job[Any]]:
    """Enqueue all jobs that schedules have due at a time, and return them in the order of their runs.

    With `since` all schedules begin then. Raises `SqlqError` for a schedule that cannot be ticked.
    """
    if since is not None:
        database.run(partial(schedules.begin_at, here=since))
    jobs = []
    while (done := schedules.tick(database, at=at)).seen:
        jobs += done.jobs
        for name, error in done.errors.items():
            raise SqlqError(f"the schedule {name!r} could not be ticked: {error}")
    jobs.sort(key=lambda pair: (pair[0].scheduled_for, pair[1].id))
    return [job for _, job in jobs]
