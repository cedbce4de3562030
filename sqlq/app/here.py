"""Jobs and flows that run where they are enqueued, with their states and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlq.model.flow import GROWN_FROM, Growth, OnOutcome, Plan
from sqlq.model.job import ClaimedJob, Job, JobDetails, NewJob, State
from sqlq.model.outcome import NOT_NEEDED
from sqlq.model.retry import describe
from sqlq.model.task import AnyTask
from sqlq.results.results import JobRunHere
from sqlq.store.flows.flows import Before
from sqlq.store.jobs.lookup import Seen
from sqlq.worker.attempt.own_row import completion


class Wait(NamedTuple):
    """The end of a wait for a signal, as its row has it."""

    name: str
    outcome: str
    value: str | None


@dataclass
class InlineJob:
    """A job that runs where it is enqueued, in eager mode or in a block of `sqlq.testing.inline`.

    Where it waits for a commit its state is `available` until then. When it has `failed`, `error` is the
    exception that reaches the caller.
    """

    id: int
    new: NewJob
    task: AnyTask
    state: State = State.AVAILABLE
    attempts: int = 0
    result: Any = None
    error: BaseException | None = None
    reason: str | None = None
    """Why it was cancelled."""
    cursor: str | None = None
    """The cursor of its last checkpoint, as JSON."""
    replaced = False
    """Whether the last job that was enqueued with its unique key took its place."""
    flow_id: int | None = None
    before: list[Before] | None = None
    """The steps before it, where it is a step of a flow."""
    grown: Growth | None = None
    """The steps that its handler has added to that flow."""
    enqueued_at: datetime = field(default_factory=lambda: datetime.now(UTC), repr=False)
    attempted_at: list[datetime] = field(default_factory=list, repr=False)
    """When each of its attempts has begun."""
    ended_at: datetime | None = field(default=None, repr=False)
    signal: str | None = None
    """The signal for which it waits, as a step or by `WaitFor`, for `timeout_ms`."""
    timeout_ms: int | None = None
    until_ms: float | None = None
    """When that time is over, by the clock of the test."""
    wait: Wait | None = None
    """How its last wait has ended, for the next attempt."""
    waits: list[tuple[InlineJob, OnOutcome]] = field(default_factory=list, repr=False)
    """The jobs for whose end it waits, and how they have to end."""

    def answer(self, *, created: bool) -> Job:
        """Return the answer of `enqueue`."""
        return JobRunHere(
            self.id,
            self.new.queue,
            self.new.task,
            self.state,
            created=created,
            replaced=self.replaced and not created,
            seen=self.seen,
        )

    def seen(self) -> Seen:
        """Return its state and result, as its row would have them."""
        row = (self.id, self.state, self.new.queue, self.new.task, self.attempts)
        if self.state is State.FAILED and self.error is not None:
            error = describe(self.error)
            return Seen(*row, None, "error", error.exception, error.message, error.traceback)
        if self.state is not State.FINISHED:
            return Seen(*row, None, self.reason)
        done = completion(self.result, self.claimed(), self.task)
        return Seen(*row, done.result, done.note)

    def claimed(self) -> ClaimedJob:
        """Return the job as a worker would hold it in the attempt that has begun."""
        new = self.new
        return ClaimedJob(
            self.id,
            self.attempts,
            new.queue,
            new.task,
            new.payload,
            self.attempts,
            new.max_attempts or self.task.max_attempts,
            on_success=new.on_success,
            on_failure=new.on_failure,
            label=new.label,
            headers=new.headers_text,
            cursor=self.cursor,
            flow_id=self.flow_id,
        )

    def holds(self, queue: str, key: str | None) -> bool:
        """Whether it holds a unique key: until "start", none that runs holds it."""
        is_live = self.state is State.AVAILABLE or (
            self.state is State.RUNNING and self.new.unique_until != "start"
        )
        return is_live and (self.new.queue, self.new.unique_key) == (queue, key)

    def as_before(self, when: OnOutcome) -> Before:
        """Return the job as a step that comes after it knows it."""
        row = self.seen()
        if self.state is State.FINISHED:
            return Before(self.id, self.new.task, row.result, row.reason)
        if when == "either" or self.reason == NOT_NEEDED:
            return Before(self.id, self.new.task, None, None)
        return Before(self.id, self.new.task, None, f"job {self.id} ({self.new.task}) is {self.state}")

    def details(self) -> JobDetails:
        """Return the answer of `app.jobs.get`."""
        new, row = self.new, self.seen()
        values = {
            **vars(new),
            **row._asdict(),
            "payload": json.loads(new.payload),
            "result": row.result and json.loads(row.result),
            "headers": dict(new.headers),
            "available_at": new.available_at or self.enqueued_at + timedelta(milliseconds=new.delay_ms),
            "created_at": self.enqueued_at,
            "ended_at": self.ended_at,
            "reserved_at": self.attempted_at[-1] if self.attempted_at else None,
            "reserved_by": None,
            "flow_id": self.flow_id,
            "errors": [],
            "releases": 0,
            "lease_token": self.attempts,
        }
        return JobDetails(
            **{each.name: values[each.name] for each in fields(JobDetails) if each.name in values}
        )


def steps_of(
    plan: Plan, make: Callable[[NewJob], InlineJob], grown_from: InlineJob | None = None
) -> list[InlineJob]:
    """Return the jobs of a flow, in the order in which their steps were added; `grown_from` is the job whose
    handler has added them."""
    jobs = [make(job) for job in plan.jobs]
    for edge in plan.edges:
        before = grown_from if grown_from and edge.after == GROWN_FROM else jobs[edge.after]
        jobs[edge.step].waits.append((before, edge.when))
    for job in jobs:
        job.flow_id = (grown_from or jobs[0]).flow_id or jobs[0].id
        job.state = State.BLOCKED if job.waits else State.AVAILABLE
    return jobs


def judged(job: InlineJob) -> State:
    """Return the state of a step whose turn it is, by how those before it ended."""
    states = {_judged(before, when) for before, when in job.waits}
    if states == {State.SCHEDULED}:
        job.reason = NOT_NEEDED
        return State.CANCELLED
    return next((state for state in (State.CANCELLED, State.BLOCKED) if state in states), State.AVAILABLE)


def _judged(job: InlineJob, when: OnOutcome) -> State:
    """Return the state of a step after a job by this wait alone; scheduled stands for a skipped job."""
    before = job.state
    if before not in (State.FINISHED, State.CANCELLED, State.FAILED):
        return State.BLOCKED
    if job.reason == NOT_NEEDED and when in ("success", "either"):
        return State.SCHEDULED
    holds = {"success": State.FINISHED, "failure": State.FAILED}.get(when, before)
    if before is holds and not (when == "either" and before is State.CANCELLED):
        return State.AVAILABLE
    return State.BLOCKED if before is State.FAILED else State.CANCELLED
