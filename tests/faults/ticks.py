"""Ticks of schedules: which were due, which got no job, and which got two."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

import sqlq
from sqlq.admin.schedules import ScheduleDetails

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


def account(found: list[sqlq.JobDetails], wanted: dict[str, list[datetime]]) -> tuple[int, int]:
    """Return how many runs got no job, and how many jobs there are beside one for each."""
    had = Counter((job.schedule, job.scheduled_for) for job in found)
    due = [(name, moment) for name, moments in wanted.items() for moment in moments]
    lost = sum(had[each] == 0 for each in due)
    doubled = sum(number - 1 for number in had.values()) + sum(each not in set(due) for each in had)
    return lost, doubled


def moments_of(each: ScheduleDetails, since: datetime) -> list[datetime]:
    """Return the runs from some time before `since` up to where the schedule is decided."""
    assert each.plan is not None
    return each.plan.due(since - MINUTE, each.last_at)[0]
