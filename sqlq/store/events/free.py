"""Frees the jobs that wait for signals: by a signal, or at the end of their timeout.

A look calls the waits of new signals, and then judges the waits that are due. It reads signals after it has
locked the rows of waits. So of a signal and a wait, the look after the later commit sees both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Text,
    and_,
    bindparam,
    case,
    exists,
    literal,
    null,
    or_,
    select,
    update,
)

from sqlq.config.constants import WAIT_TASK
from sqlq.database.batch import Change
from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.model.outcome import ErrorText, Failed
from sqlq.schema.tables import IS_UNRESERVED, blocked_by, failed_jobs, finished_jobs, jobs, signals, waits
from sqlq.schema.types import after, now
from sqlq.store.apart import REFUSED, apart, lately, noted
from sqlq.store.jobs import settle
from sqlq.store.jobs.rows import in_line
from sqlq.store.limits.grant import wake_lines
from sqlq.store.signals.waits import prune

AT_ONCE = 500
AGAIN_MS = 24 * 3_600_000
"""When a wait without a timeout, or one that has ended, is looked at again: its job may be gone by then."""
ENDS = "has its signal, or its wait is over"


def is_due(database: Database) -> bool:
    """Whether a signal is new, or a wait due: one probe of two indexes."""
    with database.single_statements() as conn:
        return bool(conn.scalar(_IS_DUE))


def look(conn: Connection) -> tuple[list[Any], bool]:
    """Take new signals and due waits, and end those that have a signal or are over. Return the rows of their
    jobs: steps, which have ended, and jobs that run again. Return also whether there may be more."""
    sql = dialect_of(conn).sql
    names = [row.name for row in sql.lock(conn, NEW)]
    has_more = len(names) == AT_ONCE
    if names:
        if len(sql.change(conn, CALL, {"names": names})) == AT_ONCE:  # guard: a-look-calls-some
            has_more = True  # the signals stay new
        else:
            conn.execute(_SEEN, {"names": names})
        if len(names) == AT_ONCE:  # a flood, perhaps of names for which nothing waits
            prune(conn, 2 * AT_ONCE)
    due = {row.job_id: row.outcome for row in sql.lock(conn, _DUE, lately(conn, ENDS))}
    # one that another transaction has locked stays due
    live = {row.id: row for row in sql.lock(conn, _BLOCKED, {"ids": [*due]})} if due else {}
    ended = [id for id in live if live[id].how]

    def end(some: Sequence[tuple[int]]) -> None:
        for how in ("signal", "timeout"):
            _end(conn, how, [live[id] for (id,) in some if live[id].how == how])

    done = apart([(id,) for id in ended], end, noted(conn, ENDS), dialect_of(conn), within=conn)
    if later := [id for id in due if id not in ended and (id in live or due[id])]:
        conn.execute(_LATER, {"ids": later})
    if due:  # guard: waits-of-no-job-are-deleted
        sql.delete(conn, waits.c.job_id, [*due.keys() - live], ~exists().where(jobs.c.id == waits.c.job_id))
    return [live[id] for (id,) in done], bool(done) or has_more


def _end(conn: Connection, how: str, rows: Sequence[Any]) -> None:
    """End waits: finish the steps, or let them fail at their timeout; have other jobs run again."""
    steps = [row.id for row in rows if row.task == WAIT_TASK]
    if steps:
        settle.move_to(conn, jobs, steps, *_ENDED[how])
        dialect_of(conn).sql.delete(conn, waits.c.job_id, steps)
    if others := [row for row in rows if row.task != WAIT_TASK]:
        ids = {"ids": [row.id for row in others]}
        conn.execute(_ANSWER, {**ids, "how": how})
        conn.execute(_FREE, ids)
        wake_lines(conn, others)


_names: Any = bindparam("names", expanding=True)
_ids: Any = bindparam("ids", expanding=True, type_=BigInteger)
_is_new, _is_due = signals.c.look_at <= now(), waits.c.look_at <= now()
_IS_DUE = select(or_(exists().where(_is_new), exists().where(_is_due)))
NEW = select(signals.c.name).where(_is_new).order_by(signals.c.look_at, signals.c.name).limit(AT_ONCE)
# those that are called already come last
CALL = Change(
    select(waits.c.job_id)
    .where(waits.c.name.in_(_names), waits.c.outcome.is_(None))
    .order_by(waits.c.look_at.desc())
    .limit(AT_ONCE),
    {"look_at": now()},
    returning=(waits.c.job_id,),
    waits=True,  # for a look that may not see the signal; guard: a-signal-calls-all-that-wait
)
_SEEN = update(signals).where(signals.c.name.in_(_names)).values(look_at=null())
_DUE = (
    select(waits.c.job_id, waits.c.outcome)
    .where(_is_due, waits.c.job_id.not_in(REFUSED))
    .order_by(waits.c.look_at, waits.c.job_id)
    .limit(AT_ONCE)
)
_came = and_(signals.c.name == waits.c.name, signals.c.expires_at > now())
# guard: a-signal-comes-first
_how = case((exists().where(_came), "signal"), (waits.c.until <= now(), "timeout"))
_BLOCKED = (
    select(jobs.c.id, jobs.c.task, jobs.c.flow_id, jobs.c.limit_key, _how.label("how"))
    .join(waits, waits.c.job_id == jobs.c.id)
    .where(jobs.c.id.in_(_ids), blocked_by("event"), IS_UNRESERVED)
    .order_by(jobs.c.id)
)
_again = after(literal(AGAIN_MS, BigInteger))
_next = case((and_(waits.c.until > now(), waits.c.until < _again), waits.c.until), else_=_again)
_LATER = update(waits).where(waits.c.job_id.in_(_ids)).values(look_at=_next)


def _value(name: Any) -> Any:
    return select(signals.c.value).where(signals.c.name == name).scalar_subquery()


_answer = {"outcome": bindparam("how", type_=Text), "value": _value(waits.c.name), "look_at": _again}
_ANSWER = update(waits).where(waits.c.job_id.in_(_ids)).values(_answer)
_FREE = update(jobs).where(jobs.c.id.in_(_ids)).values(in_line(jobs.c.limit_key.is_not(None), now()))
TIMEOUT = Failed("timeout", ErrorText("sqlq.errors.JobTimeoutError", "no signal came in time"))
_ENDED = {
    "signal": (finished_jobs, {"outcome": literal("finished"), "result": _value(jobs.c.label)}),
    "timeout": (
        failed_jobs,
        {
            "reason": literal(TIMEOUT.reason),
            "exception": literal(TIMEOUT.error.exception),
            "message": literal("no signal ").concat(jobs.c.label).concat(" came in time"),
            "fingerprint": literal(TIMEOUT.fingerprint),
        },
    ),
}
