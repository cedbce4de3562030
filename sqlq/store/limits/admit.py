"""Limits: choose the jobs in the line of a limit that may run now (a semaphore for each key).

A slot is a row: an unblocked job with the key, from its admission until it ends or is released. So a slot
lives and dies with its job, and no crash can lose or double one. One statement locks a key, and a second one
counts its rows, to include the commits during the wait for the lock. Keys are locked in ascending order, so
that two admissions cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Literal

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Table,
    bindparam,
    case,
    exists,
    func,
    null,
    or_,
    select,
    update,
)

from sqlq.database.batch import Batch, Change, Condition, Key
from sqlq.database.database import Database
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import run_text
from sqlq.database.sql import BEGINS
from sqlq.errors import ConfigurationError
from sqlq.model.checks import Rule
from sqlq.model.limit import LimitStatus
from sqlq.schema.tables import IS_UNRESERVED, blocked_by, failed_jobs, jobs, limits, wakes
from sqlq.schema.types import Moment, after, ago, far, now, since_ms
from sqlq.store.apart import apart, noted
from sqlq.store.limits.grant import (
    IN_LINE,
    IS_SERVED,
    MAY_START,
    MS,
    NO_RULE,
    Grant,
    Start,
    Wake,
    next_free,
    pick,
    serving,
    wake,
)
from sqlq.store.workers import notify

WAKES_AT_ONCE = 500
KEYS_AT_ONCE = 500
JOBS_AT_ONCE = 1_000
ONE_BY_ONE = Rule(max_running=1, in_order=True)


# -- looks ---------------------------------------------------------------------------------------------------


@dataclass
class FreedJobs:
    """The effect of a call that frees jobs: their number, and the delays in milliseconds of those that start
    later. With `has_more` it is to be called again at once, else in `next_ms`, when the next wake is due."""

    number: int = 0
    starts_ms: list[float] = field(default_factory=list)
    has_more: bool = False
    next_ms: float | None = None


def look(database: Database, keys: Collection[str] = (), *, limit: int = WAKES_AT_ONCE) -> FreedJobs:
    """Take at most `limit` due wakes, and admit jobs of their keys and of the given ones (at most
    `KEYS_AT_ONCE`).

    One transaction: a crash leaves the wakes as they were. Jobs of queues that are paused, or that no worker
    serves, stay in line.
    """
    with database.begin() as conn:
        done = look_on(conn, keys, limit=limit)
        if not done.has_more and (since := conn.scalar(_NEXT_WAKE)) is not None:
            done.next_ms = -float(since)
    return done


def look_on(conn: Connection, keys: Collection[str], *, limit: int) -> FreedJobs:
    """Do the same in the open transaction."""
    taken = dialect_of(conn).sql.change(conn, _TAKE, {"most": limit}) if limit else []
    rules = _rules_of(taken)
    all_keys = {*keys, *(wake.limit_key for wake in taken)}
    has_more = len(taken) == limit > 0
    if has_more:  # guard: old-wakes-hold-up-no-new-ones
        # They stay, and give rows only to keys without one: the rules of older wakes must not undo theirs.
        newest = conn.execute(_NEWEST, {"most": limit}).all()
        _add(conn, _rules_of(newest) | rules)
        all_keys.update(wake.limit_key for wake in newest)
    done = _admit(conn, all_keys, rules)
    done.has_more = done.has_more or has_more
    return done


_LIMIT = bindparam("most", type_=Integer)


_is_due = wakes.c.at <= now()
_TAKE = Change(
    select(wakes.c.id).where(_is_due).order_by(wakes.c.at, wakes.c.id).limit(_LIMIT),
    returning=(wakes.c.id, wakes.c.limit_key, *(wakes.c[name] for name in Rule._fields)),
)
_NEWEST = select(wakes).where(_is_due).order_by(wakes.c.at.desc(), wakes.c.id.desc()).limit(_LIMIT)
_NEXT_WAKE = select(since_ms(wakes.c.at)).order_by(wakes.c.at, wakes.c.id).limit(1)


def _rules_of(taken: Iterable[Any]) -> dict[str, Rule]:
    """Return the rule of each key, from its newest wake that has one."""
    rules: dict[str, Rule] = {}
    for row in sorted(taken, key=lambda row: int(row.id)):
        rule = _rule(row)
        if rule != NO_RULE:
            rules[row.limit_key] = rule
    return rules


def _rule(row: Any) -> Rule:
    return Rule(row.max_running, row.rate, row.period_ms, bool(row.in_order), bool(row.holds))


# -- admission -----------------------------------------------------------------------------------------------


def _admit(conn: Connection, keys: Collection[str], rules: Mapping[str, Rule]) -> FreedJobs:
    """Admit jobs of these keys, about a thousand at most, by the rules of the wakes and of the keys' rows."""
    done = FreedJobs()
    if not keys:
        return done
    dialect = dialect_of(conn)
    limit = max(1, JOBS_AT_ONCE // len(keys))
    grants = {grant.key: grant for grant in _grants(conn, sorted(keys), rules, limit)}
    gone = rules.keys() - grants.keys()  # deleted just now: the next look makes its row anew
    at_once = [Wake(key, rules[key]) for key in gone]  # guard: wake-keeps-its-rule
    for id, key in pick(conn, grants.values()):
        grants[key].ids.append(id)
    used = [grant for grant in grants.values() if grant.ids]

    def admit(starts: Sequence[Start]) -> None:
        conn.execute(_admit_at(dialect), dialect.sql.batch_parameters(_STARTS, starts))

    def refuse(start: Start, error: Exception) -> None:
        noted(conn, MAY_START)(start, error)
        at_once.extend(map(Wake, keys))

    starts = [start for grant in used for start in grant.starts()]
    done.number = len(apart(starts, admit, refuse, dialect, within=conn))
    done.starts_ms = [(at - grant.now) / MS for grant in used for _, at in grant.starts() if at]
    # without a rate only on a cluster: of two nodes' admissions the second one's COMMIT then fails
    changed = [
        grant
        for grant in grants.values()
        if grant.changed or (grant.ids and (grant.rule.rate is not None or dialect.locks_on_one_node))
    ]
    if changed:
        conn.execute(
            _CHANGE,
            [{"of": each.key, "at": each.start(len(each.ids)), **each.rule._asdict()} for each in changed],
        )
    at_once += [Wake(grant.key) for grant in used if len(grant.ids) == limit and not grant.rule.in_order]
    wake(conn, [*at_once, *(each for grant in grants.values() for each in grant.again())])
    done.has_more = bool(at_once)
    return done


def _grants(conn: Connection, keys: Sequence[str], rules: Mapping[str, Rule], limit: int) -> Iterator[Grant]:
    """Lock the rows of these keys, and yield a grant for each, by the wakes' rules. A key without a row is
    left to a sweep."""
    _add(conn, rules)
    sql, parameters = dialect_of(conn).sql, {"keys": list(keys)}
    for row in sql.lock(conn, _LOCK, parameters, waits=True):  # guard: a-key-is-waited-for
        before = _rule(row)
        rule = rules.get(row.limit_key, before)
        takes_set = not rule.in_order  # guard: what-is-set-keeps-the-order
        if takes_set and row.pinned_at is not None:  # guard: pinned-limit-overrides-code
            rule = before
        next_free_at = next_free(row.next_free_at, row.moment, before, rule)
        is_unused = row.moment - row.used_at > timedelta(days=1)  # guard: a-key-in-use-is-not-forgotten
        opens_at = max(row.closed_until or row.moment, row.moment)
        changed = rule != before or is_unused
        yield Grant(row.limit_key, rule, row.moment, next_free_at, limit, opens_at, changed)


def _add(conn: Connection, rules: Mapping[str, Rule]) -> None:
    """Insert a row for each of these keys that has none. This comes before any row lock, and in the order of
    keys, so that two concurrent calls cannot deadlock."""
    if rows := [{"limit_key": key, **rules[key]._asdict()} for key in sorted(rules)]:
        conn.execute(dialect_of(conn).sql.upsert(limits, _KEY), rows)


_KEY = Key(("limit_key",))
_KEYS: Any = bindparam("keys", expanding=True)
_LIMITS = select(limits, now().label("moment")).order_by(limits.c.limit_key)
_LOCK = _LIMITS.where(limits.c.limit_key.in_(_KEYS))
_WAKES_OF = select(wakes).where(wakes.c.limit_key.in_(_KEYS))
_IS_KEY = limits.c.limit_key == bindparam("of")
_CHANGE = (
    update(limits)
    .where(_IS_KEY)
    .values(
        {name: bindparam(name) for name in Rule._fields}
        | {"next_free_at": bindparam("at", type_=Moment), "used_at": now()}
    )
)
_STARTS = Batch(id=BigInteger, start=Moment)


@cache
def _admit_at(dialect: Dialect) -> Any:
    rows = dialect.sql.batch_table(_STARTS)
    # guard: the-admitted-know-their-place
    values = {"available_at": func.coalesce(rows.c.start, now()), "blocked_by": null()}
    return update(jobs).where(jobs.c.id == rows.c.id, IN_LINE).values(values)


# -- sweeps --------------------------------------------------------------------------------------------------


def are_in_use(database: Database) -> bool:
    """Whether any job is in line, or holds a slot."""
    with database.single_statements() as conn:
        return bool(conn.scalar(_ANY))


def sweep(database: Database, after_key: str, limit: int = KEYS_AT_ONCE) -> tuple[FreedJobs, str]:
    """Take slots from jobs that no worker may claim, and admit jobs of the next keys with a line. Return the
    key to continue from; it is empty at the end.

    It finds the lines whose wake was lost with a process, and those that never had a wake.
    """
    with database.begin() as conn:
        keys, freed = sweep_on(conn, after_key, limit)
    done = look(database, {*keys, *freed}, limit=0) if keys or freed else FreedJobs()
    done.has_more = done.has_more or len(freed) >= JOBS_AT_ONCE  # guard: full-sweep-is-repeated
    return done, keys[-1] if len(keys) == limit else ""


def sweep_on(conn: Connection, after_key: str, limit: int) -> tuple[list[str], list[str]]:
    """Return the next keys with a line, and the keys of freed slots, once for each slot.

    Each key with a line now has a row. Jobs without a wake, which SQL inserted, run one after the other:
    stricter than any limit.
    """
    # guard: unserved-hold-no-slots
    freed = dialect_of(conn).sql.change(conn, _BACK_INTO_LINE, {**serving(conn), "most": JOBS_AT_ONCE})
    keys = _keys_in_line(conn, after_key, limit)
    if keys:
        rules = _rules_of(conn.execute(_WAKES_OF, {"keys": keys}))
        _add(conn, dict.fromkeys(keys, ONE_BY_ONE) | rules)  # guard: an-unknown-limit-is-the-strictest
    return keys, [row.limit_key for row in freed]


def _keys_in_line(conn: Connection, after: str, limit: int, prefix: str = "") -> list[str]:
    """Return the next keys with a line."""
    parameters = {"after": after, "most": limit, "prefix": prefix, "length": len(prefix)}
    statement = dialect_of(conn).sql.lines.format(begins=BEGINS if prefix else "")
    return [*run_text(conn, statement, **parameters).scalars()]


_holds_a_slot = jobs.c.limit_key.is_not(None) & jobs.c.blocked_by.is_(None)
_ANY = select(or_(*(exists(select(jobs.c.id).where(each)) for each in (IN_LINE, _holds_a_slot))))


# guard: paused-hold-no-slots
_back = {
    "due_at": func.coalesce(jobs.c.due_at, jobs.c.available_at),
    "available_at": far(),
    "blocked_by": "limit",
}
_BACK_INTO_LINE = Change(
    select(jobs.c.id).where(_holds_a_slot, IS_UNRESERVED, ~IS_SERVED).order_by(jobs.c.id).limit(_LIMIT),
    _back,
    returning=(jobs.c.limit_key,),
)
"""Takes slots from jobs that wait for a worker in vain."""


# -- closed keys ---------------------------------------------------------------------------------------------


def close(conn: Connection, ends: Collection[Wake]) -> None:
    """Close keys until the times of these wakes, or until later ends that they have. No job is admitted
    before. Jobs that no worker has claimed go back to their places in the line.

    The caller may have locked jobs: whoever has locked a key waits for no lock of a job.
    """
    keys, sql = {"keys": [end.key for end in ends]}, dialect_of(conn).sql
    sql.lock(conn, _LOCK, keys, waits=True)
    conn.execute(_CLOSE, [{"of": end.key, "ms": end.delay_ms, "at": end.moment} for end in ends])
    sql.change(conn, _UNSTARTED, keys)  # guard: a-closed-key-takes-back-its-starts
    wake(conn, ends)  # guard: a-closed-key-is-looked-at-when-it-opens


_end: Any = func.coalesce(bindparam("at", type_=Moment), after(bindparam("ms", type_=BigInteger)))
# guard: the-later-end-of-a-close-counts
_closed_until = case((limits.c.closed_until > _end, limits.c.closed_until), else_=_end)
_CLOSE = update(limits).where(_IS_KEY).values(closed_until=_closed_until)
_UNSTARTED = Change(
    select(jobs.c.id).where(_holds_a_slot, IS_UNRESERVED, jobs.c.limit_key.in_(_KEYS)).order_by(jobs.c.id),
    _back,
    returning=(jobs.c.id,),
)


def closed(conn: Connection) -> int:
    """Return how many keys are closed."""
    return conn.scalar(_CLOSED) or 0


_CLOSED = select(func.count()).select_from(limits).where(limits.c.closed_until > now())


# -- keys that nobody uses any more --------------------------------------------------------------------------


def forget_unused(conn: Connection, *, unused_ms: int, limit: int) -> int:
    """Delete at most `limit` keys without jobs that no admission has used for that long. Keys that an
    operator has set stay. Return the number.

    The next job that is enqueued under the limit brings its rule back. A replay of a job that ended before
    has no rule with it: such jobs run one after the other.
    """
    steps_keys = select(jobs.c.limit_key).where(
        jobs.c.flow_id.is_not(None), blocked_by("flow"), jobs.c.limit_key.is_not(None)
    )
    next_free_at, closed_until = limits.c.next_free_at, limits.c.closed_until
    unused = select(limits.c.limit_key).where(
        limits.c.used_at < ago(unused_ms),
        limits.c.pinned_at.is_(None),  # guard: what-is-set-is-not-forgotten
        next_free_at.is_(None) | (next_free_at < now()),  # guard: rates-are-not-forgotten
        closed_until.is_(None) | (closed_until < now()),  # guard: a-close-is-not-forgotten
        ~_has(jobs, jobs.c.blocked_by.is_(None)),  # guard: slots-are-not-forgotten
        ~_has(jobs, IN_LINE),  # guard: limit-key-with-waiting-jobs-is-kept
        ~_has(failed_jobs),  # guard: what-may-be-retried-is-not-forgotten
        limits.c.limit_key.not_in(steps_keys),  # guard: steps-keys-are-not-forgotten
    )
    unused = unused.order_by(limits.c.used_at).limit(limit)
    # guard: no-key-is-waited-for
    return len(dialect_of(conn).sql.change(conn, Change(unused, returning=(limits.c.limit_key,))))


def _has(table: Table, *where: Condition) -> Condition:
    return exists().where(table.c.limit_key == limits.c.limit_key, *where)


# -- looking, and an operator's word -------------------------------------------------------------------------

COUNTED = 10_000
"""The most jobs of a line that are counted."""


def listing(conn: Connection, prefix: str, limit: int) -> list[LimitStatus]:
    """Return the keys with this prefix, in their order, with the rule and the counts of each.

    A key that no worker has looked at yet has no row; only its jobs have it.
    """
    begins = func.substr(limits.c.limit_key, 1, len(prefix)) == prefix
    with_row = conn.scalars(
        select(limits.c.limit_key).where(begins).order_by(limits.c.limit_key).limit(limit)
    )
    keys = sorted({*with_row, *_keys_in_line(conn, "", limit, prefix)})
    return [each for key in keys[:limit] if (each := status(conn, key))]


def status(conn: Connection, key: str) -> LimitStatus | None:
    """Return the rule and the counts of a key; None where it has no row and no jobs in line."""
    row: Any = conn.execute(_LIMITS.where(_IS_KEY), {"of": key}).one_or_none()
    running, waiting, oldest_due_at = conn.execute(_COUNTS, {"of": key}).one()
    if row is None and not waiting:
        return None
    starts = row and row.rate and row.next_free_at
    return LimitStatus(
        key,
        *(NO_RULE if row is None else _rule(row)),
        running=running,
        waiting=min(waiting, COUNTED),
        is_capped=waiting > COUNTED,
        oldest_due_at=oldest_due_at,
        next_start_seconds=max(0.0, (row.next_free_at - row.moment).total_seconds()) if starts else None,
        set_at=row and row.pinned_at,
        closed_until=row.closed_until if row and row.closed_until and row.closed_until > row.moment else None,
        is_known=row is not None,
    )


_of_key = jobs.c.limit_key == bindparam("of")


def _number(of: Condition) -> Any:
    some = select(jobs.c.id).where(_of_key, of).limit(COUNTED + 1).subquery()
    return select(func.count()).select_from(some).scalar_subquery()


_COUNTS = select(
    _number(jobs.c.blocked_by.is_(None)),
    _number(IN_LINE),
    select(func.min(jobs.c.due_at)).where(_of_key, IN_LINE, jobs.c.due_at <= now()).scalar_subquery(),
)


def pin(conn: Connection, key: str, rule: Rule) -> LimitStatus | None:
    """Override the rule of a key until its `reset`, and admit jobs by it; return its status. Raises
    `ConfigurationError` where the jobs run in order."""
    known = status(conn, key)
    if known and known.in_order:
        raise ConfigurationError(
            f"jobs of the key {key!r} run in order, one at a time, and take no other limit"
        )
    reset(conn, key, "pinned_at", rule)
    conn.execute(update(limits).where(_IS_KEY).values(pinned_at=now()), {"of": key})
    return status(conn, key)


def shut(conn: Connection, end: Wake, rule: Rule | None) -> LimitStatus | None:
    """Close a key until the time of this wake, also one without a row, and return its status. Its row has the
    tasks' rule, or the strictest where that is not known."""
    _add(conn, {end.key: rule or ONE_BY_ONE})
    close(conn, [end])
    return status(conn, end.key)


def reset(
    conn: Connection, key: str, column: Literal["pinned_at", "closed_until"], rule: Rule | None = None
) -> LimitStatus | None:
    """End the override of a key, or open it: the tasks' rule holds again, at once if `rule` is known. Return
    its status."""
    conn.execute(update(limits).where(_IS_KEY).values({column: null()}), {"of": key})
    _admit(conn, {key}, {} if rule is None else {key: rule})  # guard: a-limit-that-is-raised-is-looked-at
    notify.wake_others(conn)
    return status(conn, key)


def starving(conn: Connection, since_ms: int, limit: int) -> Sequence[Any]:
    """Return the keys of the lines in which a job has been due for that long, the longest first. Beside each
    stand the time at which its first job was due, and that job."""
    due_at = func.min(jobs.c.due_at)
    lines = (
        select(jobs.c.limit_key, due_at, func.min(jobs.c.id))
        .where(IN_LINE, jobs.c.due_at < ago(since_ms))
        .group_by(jobs.c.limit_key)
        .order_by(due_at)
        .limit(limit)
    )
    return conn.execute(lines).all()


def leader(conn: Connection, key: str, *, holds: bool) -> int | None:
    """Return the job for which a line in order waits: the first that has not ended, or with `holds` one
    before it that failed."""
    live = jobs.c.blocked_by.is_(None) | IN_LINE
    queries = [select(func.min(jobs.c.id)).where(jobs.c.limit_key == key, live)]
    if holds:
        queries.append(select(func.min(failed_jobs.c.id)).where(failed_jobs.c.limit_key == key))
    return min(filter(None, map(conn.scalar, queries)), default=None)
