"""The one door out of `running`: only here an attempt ends, and its job ends with it or waits again.

    settle          by a worker: the outcomes of its attempts
    complete        by a handler, in a transaction of its own
    rescue, lose    by the process that finds that a job's worker is gone
    cancel, skip    by an operator: waiting jobs, running ones by force, steps of flows

The first three use `_end`, which takes rows out of `jobs`, and `_put_back`, which lets them wait again. Both
write only rows that the fence lets through, and return the rights to these. If several owners believe to hold
a job, only one gets past the fence. An operator's calls lock the row in place of the fence. `_follow` then
enqueues the follow-ups of the ended jobs in the same transaction: both are committed together or not at all.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar, assert_never

from sqlalchemy import (
    CTE,
    BigInteger,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    case,
    func,
    literal,
    null,
    select,
    true,
    update,
)
from sqlalchemy import insert as insert_into
from sqlalchemy.exc import DBAPIError

from sqlq.config.constants import ERROR_BYTES, NOTES_BYTES
from sqlq.database.batch import RIGHT, Batch, Change, Right, rights
from sqlq.database.dialect import CLAIMED, Dialect, held, seal_of
from sqlq.database.dialects import dialect_of
from sqlq.errors import JobTimeoutError, WorkerLostError
from sqlq.model import history
from sqlq.model.callbacks import as_trusted, follow_up, settlement
from sqlq.model.history import AttemptTimes
from sqlq.model.job import ClaimedJob, NewJob
from sqlq.model.job_result import FailureReason
from sqlq.model.outcome import (
    Cancelled,
    Completed,
    ErrorText,
    Failed,
    Paused,
    Released,
    Retried,
    SelfCompleted,
    Settlement,
)
from sqlq.model.retry import error_record, follows, given_back, wait_after_loss_ms
from sqlq.schema.tables import (
    CARRIED,
    attempts_allowed,
    failed_jobs,
    finished_jobs,
    jobs,
    limits,
    next_token,
    one_more,
)
from sqlq.schema.types import Moment, after, far, now
from sqlq.store.jobs.insert import insert
from sqlq.store.jobs.lease import HOLD
from sqlq.store.limits.wakes import Wake, write

log = logging.getLogger("sqlq.worker")
J = TypeVar("J")

# -- the door ------------------------------------------------------------------------------------------------


def _end(
    conn: Connection,
    batch: Batch,
    rows: Sequence[tuple[Any, ...]],
    target: Table | None,
    *,
    waits: bool = False,
) -> set[Right]:
    """Move the jobs that their owner still holds into `target`, or with None delete them; return the rights
    to them. With `waits`, wait for rows that another transaction has locked."""
    dialect = dialect_of(conn)
    done: set[Right] = set()
    for some in dialect.portions(rows, tuple):
        if target is not None:
            done |= dialect.move(conn, batch, some, target, waits=waits)
        else:
            parameters = dialect.batch_parameters(batch, some)
            done |= rights(dialect.change(conn, _drop(dialect, batch, waits), parameters))
    return done


def _put_back(
    conn: Connection,
    batch: Batch,
    rows: Sequence[tuple[Any, ...]],
    changes: Changes,
    keys: Mapping[int, str],
) -> set[Right]:
    """Let the jobs that their owner still holds wait until `at` or for `delay_ms`, with `changes`; return the
    rights to them. With neither they keep their old places in the queue.

    Jobs with a limit, by id in `keys`, release their slots and wait in line.
    """
    dialect = dialect_of(conn)
    done: set[Right] = set()
    for in_line in (False, True):
        some = [row for row in rows if (row[0] in keys) is in_line]
        if not some:
            continue
        statement = _waiting_again(dialect, batch, changes, in_line=in_line)
        back: set[Right] = set()
        for part in dialect.portions(some, tuple):
            back |= rights(dialect.change(conn, statement, dialect.batch_parameters(batch, part)))
        done |= back
        if in_line:
            waits = {
                Wake(keys[id], delay_ms=ms or 0, moment=at)
                for id, token, ms, at, *_ in some
                if (id, token) in back
            }
            write(conn, waits)  # guard: a-put-back-is-looked-at
    return done


def _follow(conn: Connection, follow_ups: Iterable[NewJob | None]) -> None:
    """Enqueue the follow-ups of jobs that end in this transaction."""
    new = [job for job in follow_ups if job is not None]
    if new:  # guard: follow-ups-are-written
        insert(conn, new)


Changes: TypeAlias = Callable[[CTE], Mapping[str, Any]]
"""Return the changed columns, given the held jobs of a batch with the batch's columns."""

_UNRESERVED: dict[str, Any] = {"reserved_at": null(), "reserved_by": null(), "lease_expires_at": null()}


@cache
def _drop(dialect: Dialect, batch: Batch, waits: bool) -> Change:
    return Change(jobs, held(dialect, batch), returning=RIGHT, waits=waits)


@cache
def _waiting_again(dialect: Dialect, batch: Batch, changes: Changes, *, in_line: bool = False) -> Change:
    def values(mine: CTE) -> Mapping[str, Any]:
        # guard: a-put-back-keeps-its-place
        due = func.coalesce(
            mine.c.at,
            after(mine.c.delay_ms),
            *([jobs.c.due_at] if in_line else []),
            jobs.c.available_at,
        )
        in_its_line = {"available_at": far(), "blocked_by": "limit", "due_at": due}
        # guard: a-put-back-holds-no-slot
        waits = in_its_line if in_line else {"available_at": due}
        return {**_UNRESERVED, **waits, **changes(mine)}

    return Change(jobs, held(dialect, batch), values, returning=RIGHT)


# -- settle --------------------------------------------------------------------------------------------------


def settle(conn: Connection, settlements: Sequence[Settlement], *, keep_finished: bool = True) -> set[Right]:
    """Write the outcomes of attempts, and return the rights that their owner still had.

    Each row is fenced by itself. A right that is not returned is locked by another transaction or lost;
    `lease.fates` finds out which. With `keep_finished` False a finished job leaves no row. Settlements with a
    follow-up belong in one transaction: otherwise a crash between two statements loses the follow-up.
    """
    ended: dict[Batch, list[tuple[Any, ...]]] = defaultdict(list)
    retried: list[tuple[Any, ...]] = []
    released: list[tuple[Any, ...]] = []
    paused: tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]] = ([], [])
    ordered = _in_order(conn, [s.limit_key for s in settlements if isinstance(s.outcome, Paused)])
    for s in sorted(settlements, key=itemgetter(0)):
        right = (s.id, s.lease_token)
        match s.outcome:
            case Completed(None, None) if s.course is None:
                ended[_COMPLETE].append(right)
            case Completed(result, note):
                batch, row = _finished(right, "completed", result, note, s.course)
                ended[batch].append(row)
            case Cancelled(reason):
                batch, row = _finished(right, "cancelled", None, reason, s.course)
                ended[batch].append(row)
            case Failed(why, error):
                start_ms = None if s.course is None else s.course.start_ms
                ended[_FAIL].append((*right, why, error.exception, error.message, error.traceback, start_ms))
            case Retried(delay_ms, error, why, priority, queue, at):
                record = error_record(s.attempts, why, error, s.course)
                retried.append((*right, delay_ms, at, record, priority, queue))
            case Released(delay_ms, unknown_task, in_time=in_time, at=at):
                record = _note_of(s, s.outcome)
                released.append((*right, delay_ms, at, record, int(unknown_task), int(in_time)))
            case Paused():
                paused[s.limit_key in ordered].append((*right, None, None))
            case SelfCompleted():
                raise AssertionError(
                    "whether its handler completed a job is for the database to say, not to write"
                )
            case _:
                assert_never(s.outcome)
    finished = finished_jobs if keep_finished else None
    keys = {s.id: s.limit_key for s in settlements if s.limit_key is not None}
    done: set[Right] = set()
    for batch, rows in ended.items():
        done |= _end(conn, batch, rows, failed_jobs if batch is _FAIL else finished)
    done |= _put_back(conn, _RETRY, retried, _retried, keys)
    done |= _put_back(conn, _RELEASE, released, _released, keys)
    for rows, changes in zip(paused, (_paused, _unclaimed), strict=True):
        done |= _put_back(conn, _PAUSE, rows, changes, keys)
    if any(s.follow_up is not None for s in settlements):
        # guard: only-the-owner-is-followed
        _follow(conn, (s.follow_up for s in settlements if (s.id, s.lease_token) in done))
    return done


_COMPLETE = Batch.of_claims({"outcome": "completed"})
"""Without a result, as most jobs are."""
_FINISH = Batch.of_claims(outcome=Text, result=Text, reason=Text)
_FINISH_LATER = Batch.of_claims(outcome=Text, result=Text, reason=Text, start_ms=BigInteger)
"""For a job that was claimed before: its history needs one more column."""
_FAIL = Batch.of_claims(reason=Text, exception=Text, message=Text, traceback=Text, start_ms=BigInteger)
_RETRY = Batch.of_claims(delay_ms=BigInteger, at=Moment, record=Text, priority=Integer, queue=Text)
_RELEASE = Batch.of_claims(delay_ms=BigInteger, at=Moment, record=Text, unknown=Integer, in_time=Integer)
_PAUSE = Batch.of_claims(delay_ms=BigInteger, at=Moment)


def _finished(
    right: Right, outcome: str, result: str | None, reason: str | None, course: AttemptTimes | None
) -> tuple[Batch, tuple[Any, ...]]:
    """Return the row of a job that has finished, and which batch it belongs to."""
    row = (*right, outcome, result, reason)
    return (_FINISH, row) if course is None else (_FINISH_LATER, (*row, course.start_ms))


def _note_of(s: Settlement, released: Released) -> str:
    said: history.Note = "snoozed" if released.snoozed else "released"
    return history.note(s.attempts or None, said, s.course or history.UNKNOWN, released.reason)


def _errors_and(record: Any, most: int = ERROR_BYTES) -> Any:
    """The history with one more record, as a JSON array in text; a full history keeps its oldest records."""
    return case(
        (jobs.c.errors.is_(None), literal("[").concat(record).concat("]")),
        (func.length(jobs.c.errors) > most, jobs.c.errors),
        else_=func.substr(jobs.c.errors, 1, func.length(jobs.c.errors) - 1)
        .concat(", ")
        .concat(record)
        .concat("]"),
    )


def _retried(mine: CTE) -> Mapping[str, Any]:
    return {
        "errors": _errors_and(mine.c.record),
        "unknown_since": null(),
        "priority": func.coalesce(mine.c.priority, jobs.c.priority),
        "queue": func.coalesce(mine.c.queue, jobs.c.queue),
    }


def _released(mine: CTE) -> Mapping[str, Any]:
    return {
        "attempts": jobs.c.attempts - 1,  # guard: release-gives-the-attempt-back
        "releases": one_more(jobs.c.releases),  # guard: release-is-counted
        # a job that is snoozed a thousand times leaves room for its errors
        "errors": _errors_and(mine.c.record, NOTES_BYTES),  # guard: notes-leave-room
        "unknown_since": case(
            (mine.c.unknown == 1, func.coalesce(jobs.c.unknown_since, now())), else_=null()
        ),
        # a job that was started in time has no `start_by` to miss from now on
        "start_by": case((mine.c.in_time == 0, jobs.c.start_by)),  # guard: what-began-in-time-goes-on
    }


def _unclaimed(mine: CTE) -> Mapping[str, Any]:
    return {"attempts": jobs.c.attempts - 1, "unknown_since": null()}  # guard: a-pause-counts-no-attempt


def _paused(mine: CTE) -> Mapping[str, Any]:
    in_line = jobs.c.limit_key.is_not(None)  # else SQL may have left any `due_at` in the row
    # guard: the-paused-keep-their-place
    due = case((in_line, func.coalesce(jobs.c.due_at, jobs.c.available_at)), else_=jobs.c.available_at)
    return {**_unclaimed(mine), "blocked_by": "pause", "available_at": far(), "due_at": due}


def _in_order(conn: Connection, keys: Sequence[str | None]) -> set[str]:
    """Return those of these keys that take one job after the other. A paused one keeps its line waiting: it
    stays in it, and no younger one overtakes it."""
    if known := {key for key in keys if key is not None}:
        return set(conn.scalars(_IN_ORDER, {"keys": sorted(known)}))  # guard: the-paused-stay-in-order
    return set()


_IN_ORDER = select(limits.c.limit_key).where(
    limits.c.limit_key.in_(bindparam("keys", expanding=True)), limits.c.in_order
)


# -- complete, in the handler's own transaction --------------------------------------------------------------


def complete(
    conn: Connection,
    right: Right,
    done: Completed,
    *,
    keep_finished: bool,
    follow_up: NewJob | None = None,
    course: AttemptTimes | None = None,
) -> bool:
    """Finish one job on a caller's connection, and return whether the right to it still held; if so, enqueue
    its follow-up. `course` is for a job that was claimed before.

    It waits for a row that a heartbeat has locked: unlike a batch, it has no other row to write.
    """
    batch, row = _finished(right, "completed", done.result, done.note, course)
    target = finished_jobs if keep_finished else None  # guard: complete-without-retention
    # guard: complete-waits
    ended = bool(_end(conn, batch, [row], target, waits=True))
    if ended:  # guard: a-late-complete-is-not-followed
        _follow(conn, [follow_up])  # guard: complete-is-followed
    return ended


# -- rescue --------------------------------------------------------------------------------------------------


class Rescued(NamedTuple):
    """A job taken from an owner that did not renew its lease; `failed` if it had no attempts left."""

    id: int
    task: str
    queue: str
    attempts: int
    owner: str
    failed: bool
    flow_id: int | None = None
    limit_key: str | None = None
    reason: str = "worker_lost"


def rescue(conn: Connection, *, limit: int = 500) -> list[Rescued]:
    """Take jobs whose lease has expired from their owners, in one transaction; return them.

    The statement that locks the row also judges its expiry, so a heartbeat that came first wins. The token
    rises before any other write: from then on the old owner matches no row.
    """
    expired = dialect_of(conn).change(conn, _REVOKE, {"most": limit})
    return _lose(conn, expired, "did not renew its lease")


def lose(
    conn: Connection,
    wanted: Iterable[Right],
    why: str,
    *,
    late: Collection[Right] = (),
) -> list[Rescued]:
    """Take jobs from an owner that is known to be dead, as `rescue` does. `why` is the cause of its death;
    the attempts in `late` were past their timeout then."""
    dialect = dialect_of(conn)
    revoked = dialect.change(conn, _revoke(dialect), dialect.batch_parameters(HOLD, sorted(wanted)))
    return _lose(conn, revoked, why, {id for id, _ in late})


def give_back(conn: Connection, wanted: Collection[Right]) -> set[Right]:
    """Release, for their owner, jobs that it never started; return the rights that it still had. A row that
    another transaction has locked is skipped."""
    if not wanted:
        return set()
    dialect = dialect_of(conn)
    rows = dialect.lock(conn, _unbegun(dialect), dialect.batch_parameters(HOLD, sorted(wanted)))
    # guard: what-never-began-keeps-its-key
    unbegun = [(ClaimedJob._make(row[: len(CLAIMED)]), _course_of_lost(row)) for row in rows]
    seal = seal_of(conn)  # guard: what-follows-the-unstarted-is-sealed
    settlements = [
        settlement(as_trusted(job, seal), given_back(job), course, seal=seal) for job, course in unbegun
    ]
    return settle(conn, settlements)


def _lose(conn: Connection, revoked: Sequence[Any], why: str, late: Collection[int] = ()) -> list[Rescued]:
    alive = [row for row in revoked if follows(row.attempts, row.max_attempts)]
    spent = [row for row in revoked if not follows(row.attempts, row.max_attempts)]

    def reason(row: Any) -> FailureReason:
        return "timeout" if row.id in late else "worker_lost"  # guard: late-is-told-as-timeout

    def error(row: Any) -> ErrorText:
        kind = JobTimeoutError if row.id in late else WorkerLostError
        said = f"worker {row.reserved_by or 'unknown'} {why}"
        return ErrorText(f"{kind.__module__}.{kind.__name__}", said)

    if alive:
        again = [
            (
                r.id,
                r.lease_token,
                wait_after_loss_ms(r.losses) or None,  # it may never have started
                None,
                error_record(r.attempts, reason(r), error(r), _course_of_lost(r)),
                *(None, None),
            )
            for r in alive
        ]
        _put_back(conn, _RETRY, again, _lost, _keys_of(alive))

    def fail(some: Sequence[Any]) -> None:
        over = [(row, Failed(reason(row), error(row))) for row in some]
        _fail(conn, over)  # guard: the-lost-are-followed

    failed = end_apart(conn, spent, fail, "has failed")
    wake(conn, _keys_of(spent).values())  # guard: the-slots-of-the-lost-are-looked-at
    return [
        Rescued(r.id, r.task, r.queue, r.attempts, r.reserved_by, over, r.flow_id, r.limit_key, reason(r))
        for some, over in ((alive, False), (failed, True))
        for r in some
    ]


def _course_of_lost(row: Any) -> AttemptTimes:
    return AttemptTimes(row.reserved_at, worker=row.reserved_by)


def _keys_of(rows: Iterable[Any]) -> dict[int, str]:
    return {row.id: row.limit_key for row in rows if row.limit_key is not None}


def wake(conn: Connection, keys: Iterable[str]) -> None:
    """Schedule a look at these keys at the commit of this transaction, which frees their slots."""
    write(conn, {Wake(key) for key in keys})


def _fail(conn: Connection, over: Sequence[tuple[Any, Failed]]) -> None:
    """End jobs that were taken from their owners, with their follow-ups."""
    rows = [(r.id, r.lease_token, f.reason, f.error.exception, f.error.message, None, None) for r, f in over]
    seal, forged = seal_of(conn), set[int]()
    if seal is not None and (followed := [row.id for row, _ in over if row.on_failure is not None]):
        found = conn.execute(select(*_SEALED).where(jobs.c.id.in_(followed)))
        forged = {id for id, *sealed in found if not seal.opens(*sealed)}  # guard: the-lost-are-trusted
    _end(conn, _FAIL, rows, failed_jobs)
    follow_ups = (follow_up(row, failure, seal) for row, failure in over if row.id not in forged)
    _follow(conn, follow_ups)


_SEALED = (jobs.c.id, jobs.c.task, jobs.c.queue, jobs.c.payload)


def end_apart(
    conn: Connection, some: Sequence[J], end: Callable[[Sequence[J]], object], why: str
) -> Sequence[J]:
    """End jobs together, and return those that ended. Each has an id, a task and a queue, for the log; `why`
    is the reason there.

    The database may refuse a job: for want of a right, for a duplicate id in a table, or by a host's rule.
    The other jobs still end. The refused job stays as it is, and the next run finds it again.
    """
    if not some:
        return []
    try:
        with conn.begin_nested():  # guard: a-refused-end-is-its-jobs-alone
            end(some)
        return some
    except DBAPIError as refusal:
        dialect = dialect_of(conn)
        if dialect.trouble(refusal).passes:
            raise
        if (half := len(some) // 2) > 0:
            return [job for part in (some[:half], some[half:]) for job in end_apart(conn, part, end, why)]
        job: Any = some[0]
        log.error(
            "job %d: it %s, but the database refuses its end, or what follows it: %s",
            *(job.id, why, refusal.orig),
            extra={"job_id": job.id, "task": job.task, "queue": job.queue, "event": "unstorable"},
        )
        return []


def _lost(mine: CTE) -> Mapping[str, Any]:
    # guard: losses-are-counted
    return {"errors": _errors_and(mine.c.record), "losses": one_more(jobs.c.losses)}


# A row that was reserved by hand may have no lease end.
_HAS_EXPIRED = func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at) <= now()
# guard: rescue-takes-the-expired
_EXPIRED = (
    select(jobs.c.id)
    .where(jobs.c.reserved_at.is_not(None), _HAS_EXPIRED)
    .order_by(jobs.c.id)
    .limit(bindparam("most", type_=Integer))
)


_RAISED = {"lease_token": next_token(jobs.c.lease_token)}  # guard: rescue-raises-the-token
_REVOKED = (
    jobs.c.id,
    jobs.c.lease_token,
    jobs.c.task,
    jobs.c.queue,
    jobs.c.attempts,
    attempts_allowed.label("max_attempts"),
    jobs.c.losses,
    jobs.c.reserved_at,
    jobs.c.reserved_by,
    jobs.c.label,
    jobs.c.headers,
    jobs.c.on_failure,
    jobs.c.flow_id,
    jobs.c.limit_key,
)
_REVOKE = Change(jobs, _EXPIRED, _RAISED, returning=_REVOKED)


@cache
def _unbegun(dialect: Dialect) -> Select[Any]:
    return held(dialect, HOLD).with_only_columns(*CLAIMED, jobs.c.reserved_at, jobs.c.reserved_by)


@cache
def _revoke(dialect: Dialect) -> Change:
    return Change(jobs, held(dialect, HOLD), _RAISED, returning=_REVOKED)


# -- cancel --------------------------------------------------------------------------------------------------


def cancel(conn: Connection, locked: Sequence[int], reason: str) -> None:
    """End jobs as cancelled whose rows this transaction has locked, without follow-ups.

    The lock is the fence here: no worker claims or settles a locked row.
    """
    _finish(conn, jobs, locked, "cancelled", reason)


def _finish(conn: Connection, table: Table, ids: Sequence[int], outcome: str, reason: str) -> None:
    source = select(*(table.c[name] for name in CARRIED), literal(outcome), literal(reason)).where(
        table.c.id.in_(ids)
    )
    columns = [*CARRIED, "outcome", "reason"]
    conn.execute(insert_into(finished_jobs).from_select(columns, source.order_by(table.c.id)))
    dialect_of(conn).delete(conn, table.c.id, ids)


def skip(conn: Connection, step: int, reason: str) -> bool:
    """Finish a waiting or failed job without a result; return whether there was one. It waits for a row that
    another transaction has locked."""
    for table, waits in ((jobs, jobs.c.reserved_at.is_(None)), (failed_jobs, true())):
        this = (table.c.id == step, waits)
        found = dialect_of(conn).lock(conn, select(table.c.limit_key).where(*this), waits=True)
        if found:
            # guard: skipping-lets-a-line-go-on
            wake(conn, [row.limit_key for row in found if row.limit_key is not None])
            _finish(conn, table, [step], "completed", reason)
            return True
    return False


def revoke(conn: Connection, locked: Sequence[int]) -> None:
    """Raise the token of running jobs whose rows this transaction has locked: from then on their owners match
    no row."""
    # guard: forced-cancel-raises-the-token
    conn.execute(update(jobs).where(jobs.c.id.in_(locked)).values(lease_token=next_token(jobs.c.lease_token)))
