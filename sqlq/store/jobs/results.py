"""Results of jobs for the processes that wait for them: one statement reads all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Integer, Text, case, cast, null, select, type_coerce, union_all

from sqlq.database.batch import Batch
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.model.job import State
from sqlq.schema.tables import jobs
from sqlq.store.jobs.lookup import possible
from sqlq.store.jobs.rows import OVER, TABLES, slices

AT_ONCE = 10_000
"""The most jobs that one statement reads."""


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
    dialect = dialect_of(conn)
    found: dict[int, Seen] = {}
    for some in slices(possible(wanted), AT_ONCE):
        rows = [(id, int(wanted[id])) for id in some]
        for id, state, *values in conn.execute(_look(dialect), dialect.batch_parameters(_WANTED, rows)):
            found[id] = Seen(id, State(state), *values)
    return found


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
            columns = (*columns, type_coerce(table.c.created_at, BigInteger))
        sources.append(select(*columns).join_from(rows, table, table.c.id == rows.c.id))
    return union_all(*sources)
