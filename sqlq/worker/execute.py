"""STAGE 3: an attempt, from a claimed job to its outcome.

    task known? ─► payload readable? ─► arguments fit? ─► run the handler ─► its result as JSON ─► Completed
         │               │                   │                  │
         ▼               ▼                   ▼                  ▼
     put back,        Failed             put back,         retry.decide
    later Failed                        later Failed

Whatever happens in here ends as an outcome: nothing a row or a handler does may stop the jobs behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal

from sqlq.clock import milliseconds, readable
from sqlq.errors import ArgumentsError, ExecutionError, JobTimeoutError, UnknownTaskError
from sqlq.job import Cancelled, ClaimedJob, Completed, ErrorText, Failed, FailureReason, Outcome, Released, Retried, SelfCompleted
from sqlq.retry import DEFAULT_POLICY, Signal, decide, describe, exponential, scrubbed
from sqlq.settings import MAX_RELEASES, UNKNOWN_TASK_MS
from sqlq.task import decode
from sqlq.worker.running import RunningJob, result_text

log = logging.getLogger("sqlq.worker")

BY_OPERATOR = "cancelled by an operator"
Starting = Callable[[RunningJob], None]
"""Told that a handler is about to run."""


def _untold(running: RunningJob) -> None:
    pass


_put_back = exponential("1s", cap="10m")


def execute(running: RunningJob, starting: Starting = _untold) -> Outcome:
    """Run the handler of a job in this thread and return how the attempt ended. Raises nothing. `starting` is told at the last
    moment before the handler."""
    task = running.task_found
    try:
        if (ended := _not_runnable(running)) is not None or task is None:
            return ended or Released()
        args, kwargs = decode(running.claimed.payload)
        if (misfit := task.misfit(args, kwargs)) is not None:
            return _misfit(running.claimed, misfit)
        running.begin()
        starting(running)
        result = task.handler(*args, **kwargs)
        return _ended(running, result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a handler end its attempt, not the worker
        return _raised(running, error)


async def aexecute(running: RunningJob, starting: Starting = _untold) -> Outcome:
    """Run the coroutine of a job on this event loop and return how the attempt ended. Raises nothing."""
    task = running.task_found
    try:
        if (ended := _not_runnable(running)) is not None or task is None:
            return ended or Released()
        args, kwargs = decode(running.claimed.payload)
        if (misfit := task.misfit(args, kwargs)) is not None:
            return _misfit(running.claimed, misfit)
        running.begin()
        running.on_cancel(_canceller())
        starting(running)
        result = await task.handler(*args, **kwargs)
        return _ended(running, result)
    except BaseException as error:
        return _raised(running, error)
    finally:
        running.on_cancel(None)


def _canceller() -> Callable[[], object]:
    """Return what cancels the asyncio task that calls this, from any thread."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    return lambda: loop.call_soon_threadsafe(task.cancel)


def _ended(running: RunningJob, result: Any) -> Outcome:
    """Return the outcome of a handler that returned."""
    if running.completed:
        error = ErrorText("sqlq.errors.SqlqError", "complete() was called, but its transaction did not commit")
        return SelfCompleted(late(running) or again(running, error))
    if running.heeded:
        return late(running) or _stopped(running)
    return late(running) or Completed(result_text(result, running.claimed))


def _raised(running: RunningJob, error: BaseException) -> Outcome:
    """Return the outcome of a handler that raised, or was cancelled."""
    outcome = late(running) or _failed(running, error)
    return SelfCompleted(outcome) if running.completed else outcome


def _stopped(running: RunningJob) -> Outcome:
    """Return the outcome of a handler that was made to stop: by an operator the job's end, else given back."""
    return Cancelled(BY_OPERATOR) if running.cancel_requested else give_back(running.claimed)


def again(running: RunningJob, error: ErrorText, reason: FailureReason = "error", delay_ms: int | None = None) -> Retried | Failed:
    """Return the outcome of an attempt that failed without an exception: another one, or none where it was the last."""
    job = running.claimed
    if job.attempts >= job.max_attempts:
        return Failed(reason, error)
    if delay_ms is None:
        policy = DEFAULT_POLICY if running.task_found is None else running.task_found.retry
        delay_ms = policy.wait_ms(job.attempts)
    return Retried(delay_ms, error, reason)


def _failed(running: RunningJob, error: BaseException) -> Outcome:
    try:
        return _judged(running, error)
    except BaseException as second:  # an exception may refuse even to be looked at: its __class__ is code, too
        seen = ExecutionError(f"the handler raised a {type(error).__qualname__}; looking at it raised a {type(second).__qualname__}")
        return _judged(running, seen)


def _judged(running: RunningJob, error: BaseException) -> Outcome:
    job, task = running.claimed, running.task_found
    if isinstance(error, ArgumentsError) and running.started is None:
        return Failed("bad_payload", describe(error))
    # a CancelledError that nobody here asked for is the handler's own doing, and an error like others
    if running.asked_to_stop and (running.cancel_requested or isinstance(error, asyncio.CancelledError)) and not isinstance(error, Signal):
        return _stopped(running)
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # the frame in this file is of no use to anybody
    return decide(job, error, DEFAULT_POLICY if task is None else task.retry)


def late(running: RunningJob) -> Outcome | None:
    """Return the outcome of an attempt past its timeout, whatever the handler made of it meanwhile."""
    if not running.timed_out:
        return None
    job = running.claimed
    ran, allowed = readable(running.seconds() * 1000), readable(job.timeout_ms or 0)
    error = JobTimeoutError(f"{job.task} ran {ran}, longer than its timeout of {allowed}")
    return decide(job, error, running.task_found.retry if running.task_found else DEFAULT_POLICY)


def _not_runnable(running: RunningJob) -> Outcome | None:
    """Return the outcome of a job that is not to be run, or not here; None for one that is."""
    job = running.claimed
    if running.cancel_requested:
        return Cancelled(BY_OPERATOR)
    if job.attempts > job.max_attempts:
        return Failed("error", ErrorText("sqlq.errors.SqlqError", f"its {job.max_attempts} attempts were spent before this one began"))
    if running.task_found is not None:
        return None
    text = f"no worker knew a task named {job.task!r} for {readable(_unknown_ms(job))}"
    return _put_off(job, "unknown_task", f"no task is named {job.task!r} here", UnknownTaskError(text))


def _misfit(job: ClaimedJob, misfit: str) -> Outcome:
    """Put a job back whose arguments the handler here does not take: in a rolling deploy another worker's may."""
    text = f"{misfit}; no worker's handler took these arguments for {readable(_unknown_ms(job))}"
    return _put_off(job, "bad_payload", f"its arguments do not fit the handler here ({misfit})", ArgumentsError(text))


def _unknown_ms(job: ClaimedJob) -> float:
    """For how long no worker has known what to do with a job."""
    return job.unknown_ms or 0


def _put_off(job: ClaimedJob, reason: Literal["unknown_task", "bad_payload"], why: str, error: Exception) -> Outcome:
    """Put a job back that this worker cannot run but a newer or older one may; fail it when none could for a day."""
    if _unknown_ms(job) >= UNKNOWN_TASK_MS or job.releases >= MAX_RELEASES:
        return Failed(reason, describe(error))
    delay_ms = milliseconds(_put_back(job.releases + 1), "delay")
    log.warning(
        "job %d: %s; put back for %s, in case another worker's code is newer or older. It will fail %s after it was first met",
        *(job.id, scrubbed(why, 500), readable(delay_ms), readable(UNKNOWN_TASK_MS)),
        extra={"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempts, "event": reason},
    )
    return Released(delay_ms, unknown_task=True)


def give_back(job: ClaimedJob) -> Outcome:
    """Return the outcome of an attempt that its worker ends: not counted, until the job was given back too often (G3)."""
    if job.releases < MAX_RELEASES:
        return Released()
    error = ErrorText("sqlq.errors.SqlqError", f"given back {job.releases} times without finishing")
    return Retried(0, error) if job.attempts < job.max_attempts else Failed("error", error)
