"""Every statement about schedules: ticks, declarations of the code, and those of operators.

A tick is one transaction. It locks the rows of due schedules, inserts their jobs, and writes the time up to
which each is decided. So each run is decided once: with any number of tickers and ticks, and after a crash at
any point. The next runs follow from `last_at`. `next_at` is only the time of the next look; it is NULL for a
paused, retired or ended schedule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, delete, literal, select, update

from sqlq.config.constants import LAST_ID
from sqlq.database.batch import Expression, Key, inserted
from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.errors import ConfigurationError, ScheduleNotFoundError
from sqlq.model import schedule
from sqlq.model.job import Job, NewJob
from sqlq.model.schedule import MENDED_LOOK, Declared, Schedule, Turn, options_text, template
from sqlq.payload.codec import decoded
from sqlq.payload.encryption import Encryption, readable
from sqlq.schema.tables import MAX_COUNT, jobs, schedules
from sqlq.schema.types import Moment, ago, epoch_ms, now
from sqlq.store.apart import REFUSED, apart, lately, noted
from sqlq.store.jobs.insert import insert as insert_jobs
from sqlq.store.workers import notify
from sqlq.store.workers.workers import moment

BATCH = 200
"""Schedules in one transaction: their rows stay locked until it ends."""
JOB_LIMIT = 2_000
"""At this number of jobs a transaction takes no further schedule."""
RECENT = 10
"""The number of last jobs that a schedule's row names."""
SIBLINGS = timedelta(seconds=1)
"""Workers whose starts lie no further apart may belong to one deploy: each computes its start by its own
round trip."""
ERROR_CHARACTERS = 2_000

_table = schedules.c
_SCHEDULES = select(schedules, now().label("moment")).order_by(_table.name)
"""All schedules, each with the time of the database's clock."""


# -- ticks ---------------------------------------------------------------------------------------------------

DUE = "of a schedule is due"
_NOT_REFUSED = _table.name.not_in(REFUSED)
_NEXT_MS = (
    select(epoch_ms(_table.next_at) - epoch_ms(now()))
    .where(_table.next_at.is_not(None), _NOT_REFUSED)
    .order_by(_table.next_at)
    .limit(1)
)


def next_in(database: Database) -> float | None:
    """Return the milliseconds until the next schedule is due (0 or less: it is due); None where there is
    none. Reads one row of an index, and waits for no writer."""
    with database.read() as conn:
        wait_ms = conn.scalar(_NEXT_MS, lately(conn, DUE))
    return None if wait_ms is None else float(wait_ms)


class Ticked(NamedTuple):
    """The effect of a tick: the jobs it enqueued, the errors of schedules that failed, and the number of
    schedules seen."""

    jobs: list[tuple[NewJob, Job]]
    errors: dict[str, str]
    seen: int


def tick(database: Database, *, at: datetime | None = None) -> Ticked:
    """Decide the runs of at most a batch of due schedules, in one transaction. In tests `at` replaces the
    database's clock.

    A job that cannot be enqueued does not stop the others; the row of its schedule has the error.
    """
    return database.run(partial(_tick, at=at))


def _tick(conn: Connection, *, at: datetime | None) -> Ticked:
    clock: Expression = now() if at is None else literal(at, Moment)
    due = (
        select(schedules, clock.label("moment"))
        .where(_table.next_at <= clock, _NOT_REFUSED)  # guard: ticks-are-due
        .order_by(_table.next_at, _table.name)
        .limit(BATCH)
    )
    dialect = dialect_of(conn)
    rows = dialect.sql.lock(conn, due, lately(conn, DUE))  # guard: tick-locks-its-schedules
    alive = _alive(conn, rows)
    turns: list[_Done] = []
    for row in rows:
        turns.append(_decided(row, alive, in_test=at is not None))
        if sum(len(done.new) for done in turns) >= JOB_LIMIT:
            break
    enqueued: _Pairs = []

    def write(some: Sequence[_Done]) -> None:
        new = [job for done in some for job in done.new]
        pairs = list(zip(new, insert_jobs(conn, new), strict=True))
        _write(conn, some, pairs)  # guard: tick-commits-with-its-jobs
        enqueued.extend(pair for pair in pairs if pair[1].created)

    def fail(one: _Done, error: Exception) -> None:
        one.fail(error)
        note = noted(conn, DUE)
        apart([one], write, lambda one, error: note((one.row.name,), error), dialect, within=conn)

    # also for an error of our own about a row that SQL has written
    # guard: refused-tick-fails-alone
    apart(turns, write, fail, dialect, within=conn, kinds=(Exception,))
    if enqueued:
        notify.wake_others(conn)  # guard: ticks-wake-workers
    return Ticked(
        enqueued, {done.row.name: done.error for done in turns if done.error is not None}, len(turns)
    )


@dataclass
class _Done:
    """The result of a tick for one schedule."""

    row: Row[Any]
    turn: Turn
    new: list[NewJob]
    error: str | None = None

    def fail(self, error: BaseException) -> None:
        """Decide nothing: the runs are still due when the schedule is mended."""
        self.new = []
        self.error = str(getattr(error, "orig", error)).strip()[:ERROR_CHARACTERS] or type(error).__name__
        self.turn = Turn([], 0, self.row.last_at, self.row.moment + MENDED_LOOK)


def _alive(conn: Connection, rows: Iterable[Row[Any]]) -> set[int]:
    """Return the schedules' last jobs that have not ended; only plans with a rule for overlap are looked
    up."""
    last = [ids[-1] for row in rows if '"overlap"' in row.plan and (ids := recent(row.recent_jobs))]
    return set(conn.scalars(select(jobs.c.id).where(jobs.c.id.in_(last)))) if last else set()


def _decided(row: Row[Any], alive: set[int], *, in_test: bool) -> _Done:
    done = _Done(row, Turn([], 0, row.last_at, None), [])
    try:
        plan = schedule.read(row.plan)
        job = template(row.task, row.queue, row.payload, row.options)
        lives = not alive.isdisjoint(recent(row.recent_jobs)[-1:])
        done.turn = schedule.turn(plan, last_at=row.last_at, now=row.moment, ticks=row.ticks, alive=lives)
        done.new = [_of(row.name, job, at, plan, in_test=in_test) for at in done.turn.runs]
    except Exception as error:  # guard: one-schedule-fails-alone
        done.fail(error)
    return done


def _of(name: str, job: NewJob, at: datetime, plan: Schedule, *, in_test: bool) -> NewJob:
    """Return the job for a run of a schedule. A delay or jitter does not change `scheduled_for`."""
    if in_test:  # its clock is not the database's, by which jobs are claimed
        return replace(job, schedule=name, scheduled_for=at)
    later = timedelta(milliseconds=job.delay_ms)
    if isinstance(plan.jitter, timedelta):
        later += random.random() * plan.jitter
    return replace(job, schedule=name, scheduled_for=at, available_at=at + later, delay_ms=0)


_Pairs = list[tuple[NewJob, Job]]


def _write(conn: Connection, turns: Sequence[_Done], inserted: _Pairs) -> None:
    ids: dict[str, list[int]] = {done.row.name: [] for done in turns}
    for new, job in inserted:
        if job.created:
            ids[str(new.schedule)].append(job.id)
    rows = []
    for done in turns:
        row, created = done.row, ids[done.row.name]
        missed = done.turn.skipped + len(done.new) - len(created)  # a live job held the unique key
        rows.append(
            {
                "of": row.name,
                "last_at": done.turn.last_at,
                "next_at": done.turn.next_at,
                "ticks": min(row.ticks + len(created), MAX_COUNT),
                "skipped": min(row.skipped + missed, MAX_COUNT),
                "recent_jobs": json.dumps([*recent(row.recent_jobs), *created][-RECENT:]),
                "error": done.error,
                "error_at": done.error and row.moment,
            }
        )
    conn.execute(update(schedules).where(_table.name == bindparam("of")), rows)


def recent(text: str) -> list[int]:
    """Return the last jobs in a schedule's row; SQL may have written anything there."""
    ids = decoded(text)
    return [id for id in ids if isinstance(id, int) and 0 < id <= LAST_ID] if isinstance(ids, list) else []


# -- declarations of code ------------------------------------------------------------------------------------


class Followed(NamedTuple):
    """The changes that a deploy made, by names of schedules. `foreign` ones are another service's or were
    added at run time; they stay unchanged."""

    added: list[str]
    changed: list[str]
    retired: list[str]
    foreign: list[str]


def follow(
    database: Database,
    declared: Mapping[str, Declared],
    service: str | None,
    tasks: Collection[str],
    age_ms: Callable[[], float],
) -> Followed:
    """Write the declared schedules, as of the start of their deploy, `age_ms` ago.

    A row that a later deploy has written stays, so that an old worker changes nothing back. A schedule that
    is no longer declared is retired if its row has this service. Without a service its task must also be
    known here. An operator's pause stays in force.
    """

    def write(conn: Connection) -> Followed:
        started = moment(conn) - timedelta(milliseconds=age_ms())
        known = conn.scalars(select(_table.name).where(_table.name.in_(list(declared))))
        done = Followed(sorted(declared.keys() - {*known}), [], [], [])
        for name in done.added:
            _insert(conn, declared[name], service, started, database.encryption)
        # with the rows that another worker has added meanwhile
        query = _SCHEDULES.where(_table.declared_at.is_not(None) | _table.name.in_(list(declared)))
        for row in dialect_of(conn).sql.lock(conn, query, waits=True):
            new = declared.get(row.name)
            if row.declared_at is not None and row.declared_at > started + SIBLINGS:
                continue  # guard: older-deploy-changes-no-schedule
            if new is None:
                is_known = service is not None or row.task in tasks
                # guard: deploy-retires-its-own-schedules
                if row.retired_at is None and row.service == service and is_known:
                    done.retired.append(row.name)
                    _change(conn, row.name, {"retired_at": started, "next_at": None, "declared_at": started})
            elif row.declared_at is None or row.service != service:
                done.foreign.append(row.name)
            else:
                values = _changed(row, new, database.encryption)
                if values:
                    done.changed.append(row.name)
                if values or row.declared_at < started - SIBLINGS:
                    _change(conn, row.name, {**values, "declared_at": max(row.declared_at, started)})
        return done

    return database.run(write)


def _insert(
    conn: Connection, new: Declared, service: str | None, started: datetime, encryption: Encryption | None
) -> None:
    job = new.job if encryption is None else new.job._protected_by(encryption)
    values = {**_job_columns(job), **_start_values(new.plan, moment(conn))}
    values |= {"name": new.name, "service": service, "declared_at": started}
    conn.execute(dialect_of(conn).sql.upsert(schedules, _KEY), values)


def _changed(row: Row[Any], new: Declared, encryption: Encryption | None) -> dict[str, Any]:
    """Return the columns in which the code differs from the row."""
    values = {name: value for name, value in _job_columns(new.job).items() if getattr(row, name) != value}
    if encryption is not None:
        values.pop("payload", None)
        payload, how = readable(encryption, "payload", new.job.task, new.job.queue, row.payload)
        is_stale = payload != new.job.payload or encryption.writes not in (None, how)
        if is_stale:  # guard: a-protected-schedule-stays
            values["payload"] = new.job._protected_by(encryption).payload
    if row.retired_at is not None or row.plan != new.plan.as_text():
        values["retired_at"] = None
        values |= _start_values(new.plan, row.moment, ticks=row.ticks, paused=row.paused_at is not None)
    return values


def _job_columns(job: NewJob) -> dict[str, Any]:
    return {"task": job.task, "queue": job.queue, "payload": job.payload, "options": options_text(job)}


def _start_values(plan: Schedule, here: datetime, *, ticks: int = 0, paused: bool = False) -> dict[str, Any]:
    """Return the columns of a schedule that begins now with this plan; earlier runs count as decided."""
    return {
        "plan": plan.as_text(),
        "last_at": here,
        "next_at": None if paused or schedule.is_spent(plan, ticks) else plan.next(here),
        "error": None,
        "error_at": None,
    }


# -- changes at run time -------------------------------------------------------------------------------------


def add(conn: Any, name: str, plan: Schedule, job: NewJob) -> None:
    """Add a schedule. Raises `ConfigurationError` where one of that name exists, or the plan has no run to
    come. Then nothing is written, and the transaction stays usable."""
    here = moment(conn)
    values = {**_job_columns(job), **_start_values(plan, plan.begins(here)), "name": name}
    if values["next_at"] is None:
        raise ConfigurationError(f"the schedule {name!r} has no moment to come: {plan} is past")
    if not inserted(conn, dialect_of(conn).sql.upsert(schedules, _KEY, returning=(_table.name,)), values):
        raise ConfigurationError(
            f"there is a schedule {name!r} already: remove it, or give this one another name"
        )


def pause(conn: Any, name: str) -> bool:
    """Enqueue nothing for a schedule until it is resumed; return whether it was not paused before."""
    row = get(conn, name, locks=True)
    if row.paused_at is None:
        _change(conn, name, {"paused_at": row.moment, "next_at": None})
    return row.paused_at is None


def resume(conn: Any, name: str) -> bool:
    """Resume a schedule from its next run; return whether it was paused."""
    row = get(conn, name, locks=True)
    if row.paused_at is None:
        return False
    is_retired = row.retired_at is not None
    values = _start_values(schedule.read(row.plan), row.moment, ticks=row.ticks, paused=is_retired)
    _change(conn, name, {**values, "paused_at": None})
    return True


def remove(conn: Any, name: str) -> None:
    """Take a schedule out. Jobs that it has enqueued stay."""
    get(conn, name, locks=True)
    conn.execute(delete(schedules).where(_table.name == name))


def run(conn: Any, name: str) -> Job:
    """Enqueue a job of a schedule now; its regular runs do not change."""
    row = get(conn, name, locks=True)
    new = template(row.task, row.queue, row.payload, row.options)
    (job,) = insert_jobs(conn, [replace(new, schedule=name, scheduled_for=row.moment)])
    if job.created:
        _change(conn, name, {"recent_jobs": json.dumps([*recent(row.recent_jobs), job.id][-RECENT:])})
    return job


_KEY = Key(("name",))


def _change(conn: Any, name: str, values: dict[str, Any]) -> None:
    """Change a schedule whose row this transaction has locked."""
    conn.execute(update(schedules).where(_table.name == name).values(values))


# -- looking -------------------------------------------------------------------------------------------------


def rows(conn: Connection) -> Sequence[Row[Any]]:
    """Return all schedules, ordered by name, each with the time of the database's clock."""
    return conn.execute(_SCHEDULES).all()


def get(conn: Any, name: str, *, locks: bool = False) -> Row[Any]:
    """Return one schedule; with `locks` lock its row. Raises `ScheduleNotFoundError` where there is none of
    that name."""
    query = _SCHEDULES.where(_table.name == name)
    rows: Sequence[Row[Any]] = (
        dialect_of(conn).sql.lock(conn, query, waits=True) if locks else conn.execute(query).all()
    )
    if not rows:
        raise ScheduleNotFoundError(f"there is no schedule {name!r}")
    return rows[0]


LATE_MS = 60_000


def late(conn: Connection) -> list[str]:
    """Return the schedules that have been due for more than a minute, those due longest first."""
    return [*conn.scalars(select(_table.name).where(_table.next_at < ago(LATE_MS)).order_by(_table.next_at))]


def failing(conn: Connection) -> list[tuple[str, str]]:
    """Return the active schedules whose tick failed, each with the error."""
    query = (
        select(_table.name, _table.error)
        .where(_table.retired_at.is_(None), _table.paused_at.is_(None), _table.error.is_not(None))
        .order_by(_table.name)
    )
    return [(name, error) for name, error in conn.execute(query)]


def begin_at(conn: Connection, here: datetime) -> None:
    """Begin all active schedules at this time, for tests with a clock of their own."""
    for row in rows(conn):
        if row.paused_at is None and row.retired_at is None:
            _change(conn, row.name, _start_values(schedule.read(row.plan), here, ticks=row.ticks))
