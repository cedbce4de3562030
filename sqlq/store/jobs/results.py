"""Results of jobs for the processes that wait for them: one statement reads all of them.

Where a process does not see commits by itself, it sends or receives two sorts of notifications. A waiting
process sends the ids of its jobs on the workers' channel. A worker that has written the end of such a job
sends its id on a channel of its own. Neither is needed for correctness, since the waiting process polls in
any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Integer, Text, case, cast, null, select, text, union_all

from sqlq.database.batch import Batch
from sqlq.database.compiled import Compiled
from sqlq.database.database import Database
from sqlq.database.dialect import Dialect, schema_of
from sqlq.database.dialects import DIALECTS, dialect_of
from sqlq.database.notifications import ANY_JOB
from sqlq.model.job import State
from sqlq.schema.tables import jobs
from sqlq.store.jobs.lookup import possible
from sqlq.store.jobs.rows import OVER, TABLES, slices
from sqlq.store.workers import notify

AT_ONCE = 10_000
"""The most jobs that one statement reads."""
WAITS = "waits "
"""The prefix of a waiting process's notification; one that wakes workers is empty."""
MOST_NAMED = 2_000
_LONGEST = 7_500
"""Bytes of a notification; PostgreSQL takes just under 8,000."""


class Seen(NamedTuple):
    """The state of a job as one look found it. `result` is JSON text. A job that has not ended has only its
    state."""

    id: int
    state: State
    queue: str
    task: str
    attempts: int
    result: str | None = None
    reason: str | None = None
    exception: str | None = None
    message: str | None = None
    traceback: str | None = None
    created: int | None = None
    """When it was created, as SQLite has it, which may give its id to another job."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, with any outcome."""
        return self.state in OVER


def look(conn: Connection, wanted: Mapping[int, bool]) -> dict[int, Seen]:
    """Return the states of jobs, by their ids. All come from one snapshot, in which each job is in one table
    and never between two. Unknown jobs are missing. True in `wanted` requests more than the state."""
    compiled = _compiled(conn.dialect, schema_of(conn))
    return _seen(wanted, dialect_of(conn), compiled, lambda *asked: conn.exec_driver_sql(*asked).all())


def look_alone(database: Database, wanted: Mapping[int, bool]) -> dict[int, Seen]:
    """Do the same in a transaction of its own, without SQLAlchemy."""
    compiled = _compiled(database.engine.dialect, database.schema)

    def asks(statement: str, parameters: Any) -> list[Sequence[Any]]:
        return database.run_raw(lambda ask: ask(statement, parameters), reads=True)

    return _seen(wanted, database.dialect, compiled, asks)


def _seen(
    wanted: Mapping[int, bool], dialect: Dialect, compiled: Compiled, ask: Callable[[str, Any], Sequence[Any]]
) -> dict[int, Seen]:
    found: dict[int, Seen] = {}
    for some in slices(possible(wanted), AT_ONCE):
        rows = [(id, int(wanted[id])) for id in some]
        given = compiled.parameters(dialect.batch_parameters(_WANTED, rows))
        for row in ask(compiled.statement, given):
            found[row[0]] = Seen(row[0], State(row[1]), *row[2:])
    return found


@lru_cache(maxsize=16)
def _compiled(dialect: Any, schema: str | None) -> Compiled:
    kind = DIALECTS[dialect.name]
    return Compiled.of(_look(kind), dialect, schema, list(kind.batch_parameters(_WANTED, [(0, 0)])))


_WANTED = Batch(id=BigInteger, whole=Integer)
_SAID = ("result", "reason", "exception", "message", "traceback")


@cache
def _look(dialect: Dialect) -> Any:
    rows = dialect.batch_table(_WANTED)
    whole = rows.c.whole == 1
    sources = []
    for table, state in TABLES:
        said = [
            case((whole, table.c[name])) if name in table.c and table is not jobs else cast(null(), Text)
            for name in _SAID
        ]
        columns = (table.c.id, cast(state, Text), table.c.queue, table.c.task, table.c.attempts, *said)
        if dialect.one_writer:
            columns = (*columns, table.c.created_at)
        sources.append(select(*columns).join_from(rows, table, table.c.id == rows.c.id))
    return union_all(*sources)


# -- who waits, and who answers ------------------------------------------------------------------------------


def listen(conn: Connection) -> None:
    """Subscribe this connection to the ends of jobs for which a process waits (PostgreSQL)."""
    conn.exec_driver_sql(f'LISTEN "{_channel(schema_of(conn))}"')


def ask(conn: Connection, ids: Iterable[int]) -> None:
    """Notify workers that this process waits for these jobs (PostgreSQL)."""
    wanted = list(ids)
    said = [ANY_JOB] if len(wanted) > MOST_NAMED else _named(wanted)
    for words in said:
        conn.execute(_NOTIFY, {"channel": notify.channel(schema_of(conn)), "words": WAITS + words})


def answer(database: Database, ids: Iterable[int]) -> None:
    """Notify waiting processes that these jobs have ended (PostgreSQL)."""
    for words in _named(ids):
        notify.hint(database, _channel(database.schema), words)


def _named(ids: Iterable[int]) -> list[str]:
    """Return ids as texts, each short enough for a notification."""
    said: list[str] = []
    for id in ids:
        if said and len(said[-1]) < _LONGEST:
            said[-1] += f",{id}"
        else:
            said.append(str(id))
    return said


_NOTIFY = text("SELECT pg_catalog.pg_notify(:channel, :words)")


def _channel(schema: str | None) -> str:
    return f"{notify.channel(schema)}_ended"
