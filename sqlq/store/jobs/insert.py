"""Inserts jobs, on a connection of a caller's or of sqlq's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, bindparam, select

from sqlq.database.compiled import Compiled
from sqlq.database.dialect import schema_of
from sqlq.database.dialects import DIALECTS, dialect_of
from sqlq.model.job import Job, NewJob, State
from sqlq.schema.tables import TOKEN_SCHEMA, jobs
from sqlq.schema.types import milliseconds_of
from sqlq.store.jobs import unique
from sqlq.store.jobs.rows import (
    NEW_STATE,
    computed,
    driver_row_of,
    insert_of_many,
    is_delayed,
    is_due_at_once,
    parameters_of,
    said_by,
    slices,
    texts_of,
)
from sqlq.store.jobs.unique import Conflict, conflict_of, insert_keyed, inserting
from sqlq.store.limits import wakes

# -- insert --------------------------------------------------------------------------------------------------


def insert(conn: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Insert jobs on a caller's connection or one of sqlq's and return them in the order given.

    Runs inside the caller's transaction. A job whose unique key is
    live is not inserted; the live one is returned with `created` False. This raises nothing that would abort
    the transaction.
    """
    if any(job.limit_key is not None for job in new):
        unique.require_read_committed(conn, new)
        wakes.write(conn, wakes.of(new))  # guard: a-limited-job-is-looked-at
    elif len(new) == 1 and new[0].unique_key is None:
        statement = insert_statement(new[0], conn.dialect, schema_of(conn))
        return [inserted(new[0], conn.exec_driver_sql(*statement).one())]
    keyed = [i for i, job in enumerate(new) if job.unique_key is not None]
    if keyed:
        unique.require_read_committed(conn, (new[i] for i in keyed))
    plain = [job for job in new if job.unique_key is None]
    parts = (
        part for some in slices(plain, _ROWS_AT_ONCE) for part in dialect_of(conn).portions(some, texts_of)
    )
    done = iter([job for part in parts for job in _insert_plain(conn, part)])
    found = insert_keyed(conn, new, keyed) if keyed else {}
    return [found[i] if i in found else next(done) for i in range(len(new))]


def _insert_plain(conn: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Insert jobs without unique keys, by one statement."""
    statement, parameters = insert_of_many(dialect_of(conn), new)
    # ids rise in the order of the rows: the statement sorts them before it numbers them
    rows = sorted(conn.execute(statement, parameters).all(), key=itemgetter(0))
    if len(rows[0]) == 1:  # all are due at once
        return [_job(job, id, State.AVAILABLE) for job, (id,) in zip(new, rows, strict=True)]
    return [_job(job, id, state) for job, (id, state) in zip(new, rows, strict=True)]


def created(conn: Any, ids: Sequence[int]) -> dict[int, int]:
    """Return the creation times of jobs, as SQLite stores them."""
    asked = ({"ids": list(part)} for part in slices(ids, _ROWS_AT_ONCE))
    return {id: milliseconds_of(at) for each in asked for id, at in conn.execute(_CREATED, each)}


_CREATED = select(jobs.c.id, jobs.c.created_at).where(jobs.c.id.in_(bindparam("ids", expanding=True)))


def insert_statement(job: NewJob, dialect: Any, schema: str | None) -> tuple[str, Any]:
    """Return the statement that inserts one job without a unique key, and its parameters, as the driver takes
    them. Pass the returned row to `inserted`."""
    said = said_by(job)
    compiled = _compiled(dialect, schema, said)
    return compiled.statement, compiled.parameters(driver_row_of(job, said, dialect))


def inserted(job: NewJob, row: Sequence[Any]) -> Job:
    """Return the job from the row that an `insert_statement` returned."""
    return _job(job, row[0], State.AVAILABLE if is_due_at_once(job) else row[1])


def foreign_statement(job: NewJob, kind: str, style: str, schema: str | None) -> tuple[str, Any]:
    """Return a statement that inserts one job, and its parameters, for a driver of any kind whose parameters
    are in this style. It returns the job's id, or where a live job holds the unique key no row, on MariaDB
    that job's id. Without a schema the table is found by the connection's search_path."""
    said = said_by(job)
    keyed = job.unique_key is not None
    dialect, compiled = _compiled_for_others(kind, style, schema, said, keyed, conflict_of(job))
    return compiled.statement, compiled.parameters(driver_row_of(job, said, dialect))


@lru_cache(maxsize=256)
def _compiled_for_others(
    kind: str, style: Any, schema: str | None, said: tuple[str, ...], keyed: bool, conflict: Conflict | None
) -> tuple[Any, Compiled]:
    found = DIALECTS[kind]
    dialect = found.for_parameters(style)
    if keyed:
        statement = found.with_returning(inserting(found, said, conflict, ()), jobs.c.id)
    else:
        statement = found.insert(jobs, computed(said), returning=(jobs.c.id,))
    compiled = Compiled.of(statement, dialect, schema or TOKEN_SCHEMA, parameters_of(said))
    return dialect, compiled._replace(statement=compiled.statement.replace(f"{TOKEN_SCHEMA}.", ""))


@lru_cache(maxsize=256)
def _compiled(dialect: Any, schema: str | None, said: tuple[str, ...]) -> Compiled:
    """Return the insert of one job that has these options."""
    found = DIALECTS[dialect.name]
    returned = (jobs.c.id, NEW_STATE) if is_delayed(said) else (jobs.c.id,)
    statement = found.insert(jobs, computed(said), returning=returned)
    return Compiled.of(statement, dialect, schema, parameters_of(said))


def _job(job: NewJob, id: int, state: str) -> Job:
    return Job(id, job.queue, job.task, _STATES[state], True)  # noqa: FBT003 - by name it takes half as long again


_ROWS_AT_ONCE = 1_000
_STATES = {str(state): state for state in State}
