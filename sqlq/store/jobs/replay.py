"""Replays: copies of ended jobs under new ids.

One transaction locks the row of the ended job, copies it in the database, and marks it with the replay's id.
So of several concurrent replays of one job only one succeeds, and an interrupted replay continues where it
ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    Table,
    Text,
    and_,
    case,
    cast,
    func,
    literal,
    select,
    true,
    type_coerce,
    union_all,
    update,
)

from sqlq.config.constants import HEADERS_BYTES
from sqlq.database.batch import Batch
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.model.checks import Rule
from sqlq.model.job import State
from sqlq.payload.headers import REPLAY
from sqlq.schema.tables import failed_jobs, finished_jobs, jobs
from sqlq.schema.types import Moment, after, now
from sqlq.store.jobs.lookup import Selection, possible
from sqlq.store.jobs.rows import ENDED_STATE, TABLES, in_line
from sqlq.store.limits.wakes import UNSAID, Wake, write
from sqlq.store.workers import notify

LONGEST_MARK = 1_000
"""Characters of the caller's context in the headers of a replay; a longer one is left out."""
_NOBODY: Mapping[str, str] = MappingProxyType({})
_MADE = ("id", "replay_of", "task", "queue", "label", "max_attempts")
BATCH = 500
"""Jobs in one transaction: the rows that they are copies of stay locked until it ends."""

_ENDED: tuple[tuple[Table, ColumnElement[Any], ColumnElement[Any]], ...] = (
    (finished_jobs, finished_jobs.c.finished_at, ENDED_STATE),
    (failed_jobs, failed_jobs.c.failed_at, literal(State.FAILED.value)),
)
"""The tables of ended jobs, when these ended, and their states."""

COPIED = (
    *("queue", "task", "payload", "priority", "max_attempts", "timeout_ms", "on_success", "on_failure"),
    *("headers", "label", "backoff", "retention_ms", "schedule", "scheduled_for", "limit_key"),
    "group_key",
)
"""The columns that a replay takes from the original job. It has no unique key, which stood for the original
work; no `start_by`, which is over; and no cursor."""


class Begin(NamedTuple):
    """The start of a replay by the database's clock, and the newest job at that time."""

    moment: datetime
    newest: int


def begin(conn: Connection) -> Begin:
    """Return the bounds of a replay, so that it does not replay the jobs that it enqueues itself."""
    newest = (select(func.max(table.c.id)) for table, _ in TABLES)
    ids = [conn.scalar(query) or 0 for query in newest]
    return Begin(conn.execute(select(type_coerce(now(), Moment))).scalar_one(), max(ids))


@dataclass(frozen=True, slots=True)
class Choice:
    """The ended jobs to replay. Without ids and `again` it leaves out replayed jobs and replays."""

    begin: Begin
    states: tuple[State, ...]
    selection: Selection
    since: datetime | None = None
    until: datetime | None = None
    again: bool = False

    def where(self, table: Table, ended_at: ColumnElement[Any], state: ColumnElement[Any]) -> Any:
        """Whether a job matches, replayed jobs and steps of flows included."""
        rules: list[ColumnElement[bool]] = [
            table.c.id <= self.begin.newest  # guard: a-replay-does-not-meet-itself
        ]
        rules += [] if table is failed_jobs else [state.in_([each.value for each in self.states])]
        rules.append(self.selection.where(table))
        if self.since is not None:
            rules.append(ended_at >= self.since)
        if self.until is not None:
            rules.append(ended_at < self.until)
        return and_(*rules)

    @property
    def sources(self) -> list[tuple[Table, ColumnElement[Any], ColumnElement[Any]]]:
        wants_failed = State.FAILED in self.states
        wants_finished = any(state is not State.FAILED for state in self.states)
        return [each for each in _ENDED if (wants_failed if each[0] is failed_jobs else wants_finished)]

    def is_new(self, table: Table) -> ColumnElement[bool]:
        if self.again:
            return true()
        fresh = table.c.replayed_as.is_(None)  # guard: a-job-is-replayed-once
        if self.selection.ids:
            return fresh
        return fresh & table.c.replay_of.is_(None)  # guard: replays-are-not-replayed


class Found(NamedTuple):
    """The number of jobs of a choice that will be replayed, those replayed `already`, and those that are
    `steps` of flows."""

    number: int
    already: int
    steps: int


def count(conn: Connection, choice: Choice) -> Found:
    """Count the jobs of a choice, all of them."""
    number = already = steps = 0
    for table, ended_at, state in choice.sources:
        lone = table.c.flow_id.is_(None)
        sums = (
            func.sum(case((lone & choice.is_new(table), 1), else_=0)),
            func.sum(case((lone & ~choice.is_new(table), 1), else_=0)),
            func.sum(case((lone, 0), else_=1)),
        )
        row = conn.execute(select(*sums).where(choice.where(table, ended_at, state))).one()
        number, already, steps = (
            before + int(one or 0) for before, one in zip((number, already, steps), row, strict=True)
        )
    return Found(number, already, steps)


def first(conn: Connection, choice: Choice, most: int, *, after_id: int = 0) -> list[int]:
    """Return the next ids of a choice, ascending."""
    found = [id for query in _next_of(choice, after_id, most) for id in conn.scalars(query)]
    return sorted(found)[:most]


def _next_of(choice: Choice, after_id: int, most: int) -> list[Select[Any]]:
    return [
        select(table.c.id, table.c.limit_key)
        .where(
            choice.where(table, ended_at, state),
            table.c.flow_id.is_(None),  # guard: steps-are-not-replayed
            choice.is_new(table),
            table.c.id > after_id,
        )
        .order_by(table.c.id)
        .limit(most)
        for table, ended_at, state in choice.sources
    ]


class Ended(NamedTuple):
    """An ended job that the caller named by its id."""

    state: str
    task: str
    queue: str
    payload: str
    limit_key: str | None
    flow_id: int | None
    replayed_as: int | None


def ended(conn: Connection, ids: Sequence[int]) -> tuple[dict[int, Ended], set[int]]:
    """Look for jobs by id: those that have ended, and those that are live."""
    names = ("task", "queue", "payload", "limit_key", "flow_id", "replayed_as")
    found: dict[int, Ended] = {}
    for table, _, state in _ENDED:
        query = select(table.c.id, state.label("state"), *(table.c[name] for name in names))
        found |= {row[0]: Ended(*row[1:]) for row in conn.execute(query.where(table.c.id.in_(possible(ids))))}
    live = set(conn.scalars(select(jobs.c.id).where(jobs.c.id.in_(possible(ids)))))
    return found, live


class Pace(NamedTuple):
    """When replays are due: `number` of them in each `period_ms`. `before` replays came earlier, and
    `passed_ms` have passed since the start."""

    number: int
    period_ms: int
    before: int = 0
    passed_ms: int = 0

    def delay_ms(self, place: int) -> int:
        return (place + self.before) * self.period_ms // self.number - self.passed_ms


class Made(NamedTuple):
    """A replay that was enqueued."""

    id: int
    of: int
    """The job that it is a replay of."""
    task: str
    queue: str
    label: str | None
    max_attempts: int


class Changed(NamedTuple):
    """Other arguments for a replay, and the limit whose key they make."""

    payload: str
    limit_key: str | None
    rule: Rule = UNSAID


def replay(
    conn: Connection,
    choice: Choice,
    *,
    after_id: int = 0,
    pace: Pace | None = None,
    changed: Changed | None = None,
    caller: Mapping[str, str] = _NOBODY,
) -> list[Made]:
    """Enqueue replays of the next batch of a choice; return them ordered by the id of the original job.

    A row that another transaction has locked is skipped. A replay under a limit waits in its line, as any new
    job. `caller` is the context of the operator, which goes into the headers.
    """
    dialect = dialect_of(conn)
    rows = [
        tuple(row)
        for query in _next_of(choice, after_id, BATCH)
        for row in dialect.lock(conn, query)  # guard: one-replays-it
    ]
    chosen = sorted(rows)[:BATCH]
    if not chosen:
        return []
    ids = [id for id, _ in chosen]
    rows_made = conn.execute(_copy(dialect, ids, pace, changed, caller))
    made = sorted((Made(*row) for row in rows_made), key=lambda each: each.of)
    marks = [(each.of, each.id) for each in made]
    for table, *_ in _ENDED:
        conn.execute(_mark(dialect, table), dialect.batch_parameters(_MARKS, marks))
    write(conn, _wakes(chosen, pace, changed))  # guard: a-limited-replay-is-looked-at
    notify.wake_others(conn)
    return made


def _copy(
    dialect: Dialect,
    ids: Sequence[int],
    pace: Pace | None,
    changed: Changed | None,
    caller: Mapping[str, str],
) -> Any:
    """Insert copies of jobs, in the order of their ids."""
    ended = union_all(
        *(
            select(table.c.id, *(table.c[name] for name in COPIED)).where(table.c.id.in_(ids))
            for table, *_ in _ENDED
        )
    ).subquery("ended")
    columns: dict[str, ColumnElement[Any]] = {name: ended.c[name] for name in COPIED}
    if changed is not None:
        columns |= {"payload": literal(changed.payload), "limit_key": _text_or_null(changed.limit_key)}
    columns["headers"] = _headers(ended, caller)  # guard: a-replay-says-so-in-its-headers
    due = _due(ended, pace)
    columns |= {"replay_of": ended.c.id, **in_line(columns["limit_key"].is_not(None), due)}
    made = [jobs.c[name] for name in _MADE]
    return dialect.insert(jobs, columns, order_by=ended.c.id, returning=made)


def _headers(ended: FromClause, caller: Mapping[str, str]) -> ColumnElement[Any]:
    """Return the headers of a replay: a copy of the original's. It is marked as a replay if the original or
    the caller was traced.

    The mark is added as text, since headers written by SQL may be no JSON. Such headers stay invalid, so that
    no handler gets them. A replay of a replay has the mark twice, and the last one counts. Without headers
    there is no trace to join, so none are made. Long headers stay as they are, since a character has up to
    four bytes and headers have a limit.
    """
    said = json.dumps(dict(caller))[1:]
    if len(said) > LONGEST_MARK:
        said = "}"
    text = ended.c.headers
    marked = (
        func.substr(text, 1, func.length(text) - 1)
        + literal(f', "{REPLAY}": {{"of": ')
        + cast(ended.c.id, Text)
        + literal(said if said == "}" else f", {said}")
        + literal("}")
    )
    fits = func.length(text) <= HEADERS_BYTES // 4 - LONGEST_MARK - 100
    begins = '{%"%' if caller else '{%"traceparent"%'
    return case((text.like(f"{begins}}}") & fits, marked), else_=text)


def _text_or_null(value: str | None) -> ColumnElement[Any]:
    return literal(value, jobs.c.limit_key.type)


def _due(ended: FromClause, pace: Pace | None) -> ColumnElement[Any]:
    if pace is None:
        return now()
    place = func.row_number().over(order_by=ended.c.id) - 1
    before, period, number, passed = (
        literal(value, BigInteger) for value in (pace.before, pace.period_ms, pace.number, pace.passed_ms)
    )
    return after(cast((place + before) * period // number - passed, BigInteger))


_MARKS = Batch(id=BigInteger, replay=BigInteger)


@cache
def _mark(dialect: Dialect, table: Table) -> Any:
    """Write the ids of the replays into the rows of the original jobs."""
    rows = dialect.batch_table(_MARKS)
    return update(table).values(replayed_as=rows.c.replay).where(table.c.id == rows.c.id)


def _wakes(chosen: Sequence[tuple[int, str | None]], pace: Pace | None, changed: Changed | None) -> set[Wake]:
    if changed is not None:
        return set() if changed.limit_key is None else {Wake(changed.limit_key, changed.rule)}
    return {
        Wake(key, delay_ms=0 if pace is None else max(0, pace.delay_ms(place)))
        for place, (_, key) in enumerate(chosen)
        if key is not None
    }
