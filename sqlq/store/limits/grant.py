"""The starts that a limit's rule allows a key, by the clock of the database: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from math import ceil, floor
from typing import TypeAlias

from sqlq.model.checks import Rule
from sqlq.store.limits.pick import Line
from sqlq.store.limits.wakes import Wake

AHEAD = timedelta(milliseconds=100)
"""A rate grants starts this far ahead; the claim keeps the time. The key is looked at again half this time
before its next start that is not granted yet."""
MS, _US = timedelta(milliseconds=1), timedelta(microseconds=1)
Start: TypeAlias = tuple[int, datetime | None]
"""A job that is admitted, and the time of its start where that is not at once."""


@dataclass
class Grant:
    """The starts that an admission may grant to a key."""

    key: str
    rule: Rule
    moment: datetime
    next_free_at: datetime | None
    most: int
    shortest_us: int
    """The resolution of the database's timestamps in microseconds."""
    changed: bool = False
    """Whether its rule has changed."""
    ids: list[int] = field(default_factory=list)
    """The jobs that are granted a start."""

    @property
    def line(self) -> Line:
        return Line(self.key, self.rule.max_running, self.number, self.rule.in_order, self.rule.holds)

    @property
    def number(self) -> int:
        """The number of starts that the rate allows by the end of the time granted ahead."""
        interval_us = _interval_us(self.rule)
        if interval_us is None:
            return self.most
        ahead_us = (self.moment + AHEAD - self._first) // _US
        return min(self.most, max(0, ahead_us // interval_us + 1))

    @property
    def _first(self) -> datetime:
        return self.moment if self.next_free_at is None else max(self.next_free_at, self.moment)

    def start(self, place: int) -> datetime:
        """Return the time of the start at this place, counted from 0; never earlier than evenly spread
        starts."""
        us = place * (_interval_us(self.rule) or 0)
        steps = ceil(us / self.shortest_us)  # guard: a-start-is-never-early
        return self._first + steps * self.shortest_us * _US

    def starts(self) -> list[Start]:
        has_rate = self.rule.rate is not None
        return [(id, self.start(place) if has_rate else None) for place, id in enumerate(self.ids)]

    @property
    def is_used_up(self) -> bool:
        """Whether the starts are used up and this admission must schedule the next look. If it granted no
        start and changed no rule, the admission that granted the last start has scheduled it."""
        is_news = bool(self.ids) or self.changed  # guard: one-wake-for-the-next-start
        return self.rule.rate is not None and len(self.ids) == self.number and is_news

    def again(self) -> Wake:
        """Return the wake for the next look at a key whose starts are used up."""
        return Wake(self.key, moment=self.start(len(self.ids)) - AHEAD / 2)


def next_free(free_at: datetime | None, now: datetime, before: Rule, rule: Rule) -> datetime | None:
    """Return the time of a key's next free start under another rule. It counts the new rule's distance from
    the last start; under the old rule the wait might be a day."""
    before_us, interval_us = _interval_us(before), _interval_us(rule)
    if free_at is None or interval_us is None:
        return free_at
    # in whole milliseconds, and so never early; no start is granted further ahead than this
    distance = ceil(interval_us / 1000) * MS
    latest = now + AHEAD + distance
    moved = free_at if before_us is None else free_at + distance - floor(before_us) * _US
    return min(moved, latest)  # guard: the-next-start-is-by-the-new-rate


def _interval_us(rule: Rule) -> Fraction | None:
    """Return the microseconds from one start to the next; None without a rate."""
    return None if rule.rate is None else Fraction((rule.period_ms or 0) * 1000, rule.rate)
