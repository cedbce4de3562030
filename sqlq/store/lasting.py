"""Unique keys that last: they name their job until its row is gone, also when it has ended.

A live job holds its key by the unique index, as any other. What has ended is looked for before the insert,
and once more after it: from then on the index keeps rivals out, and who has ended before that, and so let the
insert through, has committed and is seen, since in READ COMMITTED each statement sees what is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from sqlalchemy import Connection, Text, and_, bindparam, cast, literal, select, text, union_all

from sqlq.errors import EnqueueError
from sqlq.job import Job, NewJob, State
from sqlq.schema.tables import HOLDS_KEY, HOLDS_KEY_TO_THE_END, failed_jobs, finished_jobs, jobs
from sqlq.store.dialect import Batch, Dialect
from sqlq.store.rows import TABLES, slices

Key: TypeAlias = tuple[str, str | None]
"""A queue and a unique key in it."""
_KEYS_AT_ONCE = 1_000
"""Drivers take 32,767 parameters in one statement, and each key is two, in two tables."""


def lasts(job: NewJob) -> bool:
    """Whether a job's key is to name it until its row is gone."""
    return job.unique_until == "pruned"


def require_read_committed(conn: Connection, dialect: Dialect, new: Iterable[NewJob]) -> None:
    """Raise `EnqueueError` for a key that lasts in a transaction that sees nothing that is committed after it
    began."""
    job = next(filter(lasts, new), None)
    if job is not None and (level := dialect.stricter_isolation(conn)) is not None:
        # guard: lasting-keys-need-read-committed
        raise EnqueueError(
            f'unique_until="pruned" of a job of {job.task} needs READ COMMITTED, and this transaction is '
            f"{level}: in it a job with the same key that ends meanwhile would not be seen"
        )


def held(
    conn: Connection, dialect: Dialect, keys: Sequence[Key], options: Mapping[str, Any], *, live: bool = False
) -> dict[Key, Job]:
    """Return the ended jobs that hold these keys, of several the newest; or the `live` ones."""
    found: dict[Key, Job] = {}
    for some in slices(keys, _KEYS_AT_ONCE):
        given = dialect.parameters(_KEYS, some)
        rows = conn.execute(_holders_of(dialect, live), given, execution_options=options)
        for queue, key, id, task, state in sorted(rows.all(), key=lambda row: row[2]):
            found[queue, key] = Job(id, queue, task, State(state), created=False)
    return found


def holder(conn: Connection, queue: str, key: str) -> int | None:
    """Return the job that holds a key, by one snapshot: a live one, or the newest that has ended."""
    rows = conn.execute(_HOLDERS, {"queue": queue, "key": key}).all()
    return max(((live, id) for live, id in rows), default=(0, None))[1]


_KEYS = Batch(in_queue=Text, held_key=Text)


@cache
def _holders_of(dialect: Dialect, live: bool) -> Any:
    """Choose the jobs that hold the keys of a batch."""
    keys = dialect.rows(_KEYS)
    tables, holds = (TABLES[:1], HOLDS_KEY) if live else (TABLES[1:], HOLDS_KEY_TO_THE_END)
    sources = []
    for table, state in tables:
        is_its = and_(table.c.queue == keys.c.in_queue, table.c.unique_key == keys.c.held_key)
        columns = (table.c.queue, table.c.unique_key, table.c.id, table.c.task, cast(state, Text))
        sources.append(select(*columns).join_from(keys, table, is_its).where(text(holds)))
    return union_all(*sources)


_HOLDERS = union_all(
    *(
        select(literal(live), table.c.id).where(
            text(rule), table.c.queue == bindparam("queue"), table.c.unique_key == bindparam("key")
        )
        for table, rule, live in (
            (jobs, HOLDS_KEY, 1),
            (finished_jobs, HOLDS_KEY_TO_THE_END, 0),
            (failed_jobs, HOLDS_KEY_TO_THE_END, 0),
        )
    )
)
