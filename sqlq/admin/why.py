"""Why a job does not run now, and when it will."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from sqlq.admin.flows import Flows
from sqlq.admin.limits import Limits
from sqlq.admin.queues import Queues
from sqlq.admin.workers import Workers
from sqlq.config.command_hint import word
from sqlq.config.durations import span, written
from sqlq.database.database import Database
from sqlq.errors import JobNotFoundError
from sqlq.model.job import JobDetails, State
from sqlq.model.limit import DeclaredLimits

if TYPE_CHECKING:
    from sqlq.admin.doctor.finding import Finding

AHEAD_COUNTED = 1_000


class Reason(NamedTuple):
    """A sentence about a job, and the words of the command that changes it."""

    said: str
    words: str | None = None
    needs_app: bool = False


def why(database: Database, job: JobDetails) -> Iterator[Reason]:
    """Yield why a job is in its state, what it waits for, and what changes that."""
    waits = job.state in (State.BLOCKED, State.SCHEDULED, State.AVAILABLE)
    if waits:
        yield from _paused(database, job)
    if job.state is State.RUNNING:
        yield from _running(database, job)
    elif job.state is State.BLOCKED:
        yield from _blocked(database, job)
    elif job.state is State.SCHEDULED:
        due = job.available_at
        after = f" after its attempt {job.attempts} failed" if job.errors and job.attempts else ""
        if due is not None:
            wait = (due - datetime.now(UTC)).total_seconds()
            yield Reason(f"it is due {written(due)}, in {span(wait)}{after}", f"reschedule {job.id}")
        yield from _queue(database, job)
    elif job.state is State.AVAILABLE:
        yield from _queue(database, job)
    elif job.state is State.FAILED:
        yield Reason("it has failed for good; a retry gives it all its attempts again", f"retry {job.id}")
        yield Reason("or it is deleted", f"delete {job.id}")
    else:
        yield Reason("it has ended and runs no more; a replay is a new job", f"replay {job.id}")
    if waits:
        yield Reason("a cancel ends it without running it", f"cancel {job.id}")


def findings(database: Database, job: JobDetails) -> list[Finding]:
    """Return what the doctor finds that keeps a job from running, or from ending."""
    from sqlq.admin.doctor.doctor import Doctor

    concerns = {
        "tasks": f"the task {job.task}:",
        "limits": f"{job.limit_key!r}",
        "flows": f"flow {job.flow_id} ",
    }
    found = Doctor(database).of_queue(_CHECKS.get(job.state, ()))
    return [each for each in found if concerns.get(each.check, "") in each.said]


_CHECKS = {
    State.BLOCKED: ("workers", "limits", "flows"),
    State.SCHEDULED: ("workers", "tasks"),
    State.AVAILABLE: ("workers", "stuck", "starts", "tasks"),
    State.RUNNING: ("workers", "stuck", "starts", "leases"),
}
"""The checks of the doctor that concern a job in a state."""


def _running(database: Database, job: JobDetails) -> Iterator[Reason]:
    if job.cancel_requested_at is not None:
        yield Reason("it was asked to stop, and its handler ends by itself", f"cancel {job.id} --force")
    worker = next((each for each in Workers(database).list(silent=True) if each.id == job.reserved_by), None)
    if worker is None:
        yield Reason("its worker is gone: another one takes it over when its lease has run out")
    elif not worker.alive:
        yield Reason(
            f"its worker, on {worker.host}, has been silent for {span(worker.silent_seconds)}: "
            "another one takes it over when its lease has run out"
        )
    elif job.started is False:
        yield Reason(f"its worker, on {worker.host}, holds it and has not started it yet")
    else:
        words = None if job.cancel_requested_at else f"cancel {job.id}"
        yield Reason(f"it runs on {worker.host}, pid {worker.pid}", words)


def _paused(database: Database, job: JobDetails) -> Iterator[Reason]:
    pause, words = Queues(database).pauses().tasks.get(job.task), f"queues resume --task {word(job.task)}"
    if pause is not None:
        said = "" if pause.until is None else f" until {written(pause.until)}"
        yield Reason(f"its task is paused{said}", words)
    elif job.blocked_by == "pause":
        yield Reason("the pause of its task is over: a worker frees it within some ten seconds", words)


def _blocked(database: Database, job: JobDetails) -> Iterator[Reason]:
    if job.blocked_by == "flow" and job.flow_id is not None:
        try:
            flow = Flows(database).get(job.flow_id)
            after = flow.step(job.id).after
        except JobNotFoundError:
            yield Reason("it waits for steps that are kept no more; a sweep frees it within a minute")
            return
        for step in flow.steps:
            if step.id in after and step.state is not State.FINISHED:
                words = f"flows skip {step.id}" if step.state is State.FAILED else None
                yield Reason(f"it waits for job {step.id}, {step.task}, which is {step.state}", words)
    elif job.blocked_by == "limit" and job.limit_key is not None:
        limits = Limits(database, DeclaredLimits()).list(job.limit_key, limit=1)
        for status in (each for each in limits if each.key == job.limit_key):
            wait = status.next_start_seconds
            soon = f"; the next one may start in {span(wait)}" if wait else ""
            yield Reason(
                f"it waits for its turn under the limit {job.limit_key} ({status.says}): "
                f"{status.running:,} run, {status.waiting:,} wait{soon}",
                f"limits set {word(job.limit_key)} --running N",
            )


_PUT_BACK = {
    "unknown_task": (
        "the last worker that met it does not know its task",
        "deploy it, or give a renamed task an alias",
    ),
    "bad_payload": (
        "the handler of the last worker that met it does not take its arguments",
        "give new parameters a default",
    ),
}
"""Why no worker could start a job, and the mend, by the reason in its history."""


def _queue(database: Database, job: JobDetails) -> Iterator[Reason]:
    if put_back := _PUT_BACK.get(job.history[-1].reason or "") if job.history else None:
        said, mend = put_back
        yield Reason(f"{said}, and it was put back: {mend}; it fails when that has lasted for a day")
    pauses = Queues(database).pauses()
    if pauses.all is not None:
        yield Reason("all queues are paused", "queues resume --all")
        return
    if job.queue in pauses.named:
        until = pauses.named[job.queue].until
        said = "" if until is None else f" until {written(until)}"
        yield Reason(f"its queue is paused{said}", f"queues resume {word(job.queue)}")
        return
    serving = [each for each in Workers(database).list() if each.queues is None or job.queue in each.queues]
    if not serving:
        yield Reason("no worker serves its queue", f"work -q {word(job.queue)}", needs_app=True)
        return
    if job.state is State.SCHEDULED:
        return
    taking = [each for each in serving if each.state in ("idle", "busy")]
    if not taking:
        yield Reason(f"the workers of its queue take no jobs: {serving[0].state}", "workers")
        return
    free = sum(max(0, each.concurrency - len(each.jobs)) for each in taking)
    waiting = Queues(database).waiting([job.queue], limit=AHEAD_COUNTED)
    more = "" if waiting.exact else " at least"
    if free:
        yield Reason(f"it is due, and {free:,} slots are free: a worker claims it within about a second")
    else:
        slots = sum(each.concurrency for each in taking)
        yield Reason(
            f"all {slots:,} slots of its workers are taken;{more} {waiting.number:,} jobs of its queue are "
            "due"
        )
