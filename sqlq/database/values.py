"""The values that the methods of a `Sql` or `Driver` take and return."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement

from sqlq.model.job import ClaimedJob
from sqlq.schema.tables import TOKEN_SCHEMA, attempts_allowed, jobs
from sqlq.schema.types import epoch_ms, since_ms

_COMPUTED: dict[str, ColumnElement[Any]] = {
    "max_attempts": attempts_allowed,
    "unknown_ms": since_ms(jobs.c.unknown_since),
    "due_ms": epoch_ms(jobs.c.available_at),
    "scheduled_ms": epoch_ms(jobs.c.scheduled_for),
    "late_ms": since_ms(jobs.c.start_by),
}
CLAIMED = tuple(
    _COMPUTED[name].label(name) if name in _COMPUTED else jobs.c[name] for name in ClaimedJob._fields
)
"""The fields of `ClaimedJob`, in their order."""


def claimed_columns(dialect: Any, **changed: str) -> str:
    """Return `CLAIMED` as a list of SQL columns, for the claim that is written by hand. `changed` has the SQL
    of those that the claim changes."""
    return ", ".join(
        changed.get(column.name) or re.sub(rf"`?{TOKEN_SCHEMA}`?\.", "", str(column.compile(dialect=dialect)))
        for column in CLAIMED
    )


QueuePosition = tuple[str, int, int, int]
"""A queue, a priority in it, and the due time (µs since 1970) and id of the last job that a claim took
there."""


ClaimOrder = Literal["oldest", "newest", "evenly"]
"""Which jobs a claim takes first in a queue. With "evenly" the oldest, and no queue comes before another."""


LARGEST_WINDOW = 1_000
"""The most queues that a look reads beside the known ones."""


RawRows = Sequence[Sequence[Any]]
"""Rows as a driver takes or returns them."""
Execute = Callable[[str, Any], RawRows]
"""Runs a statement that names the token schema, with its parameters as the driver takes them. It returns the
rows."""


class Session(NamedTuple):
    """A session whose open transaction keeps the server from removing old rows. `program` is its name, or its
    account."""

    number: int
    program: str
    state: str
    seconds: float
    query: str = ""


class Problem(NamedTuple):
    """The meaning of a database error. All are False for an error of another kind."""

    is_away: bool
    """The database, or the way to it, is away for now, so that waiting is the remedy."""
    rolled_back: bool
    """The database undid the whole transaction for a reason that may have passed at the next run."""
    refused: bool
    """The database answers, and refuses this one statement: for want of a right, for example. It will refuse
    it again until an operator changes something."""
    takes_no_writes: bool
    """The database answers, but takes no writes for now: it only reads, or its disk is full."""
    only_reads: bool = False
    """It takes no writes because another server does, as the primary of a standby."""
    has_no_room: bool = False
    """The database undid the whole transaction for want of room, perhaps for notifications."""
    is_useless: bool = False
    """The connection is useless after this error, which SQLAlchemy does not know."""
    advice: str | None = None
    """The reason and the remedy of a refused write; None where the database's own message suffices."""

    @property
    def passes(self) -> bool:
        """Whether the same statement may succeed later."""
        return self.is_away or self.rolled_back


class ClaimRequest(NamedTuple):
    """The queues of a claim, how many jobs it may take, and in which order. With `positions` it takes the
    oldest jobs behind these, and reads none before them."""

    queues: Sequence[str]
    limit: int
    order: ClaimOrder = "oldest"
    positions: Sequence[QueuePosition] = ()


class Claimant(NamedTuple):
    """The owner of a claim, and the attempts of each task as JSON. The claim writes them into rows without
    any, since a rescue needs them."""

    owner: str
    lease_ms: int
    max_attempts: str = "{}"


class LookRequest(NamedTuple):
    """The parameters of a poll. `names` and `after` are as `Sql.due_in` takes them. A host counts that
    had a heartbeat within this time. With `maintenance` it polls for the maintenance services, too; it reads
    the requests to these `workers`."""

    names: list[str]
    after: str | None
    channel: str
    hosts_within_ms: int | None
    maintenance: bool
    workers: list[str]


class Rows(NamedTuple):
    """The rows of the table jobs by the database's own estimate, and when they were vacuumed last."""

    live: int
    dead: int
    vacuumed_at: datetime | None


@dataclass(frozen=True, slots=True)
class TableSize:
    """One of our tables: estimates of its rows, its bytes on disk, and those of its largest indexes. None
    for what this database does not count."""

    COLUMNS = (
        *("table=name", "rows", "dead=dead_rows", "size=bytes", "indexes=index_bytes"),
        *("vacuumed=vacuumed_at", "largest indexes=largest_indexes"),
    )
    name: str
    rows: int | None
    dead_rows: int | None
    bytes: int
    index_bytes: int
    vacuumed_at: datetime | None = None
    largest_indexes: Mapping[str, int] | None = None


class Burden(NamedTuple):
    """The causes of a slow database. None for what it does not have, or the role may not see."""

    rows: Rows | None = None
    oldest_transaction_seconds: float | None = None
    wal_bytes: int | None = None
    unpurged_transactions: int | None = None
    behind_seconds: float | None = None
    """How far a replica is behind, where this is one and that is known."""
