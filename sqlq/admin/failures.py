"""Groups failed jobs by their error: class, task, message without its numbers, and the user's last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, NamedTuple

from sqlalchemy import Connection

from sqlq.config.json_text import AsJson
from sqlq.model.job import error_line
from sqlq.model.outcome import users_line
from sqlq.store.jobs.lookup import FailedRow, traces

PARTS = 24
"""In how many parts the time of a group's jobs is counted."""


@dataclass(frozen=True, slots=True)
class Failures(AsJson):
    """Failed jobs of one task with the same error. `error` is that of the newest, `newest` its id. `place` is
    the last line of the traceback in the user's own code, as in "shop/mail.py in send". `over_time` counts
    the jobs in equal parts of the time from the first to the last of all groups."""

    COLUMNS: ClassVar = ("number", "task", "newest", "fingerprint", "error")
    fingerprint: str
    task: str
    error: str
    place: str | None
    number: int
    newest: int
    first_at: datetime
    last_at: datetime
    over_time: tuple[int, ...]


class Mark(NamedTuple):
    """The task and fingerprint of a failed job, and the place in its traceback."""

    task: str
    fingerprint: str
    place: str | None


class Marks:
    """The marks of failed jobs. It remembers those of the rows seen last, since rows do not change, and to
    read and unpack ten thousand tracebacks takes a while."""

    def __init__(self) -> None:
        self._known: dict[FailedRow, Mark] = {}

    def of(self, conn: Connection, rows: Sequence[FailedRow]) -> dict[FailedRow, Mark]:
        """Return the mark of each row."""
        known = self._known
        new = {row.id: row for row in rows if row not in known}  # guard: tracebacks-are-read-once
        marks = {row: known[row] for row in rows if row in known}
        for id, trace in traces(conn, list(new)):
            line = users_line(trace, or_last=True)
            row = new[id]
            marks[row] = Mark(row.task, row.fingerprint, line and f"{line.file} in {line.function}")
        if len(rows) <= CACHED:
            self._known = marks if len(known) > CACHED else known | marks
        return marks


CACHED = 10_000
"""It remembers at most twice as many."""


def grouped(rows: Iterable[FailedRow], marks: Mapping[FailedRow, Mark]) -> list[Failures]:
    """Return the groups of failed jobs, the most frequent first. The rows come with the newest first."""
    groups: dict[Mark, list[FailedRow]] = {}
    for row in rows:
        if row in marks:  # else it was deleted or retried meanwhile
            groups.setdefault(marks[row], []).append(row)
    times = [row.failed_at for group in groups.values() for row in group]
    if not times:
        return []
    first = min(times)
    part = max((max(times) - first) / PARTS, timedelta(microseconds=1))
    failures = [_group(mark, group, first, part) for mark, group in groups.items()]
    return sorted(failures, key=lambda each: (-each.number, -each.newest))


def _group(mark: Mark, rows: list[FailedRow], first: datetime, part: timedelta) -> Failures:
    times = [row.failed_at for row in rows]
    counts = Counter(min(PARTS - 1, int((time - first) / part)) for time in times)
    newest = rows[0]
    return Failures(
        mark.fingerprint,
        newest.task,
        error_line(newest.reason, newest.exception, newest.message),
        mark.place,
        len(rows),
        newest.id,
        min(times),
        max(times),
        tuple(counts[i] for i in range(PARTS)),
    )
