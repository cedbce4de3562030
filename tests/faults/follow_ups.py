"""Counting follow-ups: each job that has finished, or failed for good, is followed once, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqlq.model.job import JobDetails
from tests.faults.scorecard import record

OUTCOMES = {"finished": "finished", "failed": "failed"}


def count_followed(guarantee: str, ended: Iterable[JobDetails], follow_ups: Iterable[JobDetails]) -> None:
    """Record how many follow-ups of these jobs are missing and how many there are too many, and demand
    none."""
    due = Counter((job.id, OUTCOMES[job.state]) for job in ended if job.state in OUTCOMES)
    arguments = [job.payload["args"][0] for job in follow_ups]
    there = Counter((argument["id"], argument["outcome"]) for argument in arguments)
    lost, doubled = due - there, there - due
    record(guarantee, cases=due.total(), follow_ups_lost=lost.total(), follow_ups_doubled=doubled.total())
    assert not lost, f"not followed: {lost}"
    assert not doubled, f"followed twice, or without reason: {doubled}"
