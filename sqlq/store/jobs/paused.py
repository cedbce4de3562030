"""Frees jobs that the pause of their task has blocked.

No index leads a claim past the jobs of a paused task. So a worker claims each of them once, and blocks it
(`settle`). A resume frees them, and a sweep those that it has missed.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import BigInteger, Connection, String, bindparam, case, func, literal_column, null, select

from sqlq.database.batch import Change
from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import jobs, limits
from sqlq.schema.types import far, now
from sqlq.store.limits.wakes import Wake, write
from sqlq.store.workers import pauses
from sqlq.store.workers.notify import wake_others

FREED_AT_ONCE = 500
"""Jobs in one transaction: their rows stay locked until it ends."""


def free(database: Database, task: str) -> int:
    """Free the jobs that the pause of a task has blocked, each at its old place, and return how many. It goes
    through them once: a new pause may block them again."""
    database.run(partial(_look_at_lines, task=task))
    number, ids = 0, [0]
    while ids := database.run(partial(_free, task=task, after_id=max(ids))):  # guard: a-resume-frees-all
        number += len(ids)
    return number


def sweep(database: Database) -> int:
    """Free jobs whose task is not paused, a batch of each task; return how many. A resume that was killed has
    left them, or a worker that blocked them just after it."""
    with database.begin() as conn:
        blocked = conn.scalars(dialect_of(conn).distinct(_BLOCKED, jobs.c.task)).all()
        still = pauses.paused(conn).tasks
        # guard: a-sweep-leaves-the-paused
        return sum(len(_free(conn, task, 0)) for task in blocked if task not in still)


def _look_at_lines(conn: Connection, task: str) -> None:
    """Have the lines looked at that take one job after the other, and wait for one of this task. No other job
    may overtake it, so it has stayed in its line."""
    # guard: a-line-in-order-goes-on
    write(conn, {Wake(key) for key in conn.scalars(_LINES, {"of_task": task})})


def _free(conn: Connection, task: str, after_id: int) -> list[int]:
    given = {"of_task": task, "after_id": after_id, "most": FREED_AT_ONCE}
    rows = dialect_of(conn).change(conn, _FREE, given)
    # guard: the-freed-are-looked-at
    write(conn, {Wake(row.limit_key) for row in rows if row.limit_key is not None})
    if rows:
        wake_others(conn)
    return [row.id for row in rows]


_in_line = (jobs.c.blocked_by == literal_column("'limit'"), jobs.c.limit_key == limits.c.limit_key)
_head = select(jobs.c.task).where(*_in_line).order_by(jobs.c.id).limit(1).scalar_subquery()
_LINES = select(limits.c.limit_key).where(limits.c.in_order, _head == bindparam("of_task", type_=String))
_BLOCKED = jobs.c.blocked_by == literal_column("'pause'")
_limited, _due = jobs.c.limit_key.is_not(None), func.coalesce(jobs.c.due_at, now())
# guard: the-freed-keep-their-place
_FREE = Change(
    jobs,
    select(jobs.c.id)
    .where(_BLOCKED, jobs.c.task == bindparam("of_task", type_=String))
    .where(jobs.c.id > bindparam("after_id", type_=BigInteger))
    .order_by(jobs.c.id)
    .limit(bindparam("most", type_=BigInteger)),
    {
        "available_at": case((_limited, far()), else_=_due),
        "blocked_by": case((_limited, "limit"), else_=null()),
        "due_at": case((_limited, _due), else_=null()),
    },
    returning=(jobs.c.id, jobs.c.limit_key),
)
