"""The history of a job as `sqlq show` prints it: two lines for each attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.output import plain, show_heading, show_wrapped
from sqlq.config.durations import counted, span, written

if TYPE_CHECKING:
    from sqlq.model.history import AttemptRecord
    from sqlq.model.job import JobDetails

WORDS = {
    "put_back": "put back by an operator",
    "cancel_requested": "asked to stop",
    "released": "released, uncounted",
    "snoozed": "snoozed, uncounted",
}
"""Outcomes that are printed in other words."""


def show_history(context: Context, job: JobDetails) -> None:
    """Print the history of a job that has more than the one attempt of the fields above."""
    lines = len(job.history)
    if lines == 0 or (lines == 1 and job.state not in ("blocked", "scheduled", "available")):
        return
    click.echo()
    show_heading("history")
    hosts = _hosts(context, job)
    for line in job.history:
        unnumbered = "–" if line.outcome in ("put_back", "cancel_requested", "cancelled") else "?"
        attempt = unnumbered if line.attempt is None else str(line.attempt)
        moment = line.claimed_at if line.outcome == "running" else line.ended_at
        at = "?" if moment is None else written(moment)
        show_wrapped(f"{attempt:>3}  {at}  ", _said(line), before="  ")
        if course := ", ".join(_course(line, hosts)):
            show_wrapped("     ", course, before="  ")
    told = sum(line.outcome in ("released", "snoozed") for line in job.history)
    if told and job.releases > told:
        more = counted(job.releases - told, "time")
        show_wrapped("     ", f"released {more} more, without a line of their own", before="  ")


def _said(line: AttemptRecord) -> str:
    """Return the outcome of an attempt in one line; a worker may have written anything."""
    word = WORDS.get(line.outcome, line.outcome)
    if line.outcome == "released" and line.started_at is None:
        word = "released before it started"
    reason = line.reason if line.reason not in (None, "error", "worker_lost") else None
    first = (line.message or "").strip().splitlines()[:1]
    said = [word, *(plain(part) for part in (reason, line.exception, *first) if part)]
    return ": ".join(said)


def _course(line: AttemptRecord, hosts: dict[str, str]) -> list[str]:
    said = []
    if line.claimed_at is not None and line.outcome != "running":
        said.append(f"claimed {written(line.claimed_at)}")
    if line.started_at is not None:
        if line.claimed_at is not None:
            said.append(f"started after {span((line.started_at - line.claimed_at).total_seconds())}")
        if line.ended_at is not None:
            said.append(f"ran {span((line.ended_at - line.started_at).total_seconds())}")
    elif line.claimed_at is not None and line.ended_at is not None:
        said.append(f"ended after {span((line.ended_at - line.claimed_at).total_seconds())}")
    host = line.host or hosts.get(line.worker or "")
    if host is not None:
        said.append(f"on {plain(host)}")
    elif line.worker is not None:
        said.append(f"by worker {plain(line.worker)}")
    return said


def _hosts(context: Context, job: JobDetails) -> dict[str, str]:
    """Return host and process of the workers, by their ids: as the lines have it, or those that are known."""
    found = {line.worker: line.host for line in job.history if line.worker and line.host}
    if all(line.worker is None or line.worker in found for line in job.history):
        return found
    workers = context.looking().workers.list(silent=True)
    return {worker.id: f"{worker.host} pid {worker.pid}" for worker in workers} | found
