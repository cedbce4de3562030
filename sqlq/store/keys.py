"""Texts that the database holds signed or encrypted: counts by key, and batches to rotate the keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Table,
    Text,
    Update,
    case,
    func,
    null,
    select,
    true,
    update,
)

from sqlq.database.batch import Batch
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.payload.encryption import HEAD, MARK, Kind
from sqlq.schema.tables import failed_jobs, finished_jobs, jobs, schedules

BATCH = 100
"""Rows in one transaction, with payloads of up to 1.4 MiB each."""


class Place(NamedTuple):
    """A column that holds signed or encrypted texts."""

    table: Table
    kind: Kind

    @property
    def name(self) -> str:
        return f"{self.table.name}.{self.kind}"

    @property
    def key(self) -> Column[Any]:
        """The key of a row: a schedule's name, or an id."""
        return self.table.c.name if self.table is schedules else self.table.c.id

    @property
    def text(self) -> Column[Any]:
        return self.table.c[self.kind]


WAITING = (Place(jobs, "payload"), Place(schedules, "payload"))
LIVE = (Place(jobs, "payload"), Place(failed_jobs, "payload"), Place(schedules, "payload"))
"""Texts of jobs that may still run."""
EVERYWHERE = (*LIVE, Place(finished_jobs, "payload"), Place(finished_jobs, "result"))


def _begins(text: ColumnElement[Any], beginning: str) -> ColumnElement[bool]:
    return func.substr(text, 1, len(beginning)) == beginning


class Sealed(NamedTuple):
    """The number of texts that begin with a mark, as in `e1.3f9a2c41`; None for plain ones."""

    mark: str | None
    number: int


def counts(conn: Connection, place: Place, *, within: int | None = None) -> list[Sealed]:
    """Count the texts in a place by the kind and the key of their seal. With `within`, count only in that
    many of the newest rows."""
    rows = select(place.text.label("text")).where(place.text.is_not(None))
    if within is not None:
        rows = rows.order_by(place.key.desc()).limit(within)
    some = rows.subquery()
    mark = case((_begins(some.c.text, HEAD), func.substr(some.c.text, len(HEAD) + 1, MARK)), else_=null())
    marks = select(mark.label("mark")).subquery()
    counted = select(marks.c.mark, func.count()).group_by(marks.c.mark).order_by(marks.c.mark)
    return [Sealed(*row) for row in conn.execute(counted)]


class Row(NamedTuple):
    key: Any
    task: str
    queue: str
    text: Any


def rows(
    conn: Connection,
    place: Place,
    *,
    after: Any = None,
    but: str | None = None,
    plain: bool = False,
    lock: bool = False,
) -> list[Row]:
    """Return a batch of rows with signed or encrypted texts, ordered by key. They come `after` one key, and
    their texts do not begin with `but`. With `plain` also plain texts. With `lock` it locks the rows, and
    leaves out locked ones."""
    table = place.table
    query = select(place.key, table.c.task, table.c.queue, place.text).where(
        true() if after is None else place.key > after, *_are(place, but, plain)
    )
    query = query.order_by(place.key).limit(BATCH)
    # guard: rotation-skips-the-locked
    found = dialect_of(conn).lock(conn, query) if lock else conn.execute(query)
    return [Row(*row) for row in found]


def number(conn: Connection, place: Place, *, but: str, plain: bool) -> int:
    """Return the number of rows that `rows` would find in all."""
    return int(conn.scalar(select(func.count()).where(*_are(place, but, plain))) or 0)


def _are(place: Place, but: str | None, plain: bool) -> Iterator[ColumnElement[bool]]:
    yield place.text.is_not(None)
    if not plain:
        yield _begins(place.text, HEAD)
    if but is not None:
        yield ~_begins(place.text, but)


def write(conn: Connection, place: Place, texts: Sequence[tuple[Any, str]]) -> None:
    """Write texts, by the keys of their rows."""
    dialect = dialect_of(conn)
    conn.execute(_write(dialect, place), dialect.batch_parameters(_batch(place), texts))


@cache
def _batch(place: Place) -> Batch:
    return Batch(key=Text if place.table is schedules else BigInteger, text=Text)


@cache
def _write(dialect: Dialect, place: Place) -> Update:
    given = dialect.batch_table(_batch(place))
    return update(place.table).values({place.kind: given.c.text}).where(place.key == given.c.key)
