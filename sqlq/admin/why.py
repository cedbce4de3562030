"""Why a job does not run now, and when it will."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlq.admin.queues import Queues
from sqlq.admin.workers import Workers, WorkerStatus
from sqlq.config.command_hint import word
from sqlq.config.constants import WAIT_TASK
from sqlq.config.durations import ending, rate, span, until, written
from sqlq.database.database import Database
from sqlq.model.job import JobDetails, State
from sqlq.store import blockers, health
from sqlq.store.blockers import Reason, put_back
from sqlq.store.jobs import insert


def why(database: Database, job: JobDetails) -> Iterator[Reason]:
    """Yield why a job is in its state, what it waits for, and what changes that."""
    if job.state is State.RUNNING:
        yield from _running(database, job)
    elif job.state is State.FAILED:
        yield _retry(database, job)
        yield Reason("or it is deleted", f"delete {job.id}")
    elif job.state in (State.BLOCKED, State.SCHEDULED, State.AVAILABLE):
        yield from _waiting(database, job)
        yield Reason("a cancel ends it without running it", f"cancel {job.id}")
    elif job.flow_id is not None:
        yield Reason("it has ended and runs no more, as a step of a flow", f"flows show {job.flow_id}")
    else:
        yield Reason("it has ended and runs no more; a replay is a new job", f"replay {job.id}")


def _retry(database: Database, job: JobDetails) -> Reason:
    """Return that a retry runs a failed job again, or the live job that keeps a retry from it."""
    with database.read() as conn:
        holder = None if job.unique_key is None else insert.holder(conn, job.queue, job.unique_key)
    if holder in (None, job.id):
        return Reason("it has failed for good; a retry gives it all its attempts again", f"retry {job.id}")
    return Reason(
        f"it has failed for good, and job {holder} has its unique key: a retry is refused until that ends",
        f"show {holder}",
    )


def _running(database: Database, job: JobDetails) -> Iterator[Reason]:
    if job.cancel_requested_at is not None:
        yield Reason("it was asked to stop, and its handler ends by itself", f"cancel {job.id} --force")
    workers = Workers(database).list(silent=True)
    worker = next((worker for worker in workers if worker.id == job.reserved_by), None)
    if worker is not None and worker.alive:
        words = None if job.cancel_requested_at else f"cancel {job.id}"
        yield Reason(f"it runs on {worker.host}, pid {worker.pid}", words)
    else:
        state = "its worker is gone"
        if worker is not None:
            state = f"its worker on {worker.host} has been silent for {span(worker.silent_seconds)}"
        yield Reason(f"{state}: another one takes it over when its lease has run out")


def _waiting(database: Database, job: JobDetails) -> Iterator[Reason]:
    if job.state is State.SCHEDULED and job.available_at is not None:
        after = f" after its attempt {job.attempts} failed" if job.errors and job.attempts else ""
        due = f"it is due {written(job.available_at)}, {until(job.available_at)}{after}"
        yield Reason(due, f"reschedule {job.id}")
    returned = list(put_back(job))
    yield from returned
    workers = [w for w in Workers(database).list() if w.queues is None or job.queue in w.queues]
    unserved = None if job.task == WAIT_TASK else _unserved(database, job.queue, workers)
    if unserved is not None:
        yield unserved
    if job.state is State.BLOCKED and not returned:
        for blocker in blockers.BLOCKERS:
            if blocker.name == job.blocked_by:
                yield from blocker().explain(database, job)
    elif job.state is State.AVAILABLE and unserved is None:
        yield _slots(workers, "" if returned else _forecast(database, job))


def _unserved(database: Database, queue: str, workers: Sequence[WorkerStatus]) -> Reason | None:
    pauses = Queues(database).pauses()
    if pauses.all is not None:
        return Reason("all queues are paused", "queues resume --all")
    if queue in pauses.named:
        end = pauses.named[queue].until
        return Reason(f"its queue is paused{ending(end)}", f"queues resume {word(queue)}")
    return None if workers else Reason("no worker serves its queue", f"work -q {word(queue)}", needs_app=True)


def _forecast(database: Database, job: JobDetails) -> str:
    """Return about when a due job is claimed; empty where that is not known."""
    with health.reading(database) as conn:
        before, pace = health.ahead(conn, job) or (0, 0.0)
    if not before:
        return ""
    more = "more than " if before == health.COUNT_LIMIT else ""
    return f"{more or 'about '}{span(before / pace, whole=True)}: {more}{before:,} before it, {rate(pace)}"


def _slots(workers: Sequence[WorkerStatus], forecast: str) -> Reason:
    taking = [worker for worker in workers if worker.state in ("idle", "busy")]
    if not taking:
        return Reason(f"the workers of its queue take no jobs: {workers[0].state}", "workers")
    free = sum(max(0, worker.concurrency - len(worker.jobs)) for worker in taking)
    if free and forecast:
        return Reason(forecast)
    if free:
        return Reason(f"it is due, and {free:,} slots are free: a worker claims it within about a second")
    slots = sum(worker.concurrency for worker in taking)
    taken = (
        f"all {slots:,} slots of its workers are taken" if slots > 1 else "the slot of its worker is taken"
    )
    return Reason(f"{taken}; {forecast}" if forecast else taken)
