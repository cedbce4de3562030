"""Groups failed jobs by task and error: class, message without its numbers, and the user's last line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from sqlq.config.durations import rounded
from sqlq.config.json_text import AsJson
from sqlq.model.job import error_line
from sqlq.model.outcome import users_line
from sqlq.store.jobs.failed import Group, Key, groups
from sqlq.store.jobs.lookup import Selection

PARTS = 24
"""In how many parts the time of a group's jobs is counted."""


@dataclass(frozen=True, slots=True)
class Failures(AsJson):
    """Failed jobs of one task with the same error. `error` is that of the newest, `newest` its id. `place` is
    the last line of the traceback in the user's own code, as in "shop/mail.py in send". `over_time` counts
    the jobs in equal parts of the time from the first to the last of all groups. Beyond 100,000 jobs `number`
    is an estimate, and `estimated` names it. `over_time` of many jobs comes from a sample."""

    COLUMNS = ("number", "first=first_at", "last=last_at", "task", "newest", "fingerprint", "error")
    fingerprint: str
    task: str
    error: str
    place: str | None
    number: int
    newest: int
    first_at: datetime
    last_at: datetime
    over_time: tuple[int, ...]
    estimated: tuple[str, ...] = ()


def grouped(conn: Connection, only: Selection) -> tuple[list[Failures], bool]:
    """Return the groups of the failed jobs selected, the most frequent first, and whether these are all."""
    by_key, is_complete = groups(conn, only)
    by_error: dict[Key, list[Group]] = defaultdict(list)
    for key, group in by_key.items():
        by_error[key[1:]].append(group)
    ends = [end for group in by_key.values() for end in _times(group)]
    first = min(ends, default=None)
    if first is None:
        return [], is_complete
    part = max((max(ends) - first) / PARTS, timedelta(microseconds=1))
    failures = [_failures(key, queues, first, part) for key, queues in by_error.items()]
    return sorted(failures, key=lambda each: (-each.number, -each.newest)), is_complete


def _times(group: Group) -> list[datetime]:
    """Return the times known of a group; the sample may not have the newest."""
    return [*group.times, group.newest.failed_at]


def _failures(key: Key, queues: Sequence[Group], first: datetime, part: timedelta) -> Failures:
    """Return a group, from the jobs in each queue."""
    counts: Counter[int] = Counter()
    for group in queues:
        parts = Counter(min(PARTS - 1, int((time - first) / part)) for time in group.times)
        counts.update({i: round(number * group.number / parts.total()) for i, number in parts.items()})
    newest = max(group.newest for group in queues)
    number, is_estimate = sum(group.number for group in queues), any(group.is_estimate for group in queues)
    ends = [end for group in queues for end in _times(group)]
    line = users_line(newest.traceback, or_last=True)
    return Failures(
        key[1],
        key[0],
        error_line(newest.reason, newest.exception, newest.message),
        line and f"{line.file} in {line.function}",
        rounded(number) if is_estimate else number,
        newest.id,
        min(ends),
        max(ends),
        tuple(counts[i] for i in range(PARTS)),
        ("number",) if is_estimate else (),
    )
