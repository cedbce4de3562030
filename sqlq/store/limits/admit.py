"""Limits: choose the jobs in the line of a limit that may run now (a semaphore for each key).

A slot is a row: an unblocked job with the key, from its admission until it ends or is released. So a slot
lives and dies with its job, and no crash can lose or double one. One statement locks a key, and a second one
counts its rows, to include the commits during the wait for the lock. Keys are locked in ascending order, so
that two admissions cannot deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Table,
    bindparam,
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
from sqlq.schema.types import Moment, ago, far, now, since_ms
from sqlq.store.apart import apart, noted
from sqlq.store.limits.grant import (
    AHEAD,
    IN_LINE,
    MAY_START,
    MS,
    NO_RULE,
    PAUSED,
    Grant,
    Start,
    Wake,
    next_free,
    pick,
    wake,
)
from sqlq.store.workers import notify, workers

WAKES_AT_ONCE = 500
KEYS_AT_ONCE = 500
JOBS_AT_ONCE = 1_000
ONE_BY_ONE = Rule(max_running=1, in_order=True)


# -- looks ---------------------------------------------------------------------------------------------------


@dataclass
class FreedJobs:
    """The effect of a call that frees jobs: their number, and the delays in milliseconds of those that start
    later. `keys` are to be freed again at once. `has_more` is True where more remains without a key."""

    number: int = 0
    starts_ms: list[float] = field(default_factory=list)
    keys: set[Any] = field(default_factory=set)
    has_more: bool = False


class Served:
    """The queues that workers serve, read at most once in `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._read_at = float("-inf")
        self._names: list[str] | None = None

    def names(self, conn: Connection) -> list[str] | None:
        """Return them; None where one worker serves all queues, or no worker is alive."""
        now = time.monotonic()
        if now - self._read_at >= self._seconds:
            self._names, self._read_at = workers.served(conn), now
        return self._names


def look(
    database: Database,
    keys: Collection[str] = (),
    *,
    limit: int = WAKES_AT_ONCE,
    served: Served | None = None,
) -> FreedJobs:
    """Take at most `limit` due wakes, and admit jobs of their keys and of the given ones (at most
    `KEYS_AT_ONCE`).

    One transaction: a crash leaves the wakes as they were. Jobs of queues that are paused, or that no worker
    serves, stay in line.
    """
    with database.begin() as conn:
        return look_on(conn, keys, limit=limit, served=served)


def look_on(
    conn: Connection, keys: Collection[str], *, limit: int, served: Served | None = None
) -> FreedJobs:
    """Do the same in the open transaction."""
    taken = dialect_of(conn).sql.change(conn, _TAKE, {"most": limit}) if limit else []
    rules = _rules_of(taken)
    all_keys = {*keys, *(wake.limit_key for wake in taken)}
    if len(taken) == limit > 0:  # guard: old-wakes-hold-up-no-new-ones
        # They stay, since the rules of older wakes must not undo theirs.
        newest = conn.execute(_NEWEST, {"most": limit}).all()
        unknown = _without_row(conn, [*{wake.limit_key for wake in newest}])
        rules = {key: rule for key, rule in _rules_of(newest).items() if key in unknown} | rules
        all_keys.update(wake.limit_key for wake in newest)
    done = _admit(conn, all_keys, rules, served or Served())
    done.has_more = done.has_more or (limit > 0 and len(taken) == limit)
    return done


_LIMIT = bindparam("most", type_=Integer)


def next_wake_ms(database: Database) -> float | None:
    """Return the milliseconds until the next wake is due; None where there is none."""
    with database.single_statements() as conn:
        since = conn.scalar(_NEXT_WAKE)
    return None if since is None else -float(since)


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


def _admit(conn: Connection, keys: Collection[str], rules: dict[str, Rule], served: Served) -> FreedJobs:
    """Admit jobs of these keys, about a thousand at most, by the rules of the wakes and of the keys' rows."""
    done = FreedJobs()
    if not keys:
        return done
    dialect = dialect_of(conn)
    limit = max(1, JOBS_AT_ONCE // len(keys))
    grants = {grant.key: grant for grant in _grants(conn, dialect, sorted(keys), rules, limit)}
    if gone := rules.keys() - grants.keys():  # deleted just now: the next look makes its row anew
        wake(conn, [Wake(key, rules[key]) for key in sorted(gone)])  # guard: wake-keeps-its-rule
        done.has_more = True
    for id, key in pick(conn, grants.values(), served.names(conn)):
        grants[key].ids.append(id)
    used = [grant for grant in grants.values() if grant.ids]

    def admit(starts: Sequence[Start]) -> None:
        conn.execute(_admit_at(dialect), dialect.sql.batch_parameters(_STARTS, starts))

    def refuse(start: Start, error: Exception) -> None:
        noted(conn, MAY_START)(start, error)
        done.keys |= {grant.key for grant in used if start[0] in grant.ids}

    starts = [start for grant in used for start in grant.starts()]
    done.number = len(apart(starts, admit, refuse, dialect, within=conn))
    done.starts_ms = [(at - grant.now) / MS for grant in used for _, at in grant.starts() if at]
    if rated := [grant for grant in used if grant.rule.rate is not None]:
        conn.execute(_CHANGE, [_changed(key.key, key.rule, key.start(len(key.ids))) for key in rated])
    free = [grant.key for grant in used if grant.rule.rate is None]
    if free and dialect.locks_on_one_node:  # of two nodes' admissions the second one's COMMIT then fails
        conn.execute(_USED, {"keys": free})
    wake(conn, (grant.again() for grant in grants.values() if grant.is_used_up))
    done.keys |= {grant.key for grant in used if len(grant.ids) == limit and not grant.rule.in_order}
    return done


def _grants(
    conn: Connection, dialect: Dialect, keys: Sequence[str], rules: dict[str, Rule], limit: int
) -> Iterator[Grant]:
    """Lock the rows of these keys, write the wakes' rules into them, and yield a grant for each. A key
    without a row is left to a sweep."""
    _add(conn, dialect, rules)
    rows = dialect.sql.lock(conn, _LOCK, {"keys": list(keys)}, waits=True)  # guard: a-key-is-waited-for
    if unused := [row.limit_key for row in rows if row.moment - row.used_at > timedelta(days=1)]:
        conn.execute(_USED, {"keys": unused})  # guard: a-key-in-use-is-not-forgotten
    resolution_us = 1_000 if dialect.in_a_file else 1
    for row in rows:
        rule, next_free_at, changed = _rule(row), row.next_free_at, False
        new_rule = rules.get(row.limit_key, rule)
        if row.pinned_at is not None:  # guard: pinned-limit-overrides-code
            # except the order, which was unknown if the operator set the key before its first job
            in_order = new_rule.in_order  # guard: what-is-set-keeps-the-order
            new_rule = new_rule._replace(rate=rule.rate, period_ms=rule.period_ms) if in_order else rule
        if new_rule != rule:
            rule, changed = new_rule, True
            next_free_at = _change(conn, row, rule)
        yield Grant(row.limit_key, rule, row.moment, next_free_at, limit, resolution_us, changed)


def _change(conn: Connection, row: Any, rule: Rule) -> datetime | None:
    """Give a key, whose row is locked, another rule; return the time of its next free start."""
    next_free_at = next_free(row.next_free_at, row.moment, _rule(row), rule)
    conn.execute(_CHANGE, _changed(row.limit_key, rule, next_free_at))
    return next_free_at


def _changed(key: str, rule: Rule, next_free_at: datetime | None) -> dict[str, Any]:
    return {"of": key, "at": next_free_at, **rule._asdict()}


def _add(conn: Connection, dialect: Dialect, rules: Mapping[str, Rule]) -> None:
    """Insert a row for each of these keys that has none. This comes before any row lock, and in the order of
    keys, so that two concurrent calls cannot deadlock."""
    if rows := [{"limit_key": key, **rules[key]._asdict()} for key in sorted(rules)]:
        conn.execute(dialect.sql.upsert(limits, _KEY), rows)


def _without_row(conn: Connection, keys: Collection[str]) -> list[str]:
    known = set(conn.scalars(_KNOWN, {"keys": list(keys)}))
    return [key for key in keys if key not in known]


def _unknown(conn: Connection, keys: Collection[str]) -> dict[str, Rule]:
    """Return the rules of keys that have no row, from their wakes. Keys without a wake, whose jobs SQL
    inserted, run one job after the other, which is stricter than any limit."""
    unknown = _without_row(conn, keys)
    rules = _rules_of(conn.execute(_WAKES_OF, {"keys": unknown})) if unknown else {}
    return {key: rules.get(key, ONE_BY_ONE) for key in unknown}  # guard: an-unknown-limit-is-the-strictest


_KEY = Key(("limit_key",))
_KEYS: Any = bindparam("keys", expanding=True)
_LIMITS = select(limits, now().label("moment")).order_by(limits.c.limit_key)
_LOCK = _LIMITS.where(limits.c.limit_key.in_(_KEYS))
_KNOWN = select(limits.c.limit_key).where(limits.c.limit_key.in_(_KEYS))
_WAKES_OF = select(wakes).where(wakes.c.limit_key.in_(_KEYS))
_USED = update(limits).where(limits.c.limit_key.in_(_KEYS)).values(used_at=now())
_CHANGE = (
    update(limits)
    .where(limits.c.limit_key == bindparam("of"))
    .values(
        {name: bindparam(name) for name in Rule._fields} | {"next_free_at": bindparam("at", type_=Moment)}
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


def sweep(database: Database, after_key: str, limit: int = KEYS_AT_ONCE) -> tuple[FreedJobs, str | None]:
    """Take slots from jobs that no worker may claim, and admit jobs of the next keys with a line. Return the
    key to continue from; None at the end.

    It finds the lines whose wake was lost with a process, and those that never had a wake.
    """
    with database.begin() as conn:
        keys, freed = sweep_on(conn, after_key, limit)
    done = look(database, {*keys, *freed}, limit=0) if keys or freed else FreedJobs()
    done.has_more = done.has_more or len(freed) >= JOBS_AT_ONCE  # guard: full-sweep-is-repeated
    return done, keys[-1] if len(keys) == limit else None


def sweep_on(conn: Connection, after_key: str, limit: int) -> tuple[list[str], list[str]]:
    """Return the next keys with a line, and the keys of freed slots, once for each slot. Each key with a line
    now has a row."""
    dialect = dialect_of(conn)
    in_vain = [jobs.c.queue.in_(PAUSED)]
    if (served := workers.served(conn)) is not None:  # guard: unserved-hold-no-slots
        in_vain.append(jobs.c.queue.not_in(served))
    freed = [row.limit_key for each in in_vain for row in dialect.sql.change(conn, _back_into_line(each))]
    keys = _keys_in_line(conn, after_key, limit)
    if keys:
        _add(conn, dialect, _unknown(conn, keys))
    return keys, freed


def _keys_in_line(conn: Connection, after: str, limit: int, prefix: str = "") -> list[str]:
    """Return the next keys with a line."""
    parameters = {"after": after, "most": limit, "prefix": prefix, "length": len(prefix)}
    statement = dialect_of(conn).sql.lines.format(begins=BEGINS if prefix else "")
    return [*run_text(conn, statement, **parameters).scalars()]


_holds_a_slot = jobs.c.limit_key.is_not(None) & jobs.c.blocked_by.is_(None)
_ANY = select(or_(*(exists(select(jobs.c.id).where(each)) for each in (IN_LINE, _holds_a_slot))))


def _back_into_line(in_vain: Condition) -> Change:
    """Return the change that takes slots from jobs that wait for a worker in vain."""
    waiting_in_vain = (
        select(jobs.c.id).where(_holds_a_slot, IS_UNRESERVED, in_vain).order_by(jobs.c.id).limit(JOBS_AT_ONCE)
    )
    # guard: paused-hold-no-slots
    back = {
        "due_at": func.coalesce(jobs.c.due_at, jobs.c.available_at),
        "available_at": far(),
        "blocked_by": "limit",
    }
    return Change(waiting_in_vain, back, returning=(jobs.c.limit_key,))


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
    next_free_at = limits.c.next_free_at
    unused = select(limits.c.limit_key).where(
        limits.c.used_at < ago(unused_ms),
        limits.c.pinned_at.is_(None),  # guard: what-is-set-is-not-forgotten
        next_free_at.is_(None) | (next_free_at < now()),  # guard: rates-are-not-forgotten
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
    rows = {row.limit_key: row for row in conn.execute(_LIMITS.where(begins).limit(limit))}
    keys = sorted({*rows, *_keys_in_line(conn, "", limit, prefix)})
    return [_status(conn, key, rows.get(key)) for key in keys[:limit]]


def _status(conn: Connection, key: str, row: Any) -> LimitStatus:
    """Return the counts of a key and the rule in its row; `row` is None before a worker's first look at the
    key."""

    def counted(*where: Any) -> int:
        some = select(jobs.c.id).where(jobs.c.limit_key == key, *where).limit(COUNTED + 1).subquery()
        return int(conn.scalar(select(func.count()).select_from(some)) or 0)

    waiting = counted(IN_LINE)
    oldest = select(func.min(jobs.c.due_at)).where(jobs.c.limit_key == key, IN_LINE, jobs.c.due_at <= now())
    starts = row is not None and row.rate is not None and row.next_free_at is not None
    return LimitStatus(
        key,
        *(NO_RULE if row is None else _rule(row)),
        running=counted(jobs.c.blocked_by.is_(None)),
        waiting=min(waiting, COUNTED),
        is_capped=waiting > COUNTED,
        oldest_due_at=conn.scalar(oldest),
        next_start_seconds=max(0.0, (row.next_free_at - row.moment).total_seconds()) if starts else None,
        set_at=row and row.pinned_at,
        is_known=row is not None,
    )


def status(conn: Connection, key: str) -> LimitStatus | None:
    """Return the rule and the counts of a key; None where it has no row."""
    row = conn.execute(_LIMITS.where(limits.c.limit_key == key)).one_or_none()
    return None if row is None else _status(conn, key, row)


def pin(conn: Connection, key: str, rule: Rule) -> LimitStatus | None:
    """Override the rule of a key until `unpin`, and schedule a look at it; return its status. The order of
    jobs stays. Raises `ConfigurationError` for more than one running job where they run in order."""
    known = status(conn, key)
    if known is not None and known.in_order:
        if rule.max_running not in (None, 1):
            raise ConfigurationError(
                f"running is {rule.max_running}: jobs of the key {key!r} run in order, one at a time; leave "
                "it out, and set a rate"
            )
        rule = rule._replace(max_running=1, in_order=True, holds=known.holds)
    values = {"limit_key": key, **rule._asdict(), "pinned_at": now()}
    conn.execute(dialect_of(conn).sql.upsert(limits, _KEY, values, lambda new: {"pinned_at": now()}))
    wake(conn, _set(conn, key, rule))  # guard: a-limit-that-is-raised-is-looked-at
    notify.wake_others(conn)
    return status(conn, key)


def unpin(conn: Connection, key: str, rule: Rule | None) -> LimitStatus | None:
    """End the override of a key: the tasks' rule holds again, at once if `rule` is known. Return its
    status."""
    conn.execute(update(limits).where(limits.c.limit_key == key).values(pinned_at=null()))
    wake(conn, [Wake(key)] if rule is None else _set(conn, key, rule))
    notify.wake_others(conn)
    return status(conn, key)


def _set(conn: Connection, key: str, rule: Rule) -> set[Wake]:
    """Give a key another rule; return the wakes for it: now, and before its next start."""
    again = {Wake(key)}
    for row in dialect_of(conn).sql.lock(conn, _LOCK, {"keys": [key]}, waits=True):
        next_free_at = _change(conn, row, rule)
        if next_free_at is not None and rule.rate is not None:
            again.add(Wake(key, moment=next_free_at - AHEAD / 2))
    return again


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


def leads(conn: Connection, key: str) -> int | None:
    """Return the job for which a line in order waits: one that failed, or the first that has not ended."""
    live = jobs.c.blocked_by.is_(None) | IN_LINE
    head = conn.scalar(select(func.min(jobs.c.id)).where(jobs.c.limit_key == key, live))
    if head is None:
        return None
    before = select(func.min(failed_jobs.c.id)).where(
        failed_jobs.c.limit_key == key,
        failed_jobs.c.id < head,
        exists().where(limits.c.limit_key == key, limits.c.holds.is_(True)),
    )
    return int(conn.scalar(before) or head)
