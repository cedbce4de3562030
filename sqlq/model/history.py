"""The history of a job: a line for each attempt that is over, and for each retry by an operator.

An attempt that failed, was lost or was released leaves its line in the job's row, as JSON in the column
`errors`. The statement that returns the job to the queue writes the line, too: it writes that row anyway. The
line of the last attempt is not stored. The row of the ended job has its data: a job that finishes in its
first attempt costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args

AttemptOutcome = Literal[
    "finished",
    "cancelled",
    "failed",
    "lost",
    "released",
    "snoozed",
    "put_back",
    "cancel_requested",
    "running",
]
Note = Literal["released", "snoozed", "put_back", "cancel_requested"]
"""The kinds of lines that are no error."""
NOTES: tuple[str, ...] = get_args(Note)


class AttemptTimes(NamedTuple):
    """The times of an attempt, and its worker, as far as the writer of its line knows them."""

    claimed_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    worker: str | None = None
    host: str | None = None

    @property
    def start_ms(self) -> int | None:
        """How long after its claim it was started, None where it was not."""
        if self.claimed_at is None or self.started_at is None:
            return None
        return max(0, (self.started_at - self.claimed_at) // _MILLISECOND)


UNKNOWN = AttemptTimes()
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One line of a job's history: an attempt, or a retry by an operator.

    `outcome` is how the attempt ended: `finished`, `cancelled`, `failed` (also where another attempt
    followed), `lost`, `released` or `snoozed`. The worker of a `lost` one died, or did not renew its lease. A
    `released` one was returned to the queue by its worker, uncounted. The attempt that goes on is `running`.
    `put_back` is no attempt: an operator
    has retried the failed job. Nor is `cancel_requested`: somebody has cancelled it, with a `reason`.
    `attempt` is its number, as the job counted them then.

    Times carry their time zone. They are by the clock of the line's writer, and decide nothing. An unknown
    value is None, as is `started_at` of a lost attempt. `worker` is the id of the worker, `host` its host and
    process. `reason`, `exception` and `message` are of its error. The line of an ended job's last attempt is
    by the database's clock. `started_at` is not kept where a job's first claim finished it.

    >>> [line.outcome for line in app.jobs.get(42).history]  # doctest: +SKIP
    ['failed', 'lost', 'snoozed', 'finished']
    """

    outcome: AttemptOutcome
    attempt: int | None = None
    claimed_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    worker: str | None = None
    host: str | None = None
    reason: str | None = None
    exception: str | None = None
    message: str | None = None

    @property
    def seconds(self) -> float | None:
        """The time from its start, or else its claim, to its end; None where one is unknown."""
        begin = self.started_at or self.claimed_at
        return None if begin is None or self.ended_at is None else (self.ended_at - begin).total_seconds()


def written(attempts: int | None, values: Mapping[str, Any], course: AttemptTimes) -> str:
    """Return a line as the row has it: one JSON object, without unknown values."""
    line = {
        "attempt": attempts,
        "at": _text(course.ended_at or datetime.now(UTC)),
        **values,
        "claimed_at": _text(course.claimed_at),
        "started_at": _text(course.started_at),
        # SQLite lets in bytes
        "worker": None
        if course.worker is None
        else str(course.worker),  # guard: a-line-names-its-worker-in-text
        "host": course.host,
    }
    return json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)


def note(attempts: int | None, note: Note, course: AttemptTimes = UNKNOWN, reason: str | None = None) -> str:
    """Return the line of an attempt that did not count, or of an operator, as the row has it."""
    return written(attempts, {"note": note, "reason": reason}, course)


def is_error(record: Mapping[str, Any]) -> bool:
    """Whether a record is of an attempt that failed, and not a note. A record that another program has
    written is an error."""
    return record.get("note") not in NOTES


def read(record: Mapping[str, Any]) -> AttemptRecord:
    """Return the line that a record stands for. Another program may have written it: values of another kind
    are left out."""
    outcome: Any = record.get("note")
    if is_error(record):
        outcome = "lost" if record.get("reason") == "worker_lost" else "failed"
    number = record.get("attempt")
    times: list[Any] = [_time(record.get(name)) for name in ("claimed_at", "started_at", "at")]
    texts = (record.get(name) for name in ("worker", "host", "reason", "exception", "message"))
    return AttemptRecord(
        outcome,
        number if isinstance(number, int) else None,
        *times,
        *(None if text is None else str(text) for text in texts),
    )


def started_at(claimed_at: datetime | None, start_ms: int | None) -> datetime | None:
    """Return when an attempt was started, from the time since its claim."""
    return None if claimed_at is None or start_ms is None else claimed_at + start_ms * _MILLISECOND


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat(timespec="milliseconds")


def _time(text: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return time if time.tzinfo is not None else None
