"""Signals from outside, and the jobs that wait for them.

A signal is a row of `sqlq_signals` until it expires, the first of its name. A wait is a row of `sqlq_waits`.
Neither transaction looks for the other's row, which may not be committed yet. Each row is due for a look
once it is committed (`look_at`), and the later one of both finds the other; see `store.events.free`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Connection, Integer, Text, bindparam, case, null, select, update

from sqlq.config.constants import DEFAULT_QUEUE, WAIT_TASK
from sqlq.database.batch import Batch, Change, Key, insert_returning, inserted
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.database.sql import Sql
from sqlq.payload.encryption import NO_KEYS, Encryption
from sqlq.schema.tables import jobs, signals, waits
from sqlq.schema.types import Moment, after, far, now

KEPT = 100_000
"""The most signals that are kept, beside those that no worker has looked at yet."""


def signal(conn: Connection, name: str, value: str | None, keep_ms: int) -> bool:
    """Keep the first signal of a name; return whether this one is it. A rival's open transaction with the
    same name is waited for."""
    sql = dialect_of(conn).sql
    row = {"signal": name, "json": value, "keep_ms": keep_ms}
    return bool(sql.change(conn, _REPLACE, row) or inserted(conn, _insert_signal(sql), row))


_name: Any = bindparam("signal", type_=Text)
_SIGNAL = {
    "value": bindparam("json", type_=Text),
    "created_at": now(),
    "expires_at": after(bindparam("keep_ms", type_=BigInteger)),
    "look_at": now(),
}
# first: an expired one that is pruned meanwhile leaves its name to the insert
_REPLACE = Change(
    select(signals.c.name).where(
        signals.c.name == _name,
        signals.c.expires_at <= now(),  # guard: the-first-signal-counts
    ),
    _SIGNAL,
    returning=(signals.c.name,),
    waits=True,
)


@cache
def _insert_signal(sql: Sql) -> Any:
    return sql.upsert(signals, Key(("name",)), {"name": _name} | _SIGNAL, returning=(signals.c.name,))


Wait = tuple[int, str, int | None]
"""A job that waits, the name of its signal, and its timeout in milliseconds from the beginning on."""


def begin(conn: Connection, new: Sequence[Wait]) -> None:
    """Have jobs wait from now on, whose rows this transaction has locked."""
    if new:
        ids = [id for id, *_ in new]
        dialect_of(conn).sql.delete(conn, waits.c.job_id, ids)  # it may have waited before
        blocked = {"available_at": far(), "blocked_by": "event", "due_at": null()}
        conn.execute(update(jobs).where(jobs.c.id.in_(ids)).values(blocked))
        add(conn, new)


def add(conn: Connection, new: Sequence[Wait]) -> None:
    """Insert the waits of jobs that this transaction has blocked."""
    dialect = dialect_of(conn)
    conn.execute(_insert(dialect), dialect.sql.batch_parameters(_WAITS, new))


_WAITS = Batch(job_id=BigInteger, name=Text, timeout_ms=BigInteger)


@cache
def _insert(dialect: Dialect) -> Any:
    rows = dialect.sql.batch_table(_WAITS)
    columns = {"job_id": rows.c.job_id, "name": rows.c.name, "until": after(rows.c.timeout_ms)}
    # a driver's own connection needs rows to fetch
    return insert_returning(waits, columns, waits.c.job_id, order_by=rows.c.job_id)


def of(conn: Connection, id: int) -> Any:
    """Return the row of a job's last wait, None where it has not waited."""
    return conn.execute(select(waits).where(waits.c.job_id == id)).one_or_none()


def opened(encryption: Encryption | None, value: str) -> str:
    """Return the JSON of a signal's value."""
    return (encryption or NO_KEYS).opened("result", WAIT_TASK, DEFAULT_QUEUE, value)


def prune(conn: Connection, limit: int) -> int:
    """Delete at most `limit` signals: expired ones, and the oldest of more than `KEPT`; return the number."""
    bound = {"bound": conn.scalar(BOUND), "most": limit}
    return len(dialect_of(conn).sql.change(conn, _PRUNE, bound))


_expires_at = signals.c.expires_at
BOUND = select(_expires_at).order_by(_expires_at.desc()).offset(KEPT).limit(1)
_bound = bindparam("bound", type_=Moment)
_PRUNE = Change(
    select(signals.c.name)
    .where(
        _expires_at <= case((_bound > now(), _bound), else_=now()),  # guard: signals-are-bounded
        signals.c.look_at.is_(None),  # guard: a-new-signal-is-not-pruned
    )
    .order_by(_expires_at)
    .limit(bindparam("most", type_=Integer)),
    returning=(signals.c.name,),
)
