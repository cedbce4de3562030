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

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, assert_never

from sqlalchemy import (
    CTE,
    BigInteger,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    case,
    func,
    literal,
    null,
    select,
    true,
    update,
)
from sqlalchemy import insert as insert_into

from sqlq.config.constants import ERROR_BYTES, NOTES_BYTES
from sqlq.database.batch import RIGHT, Batch, Change, Right, Values, rights
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import encryption_of
from sqlq.database.sql import fenced, portions
from sqlq.database.values import CLAIMED
from sqlq.errors import JobTimeoutError, WorkerLostError
from sqlq.model import history
from sqlq.model.history import AttemptTimes
from sqlq.model.job import ClaimedJob, NewJob
from sqlq.model.job_options import FailureReason
from sqlq.model.outcome import (
    NO_RESULT,
    ON_REQUEST,
    Cancelled,
    ErrorText,
    Failed,
    Finished,
    Outcome,
    Released,
    Retried,
    SelfCompleted,
    Settlement,
    as_trusted,
    follow_up,
    settlement,
)
from sqlq.model.retry import error_record, follows, given_back, wait_after_loss_ms
from sqlq.schema.tables import (
    CARRIED,
    IS_RESERVED,
    IS_UNRESERVED,
    attempts_allowed,
    failed_jobs,
    finished_jobs,
    jobs,
    names_of,
    next_token,
    one_more,
)
from sqlq.schema.types import Moment, after, far, now
from sqlq.store.apart import REFUSED, apart, lately, noted
from sqlq.store.jobs.insert import insert
from sqlq.store.jobs.lease import HOLD, change_held
from sqlq.store.jobs.lookup import records
from sqlq.store.limits.admit import close
from sqlq.store.limits.grant import Wake, wake, wake_lines
from sqlq.store.signals.waits import begin

# -- the door ------------------------------------------------------------------------------------------------


def _end(conn: Connection, batch: Batch, rows: Sequence[Row], *, waits: bool = False) -> set[Right]:
    """Move the jobs that their owner still holds to the ended ones; return the rights to them. With `waits`,
    wait for rows that another transaction has locked."""
    dialect = dialect_of(conn)
    done: set[Right] = set()
    for part in portions(dialect.sql, rows, tuple):
        done |= dialect.sql.move(conn, batch, part, _ENDED[batch], waits=waits)
    return done


def _put_back(conn: Connection, batch: Batch, rows: Sequence[Row], keys: Mapping[int, str]) -> set[Right]:
    """Let the jobs that their owner still holds wait until `at` or for `delay_ms`; return the rights to them.
    With neither they keep their old places in the queue.

    Jobs with a limit, by id in `keys`, release their slots and wait in line.
    """
    dialect = dialect_of(conn)
    done: set[Right] = set()
    for in_line in (False, True):
        some = [row for row in rows if (row[0] in keys) is in_line]
        again = _waiting_again(dialect, batch, in_line=in_line)
        for part in portions(dialect.sql, some, tuple):
            done |= rights(dialect.sql.change(conn, again, dialect.sql.batch_parameters(batch, part)))
    in_lines = {
        Wake(keys[id], delay_ms=ms or 0, moment=at)
        for id, token, ms, at, *_ in rows
        if id in keys and (id, token) in done
    }
    wake(conn, in_lines)  # guard: released-job-wakes-its-limit
    return done


def _follow(conn: Connection, follow_ups: Iterable[NewJob | None]) -> None:
    """Enqueue the follow-ups of jobs that end in this transaction."""
    new = [job for job in follow_ups if job]
    if new:  # guard: follow-ups-are-written
        insert(conn, new)


Row = tuple[Any, ...]
"""A right to a job, and the values of a batch."""


@cache
def _waiting_again(dialect: Dialect, batch: Batch, *, in_line: bool) -> Change:
    def values(mine: CTE) -> Values:
        earlier = (jobs.c.due_at, jobs.c.available_at) if in_line else (jobs.c.available_at,)
        # guard: released-job-keeps-its-due-time
        due = func.coalesce(mine.c.at, after(mine.c.delay_ms), *earlier)
        changes: Values = {"available_at": due}
        if in_line:  # guard: released-job-frees-its-slot
            changes = {"available_at": far(), "blocked_by": "limit", "due_at": due}
        return {
            "reserved_at": null(),
            "reserved_by": null(),
            "lease_expires_at": null(),
            "errors": errors_and(mine.c.record),
            **changes,
            **_AGAIN[batch](mine),
        }

    return Change(fenced(dialect.sql, batch), values, returning=RIGHT)


# -- settle --------------------------------------------------------------------------------------------------


def settle(conn: Connection, settlements: Sequence[Settlement]) -> set[Right]:
    """Write the outcomes of attempts, and return the rights that their owner still had.

    Each row is fenced by itself. A right that is not returned is locked by another transaction or lost;
    `lease.states_of` finds out which. Settlements with a follow-up belong in one transaction: otherwise a
    crash between two statements loses the follow-up.
    """
    batches: dict[Batch, list[Row]] = defaultdict(list)
    for s in sorted(settlements, key=itemgetter(0)):
        batch, values = _written(conn, s.id, s.outcome, s.attempts, s.course)
        batches[batch].append((s.id, s.lease_token, *values))
    keys, done = keys_of(settlements), set[Right]()
    for batch, rows in batches.items():
        done |= _end(conn, batch, rows) if batch in _ENDED else _put_back(conn, batch, rows, keys)
    # guard: a-wait-begins-with-the-settle
    begin(conn, [wait for s in settlements if (wait := s.wait) and (s.id, s.lease_token) in done])
    # guard: only-the-owner-is-followed
    _follow(conn, (s.follow_up for s in settlements if s.follow_up and (s.id, s.lease_token) in done))
    ends = {
        Wake(s.limit_key, delay_ms=s.outcome.delay_ms or 0, moment=s.outcome.at)
        for s in settlements
        if s.limit_key is not None and isinstance(s.outcome, Released) and s.outcome.closes
        if (s.id, s.lease_token) in done  # guard: only-the-owner-closes
    }
    if ends:
        close(conn, ends)  # guard: a-slow-down-closes-its-key
    return done


def _written(
    conn: Connection, id: int, outcome: Outcome, attempts: int = 0, course: AttemptTimes | None = None
) -> tuple[Batch, Row]:
    """Return the batch that writes an outcome, and the values of its row."""
    if course is None and (outcome is NO_RESULT or outcome == NO_RESULT):
        return _COMPLETE, ()
    start_ms = course and course.start_ms
    match outcome:
        case Finished(result, note):
            return _FINISH, ("finished", result, note, start_ms)
        case Cancelled(reason):
            if reason == ON_REQUEST:
                reason = _reason_of_request(conn, id) or reason
            return _FINISH, ("cancelled", None, reason, start_ms)
        case Failed(why, error):
            return _FAIL, (
                why,
                error.exception,
                error.message,
                error.traceback,
                outcome.fingerprint,
                start_ms,
            )
        case Retried(delay_ms, error, why, priority, queue, at):
            record = error_record(attempts, why, error, course)
            return _RETRY, (delay_ms, at, record, priority, queue)
        case Released(delay_ms, unknown_task, snoozed, in_time, reason, at):
            end: history.Note = "snoozed" if snoozed else "released"
            record = history.note(attempts or None, end, course or history.UNKNOWN, reason)
            return _RELEASE, (delay_ms, at, record, int(unknown_task), int(in_time))
        case SelfCompleted():
            raise AssertionError("the database says whether a handler has completed its job")
    assert_never(outcome)


_COMPLETE = Batch.of_claims({"outcome": "finished"})
"""Without a result and claimed once, as most jobs are."""
_FINISH = Batch.of_claims(outcome=Text, result=Text, reason=Text, start_ms=BigInteger)
_FAIL = Batch.of_claims(
    reason=Text, exception=Text, message=Text, traceback=Text, fingerprint=Text, start_ms=BigInteger
)
_RETRY = Batch.of_claims(delay_ms=BigInteger, at=Moment, record=Text, priority=Integer, queue=Text)
_RELEASE = Batch.of_claims(delay_ms=BigInteger, at=Moment, record=Text, unknown=Integer, in_time=Integer)
_LOSE = Batch.of_claims(delay_ms=BigInteger, at=Moment, record=Text)
_ENDED = {_COMPLETE: finished_jobs, _FINISH: finished_jobs, _FAIL: failed_jobs}
"""The table to which each batch moves its jobs."""


def _reason_of_request(conn: Connection, id: int) -> str | None:
    """Return the reason that came with the request to cancel a job; None without one."""
    errors = conn.scalar(select(jobs.c.errors).where(jobs.c.id == id))
    lines = map(history.read, records(errors))
    # a retry ends an earlier request
    reasons = [line.reason for line in lines if line.outcome in ("cancel_requested", "put_back")]
    return reasons[-1] if reasons else None


def errors_and(record: Any, limit: int = ERROR_BYTES) -> Any:
    """The history with one more record, as a JSON array in text; a full history keeps its oldest records."""
    length = func.length(jobs.c.errors)
    earlier = func.substr(jobs.c.errors, 1, length - 1).concat(", ")
    begins = case((jobs.c.errors.is_(None), "["), else_=earlier)
    return case((length > limit, jobs.c.errors), else_=begins.concat(record).concat("]"))


def _retried(mine: CTE) -> Values:
    return {
        "unknown_since": null(),
        "priority": func.coalesce(mine.c.priority, jobs.c.priority),
        "queue": func.coalesce(mine.c.queue, jobs.c.queue),
    }


def _released(mine: CTE) -> Values:
    return {
        "attempts": jobs.c.attempts - 1,  # guard: release-gives-the-attempt-back
        "releases": one_more(jobs.c.releases),  # guard: release-is-counted
        # a job that is snoozed a thousand times leaves room for its errors
        "errors": errors_and(mine.c.record, NOTES_BYTES),  # guard: notes-leave-room
        "unknown_since": case(
            (mine.c.unknown == 1, func.coalesce(jobs.c.unknown_since, now())), else_=null()
        ),
        # a job that was started in time has no `start_by` to miss from now on
        "start_by": case((mine.c.in_time == 0, jobs.c.start_by)),  # guard: what-began-in-time-goes-on
    }


_AGAIN: dict[Batch, Callable[[CTE], Values]] = {
    _RETRY: _retried,
    _RELEASE: _released,
    _LOSE: lambda _: {"losses": one_more(jobs.c.losses)},  # guard: losses-are-counted
}
"""The changes by which each batch puts back its jobs, given the held ones with its columns."""


# -- complete, in the handler's own transaction --------------------------------------------------------------


def complete(
    conn: Connection,
    right: Right,
    done: Finished,
    *,
    follow_up: NewJob | None = None,
    course: AttemptTimes | None = None,
) -> bool:
    """Finish one job on a caller's connection, and return whether the right to it still held; if so, enqueue
    its follow-up. `course` is for a job that was claimed before.

    It waits for a row that a heartbeat has locked: unlike a batch, it has no other row to write.
    """
    batch, values = _written(conn, right[0], done, course=course)
    # guard: complete-waits
    ended = bool(_end(conn, batch, [(*right, *values)], waits=True))
    if ended:  # guard: a-late-complete-is-not-followed
        _follow(conn, [follow_up])  # guard: complete-writes-its-callback
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
    row: Any
    """Its columns for which others may wait."""
    reason: FailureReason


def rescue(conn: Connection, *, limit: int = 500) -> list[Rescued]:
    """Take jobs whose lease has expired from their owners, in one transaction; return them.

    The statement that locks the row also judges its expiry, so a heartbeat that came first wins. Jobs whose
    end the database refused lately are left out.
    """
    # guard: rescue-skips-refused-rows
    expired = dialect_of(conn).sql.lock(conn, _EXPIRED.limit(limit), lately(conn, LOST))
    return lose(conn, rights(expired), "did not renew its lease")


def lose(
    conn: Connection,
    claims: Iterable[Right],
    why: str,
    *,
    late: Collection[Right] = (),
) -> list[Rescued]:
    """Take jobs from an owner that is known to be dead, as `rescue` does. `why` is the cause of its death;
    the attempts in `late` were past their timeout then. A job whose end the database refuses stays its
    owner's."""
    taken: list[Rescued] = []

    def take(some: Sequence[Right]) -> None:
        # The token rises before any other write: from then on the old owner matches no row.
        revoked = change_held(conn, HOLD, some, _raised, returning=_REVOKED)
        taken.extend(_lose(conn, revoked, why, {id for id, _ in late}))

    apart(sorted(claims), take, noted(conn, LOST), dialect_of(conn), within=conn)
    return taken


def give_back(conn: Connection, claims: Iterable[Right]) -> set[Right]:
    """Release, for their owner, jobs that it never started; return the rights that it still had. A row that
    another transaction has locked is skipped."""
    dialect, done = dialect_of(conn), set[Right]()
    encryption = encryption_of(conn)  # guard: what-follows-the-unstarted-is-protected

    def release(some: Sequence[Right]) -> None:
        settlements = []
        for row in dialect.sql.lock(conn, _unbegun(dialect), dialect.sql.batch_parameters(HOLD, some)):
            job, course = (
                ClaimedJob._make(row[: len(CLAIMED)]),
                AttemptTimes(row.reserved_at, worker=row.reserved_by),
            )
            trusted = as_trusted(job, encryption)  # guard: what-never-began-keeps-its-key
            settlements.append(settlement(trusted, given_back(job), course, encryption=encryption))
        done.update(settle(conn, settlements))

    apart(sorted(claims), release, noted(conn, LOST), dialect, within=conn)
    return done


LOST = "has lost its worker"


def _lose(conn: Connection, revoked: Sequence[Any], why: str, late: Collection[int]) -> list[Rescued]:
    taken: list[Rescued] = []
    again: list[Row] = []
    over: list[tuple[Any, Failed]] = []
    for row in revoked:
        # guard: late-job-fails-as-timeout
        reason: FailureReason = "timeout" if row.id in late else "worker_lost"
        kind = JobTimeoutError if row.id in late else WorkerLostError
        worker = row.reserved_by or "unknown"
        error = ErrorText(f"{kind.__module__}.{kind.__name__}", f"worker {worker} {why}")
        failed = not follows(row.attempts, row.max_attempts)
        if failed:
            over.append((row, Failed(reason, error)))
        else:
            wait_ms = wait_after_loss_ms(row.losses) or None  # it may never have started
            times = AttemptTimes(row.reserved_at, worker=row.reserved_by)
            record = error_record(row.attempts, reason, error, times)
            again.append((row.id, row.lease_token, wait_ms, None, record))
        taken.append(Rescued(row.id, row.task, row.queue, row.attempts, row.reserved_by, failed, row, reason))
    _put_back(conn, _LOSE, again, keys_of(revoked))
    follow_ups = _follow_ups(conn, over)
    _end(conn, _FAIL, [(row.id, row.lease_token, *_written(conn, row.id, end)[1]) for row, end in over])
    _follow(conn, follow_ups)  # guard: lost-job-writes-its-callback
    # guard: the-slots-of-the-lost-are-looked-at
    wake_lines(conn, (row for row, _ in over))
    return taken


def keys_of(rows: Iterable[Any]) -> dict[int, str]:
    """Return the keys of the limits of jobs, by their ids."""
    return {row.id: row.limit_key for row in rows if row.limit_key is not None}


def _follow_ups(conn: Connection, over: Sequence[tuple[Any, Outcome]]) -> list[NewJob | None]:
    """Return what follows jobs that end without their workers, and nothing for one whose signature is bad."""
    encryption, forged = encryption_of(conn), set[int]()
    if encryption is not None and (followed := [row.id for row, _ in over if row.on_failure is not None]):
        query = select(jobs.c.id, jobs.c.task, jobs.c.queue, jobs.c.payload)
        rows = conn.execute(query.where(jobs.c.id.in_(followed)))
        forged = {id for id, *row in rows if not encryption.opens(*row)}  # guard: the-lost-are-trusted
    return [None if row.id in forged else follow_up(row, outcome, encryption) for row, outcome in over]


# A row that was reserved by hand may have no lease end.
_HAS_EXPIRED = func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at) <= now()
# guard: rescue-takes-the-expired
_EXPIRED = (
    select(*RIGHT)
    .where(IS_RESERVED, _HAS_EXPIRED, jobs.c.id.not_in(REFUSED))
    .order_by(jobs.c.reserved_by, jobs.c.id)  # as the index has them
)


def _raised(_: CTE) -> Values:
    return {"lease_token": next_token(jobs.c.lease_token)}  # guard: rescue-raises-the-token


_KNOWN = (
    *("id", "lease_token", "task", "queue", "attempts", "losses", "reserved_at", "reserved_by"),
    *("label", "headers", "on_failure", *names_of("waited")),
)
_REVOKED = (*(jobs.c[name] for name in _KNOWN), attempts_allowed.label("max_attempts"))


@cache
def _unbegun(dialect: Dialect) -> Select[Any]:
    return fenced(dialect.sql, HOLD).with_only_columns(*CLAIMED, jobs.c.reserved_at, jobs.c.reserved_by)


# -- cancel --------------------------------------------------------------------------------------------------


def cancel(conn: Connection, locked: Sequence[int], reason: str, *, revokes: bool = False) -> None:
    """End jobs as cancelled whose rows this transaction has locked, with what follows a cancel.

    The lock is the fence here: no worker claims or settles a locked row. With `revokes` the jobs run. Their
    token rises before any other write: from then on their owners match no row.
    """
    if revokes:
        raised = update(jobs).values(lease_token=next_token(jobs.c.lease_token))
        conn.execute(raised.where(jobs.c.id.in_(locked)))  # guard: forced-cancel-raises-the-token
    query = select(*_REVOKED).where(jobs.c.id.in_(locked), jobs.c.on_failure.contains('"on_cancel"'))
    # guard: cancel-writes-its-callback
    _follow(conn, _follow_ups(conn, [(row, Cancelled(reason)) for row in conn.execute(query)]))
    finish(conn, jobs, locked, "cancelled", reason)


def finish(conn: Connection, table: Table, ids: Sequence[int], outcome: str, reason: str) -> None:
    """Move jobs to the finished ones whose rows this transaction has locked."""
    move_to(conn, table, ids, finished_jobs, {"outcome": literal(outcome), "reason": literal(reason)})


def move_to(conn: Connection, table: Table, ids: Sequence[int], target: Table, own: Values) -> None:
    """Move jobs whose rows this transaction has locked, with values of the target's own columns."""
    source = select(*(table.c[name] for name in CARRIED), *own.values())
    source = source.where(table.c.id.in_(ids)).order_by(table.c.id)
    conn.execute(insert_into(target).from_select([*CARRIED, *own], source))
    dialect_of(conn).sql.delete(conn, table.c.id, ids)


def skip(conn: Connection, step: int, reason: str) -> bool:
    """Finish a waiting or failed job without a result; return whether there was one. It waits for a row that
    another transaction has locked."""
    for table, waits in ((jobs, IS_UNRESERVED), (failed_jobs, true())):
        query = select(table.c.id, table.c.limit_key).where(table.c.id == step, waits)
        if rows := dialect_of(conn).sql.lock(conn, query, waits=True):
            wake_lines(conn, rows)  # guard: skip-wakes-the-serial-key
            finish(conn, table, [step], "finished", reason)
            return True
    return False
