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
import contextvars
import logging
import time
import types
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any

from sqlq.config.durations import readable
from sqlq.errors import (
    ArgumentsError,
    ConfigurationError,
    ExecutionError,
    JobTimeoutError,
    SealError,
    UnknownTaskError,
)
from sqlq.model import backoff
from sqlq.model.callbacks import check_follow_ups
from sqlq.model.checks import NOT_IN_TIME
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Outcome, SelfCompleted
from sqlq.model.retry import (
    DEFAULT_POLICY,
    RetryPolicy,
    Signal,
    broken_off,
    decide,
    describe,
    failed,
    given_back,
    put_off,
)
from sqlq.model.task import Task
from sqlq.payload import headers
from sqlq.payload.codec import MisfitError
from sqlq.worker.attempt import steps
from sqlq.worker.attempt.context import RunningJob
from sqlq.worker.attempt.own_row import completion

log = logging.getLogger("sqlq.worker")

BY_OPERATOR = "cancelled by an operator"
UNWRITTEN_GROWTH = (
    "steps were added to the flow, but the job was not completed in a transaction with them: add them inside "
    "`with current_job().completing(…)`"
)
Starting = Callable[[RunningJob], None]
"""Told that a handler is about to run."""
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end and returns what it returns."""


def _untold(running: RunningJob) -> None:
    pass


def execute(running: RunningJob, starting: Starting = _untold, run: Run = asyncio.run) -> Outcome:
    """Run the handler of a job in this thread and return how the attempt ended. Raises nothing.

    `starting` is told at the last moment before the handler. `run` runs a coroutine, for a `def` handler that
    returns one.
    """
    try:
        if (ended := _prepared(running)) is not None:
            return ended
        starting(running)  # guard: box-before-handler
        return _ended(running, call_handler(running, run))
    # SystemExit and KeyboardInterrupt of a handler end its attempt, not the worker
    except BaseException as error:
        return raised(running, error)
    finally:
        running.leave()


async def aexecute(running: RunningJob, starting: Starting = _untold) -> Outcome:
    """Run the coroutine of a job on this event loop and return how the attempt ended. Raises nothing."""
    try:
        if (ended := _prepared(running)) is not None:
            return ended
        starting(running)
        return _ended(running, await acall_handler(running))
    except BaseException as error:
        return raised(running, error)
    finally:
        running.leave()


def _prepared(running: RunningJob) -> Outcome | None:
    """Read the arguments of a job's handler and begin the attempt; return the outcome of a job that is not
    run here.

    Raises `ArgumentsError` for a payload that no handler can be called with, and for a cursor that is none.
    """
    job, task = running.claimed, running.task_found
    stops = running.asked_to_stop or running.cancel_requested  # guard: what-is-given-back-does-not-start
    if task is None or stops or job.attempts > job.max_attempts:
        return _not_runnable(running)
    if job.late_ms is not None and running.is_too_late:
        return _not_runnable(running)
    if job.on_success is not None or job.on_failure is not None:
        check_follow_ups(job)
    try:
        running.arguments = task.arguments(job.payload)
    except MisfitError as misfit:
        return _misfit(job, str(misfit))  # guard: misfits-are-put-back
    if job.headers is not None:
        headers.decode(job.headers)  # guard: headers-are-read-first
    if job.cursor is not None:
        steps.decode(job.cursor)  # guard: cursors-are-read-first
    running.begin()
    return None


def call_handler(running: RunningJob, run: Run = asyncio.run) -> Any:
    """Call a `def` handler and return its result; what it returns to be awaited is awaited, by `run`.

    Handlers, and what surrounds them, are called here and in `acall_handler`, and nowhere else, so that
    workers and `sqlq.testing.inline` agree about what a handler may return. Raises `TypeError` for a
    generator, and what the handler raises.
    """
    task = running.task_found
    assert task is not None
    if task.surroundings:
        # what an around sets and does not reset is not the next job's; guard: a-context-for-each-attempt
        return contextvars.copy_context().run(_call_surrounded, running, task, run)
    return _call(running, task, run)


async def acall_handler(running: RunningJob) -> Any:
    """Call an `async def` handler and await it. Otherwise as `call_handler`."""
    task = running.task_found
    assert task is not None
    running.on_cancel(_canceller())
    try:
        if task.surroundings:
            return await _acall_surrounded(running, task)
        return await _acall(running, task)
    finally:
        running.on_cancel(None)


def _call(running: RunningJob, task: Task[..., Any], run: Run) -> Any:
    args, kwargs = running.arguments
    result = task.handler(*args, **kwargs)
    if result is None:
        return None
    if _is_awaitable(result):  # guard: awaitables-are-awaited
        result = run(_awaited(running, result))
    return _checked(result)


async def _acall(running: RunningJob, task: Task[..., Any]) -> Any:
    args, kwargs = running.arguments
    result = await task.handler(*args, **kwargs)
    if result is None:
        return None
    while _is_awaitable(result):
        result = await result
    return _checked(result)


def _call_surrounded(running: RunningJob, task: Task[..., Any], run: Run) -> Any:
    with ExitStack() as stack:
        for scope in task.surroundings:
            stack.enter_context(scope.open(running))
        return _call(running, task, run)
    return _swallowed(running)


async def _acall_surrounded(running: RunningJob, task: Task[..., Any]) -> Any:
    async with AsyncExitStack() as stack:
        for scope in task.surroundings:
            if scope.is_async:
                await stack.enter_async_context(scope.open(running))
            else:
                stack.enter_context(scope.open(running))
        return await _acall(running, task)
    return _swallowed(running)


def _swallowed(running: RunningJob) -> None:
    """Return the result of an attempt whose exception an around has swallowed: it has finished, unless it was
    made to stop."""
    running.heeded = running.heeded or running.asked_to_stop  # guard: a-swallowed-stop-is-not-finished


async def _awaited(running: RunningJob, awaitable: Any) -> Any:
    """Wait for what a `def` handler returned, in an asyncio task that a cancel of the job cancels."""
    running.on_cancel(_canceller())
    try:
        result = await awaitable
        while _is_awaitable(result):
            result = await result
        return result
    finally:
        running.on_cancel(None)


def _is_awaitable(result: Any) -> bool:
    # by its type: what an object says of itself, its __class__ too, is code that may raise
    return hasattr(type(result), "__await__")


def _checked(result: Any) -> Any:
    """Return what a handler may return. Raises `TypeError` for a generator."""
    kind = type(result)
    # guard: generators-are-no-results
    if issubclass(kind, (types.GeneratorType, types.AsyncGeneratorType)):
        raise TypeError(
            f"the handler returned a {kind.__name__.replace('_', ' ')}, of whose body nothing has run: loop "
            "over it in the handler, and return a list"
        )
    return result


def _canceller() -> Callable[[], object]:
    """Return what cancels the asyncio task that calls this, from any thread."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        try:
            loop.call_soon_threadsafe(task.cancel)
        except RuntimeError:  # guard: a-closed-loop-stops-nobody
            pass  # the loop is closed: nothing runs there that a cancel could end

    return cancel


def _ended(running: RunningJob, result: Any) -> Outcome:
    """Return the outcome of a handler that returned."""
    if running.completed:
        error = ErrorText(
            "sqlq.errors.SqlqError", "complete() was called, but its transaction did not commit"
        )
        otherwise = late(running) or failed(running.claimed, error, _policy(running))
        return SelfCompleted(otherwise)  # guard: complete-must-commit
    if running.growth is not None and running.growth.steps:  # guard: growth-is-not-dropped
        error = ErrorText("sqlq.errors.SqlqError", UNWRITTEN_GROWTH)
        return late(running) or failed(running.claimed, error, _policy(running))
    if running.heeded:  # guard: stopped-is-not-finished
        return late(running) or _stopped(running)
    return late(running) or completion(result, running.claimed, running.task_found)


def raised(running: RunningJob, error: BaseException) -> Outcome:
    """Return the outcome of a handler that raised, or was cancelled."""
    running.error = error
    try:
        outcome = late(running) or _failed(running, error)
    # what went on would end the slot's thread, and leave the job to a lease that is renewed for ever
    except BaseException as second:  # guard: execute-raises-nothing
        log.exception(
            "job %d: how its attempt ended cannot be judged", running.id, extra=running.fields("unjudged")
        )
        unjudged = ExecutionError(
            f"the attempt ended by a {type(error).__qualname__}; judging it raised a "
            f"{type(second).__qualname__}"
        )
        outcome = failed(running.claimed, describe(unjudged))
    return SelfCompleted(outcome) if running.completed else outcome


def _stopped(running: RunningJob) -> Outcome:
    """Return the outcome of a handler that was made to stop: by an operator the job's end, else given
    back."""
    return Cancelled(BY_OPERATOR) if running.cancel_requested else broken_off(running.claimed)


def _failed(running: RunningJob, error: BaseException) -> Outcome:
    try:
        return _judged(running, error)
    # an exception may refuse even to be looked at: its __class__ is code, too
    except BaseException as second:
        seen = ExecutionError(
            f"the handler raised a {type(error).__qualname__}; looking at it raised a "
            f"{type(second).__qualname__}"
        )
        return _judged(running, seen)  # guard: hostile-exceptions


def _judged(running: RunningJob, error: BaseException) -> Outcome:
    if isinstance(error, ArgumentsError) and running.started is None:  # guard: bad-payload-fails
        return Failed("bad_payload", describe(error))
    if isinstance(error, SealError) and running.started is None:  # guard: sealed-without-a-key-fails
        return Failed("bad_signature", describe(error))
    # a CancelledError that no part of sqlq asked for is the handler's own doing, and an error like others
    if (
        running.asked_to_stop
        and (running.cancel_requested or isinstance(error, asyncio.CancelledError))
        and not isinstance(error, Signal)
    ):
        return _stopped(running)
    return decide(running.claimed, _in_user_code(error), _policy(running))


def _in_user_code(error: BaseException) -> BaseException:
    """Return the exception without the frames of this file, which tell its reader nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _policy(running: RunningJob) -> RetryPolicy:
    policy = DEFAULT_POLICY if running.task_found is None else running.task_found.retry
    if running.claimed.backoff is None:
        return policy
    try:
        return replace(policy, backoff=backoff.read(running.claimed.backoff))
    except ConfigurationError as error:
        log.warning("job %d: %s; its task's is used", running.id, error, extra=running.fields("backoff"))
        return policy


def late(running: RunningJob) -> Outcome | None:
    """Return the outcome of an attempt past its timeout, whatever the handler made of it meanwhile."""
    if running.deadline is not None and time.monotonic() > running.deadline:
        running.timed_out = True
    if not running.timed_out:
        return None
    job = running.claimed
    ran, allowed = readable(running.seconds() * 1000), readable(running.timeout_ms or 0)
    error = JobTimeoutError(f"{job.task} ran {ran}, longer than its timeout of {allowed}")
    running.error = error
    return decide(job, error, _policy(running))


def _not_runnable(running: RunningJob) -> Outcome:
    """Return the outcome of a job that is not to be run, or not here."""
    job = running.claimed
    if running.cancel_requested:  # guard: cancelled-before-it-starts
        return Cancelled(BY_OPERATOR)
    if running.asked_to_stop:
        return given_back(job)
    if running.is_too_late:  # guard: too-late-is-not-started
        return Cancelled(NOT_IN_TIME)
    if job.attempts > job.max_attempts:
        return Failed(
            "error",
            ErrorText(
                "sqlq.errors.SqlqError", f"its {job.max_attempts} attempts were spent before this one began"
            ),
        )
    text = f"no worker knew a task named {job.task!r} for {readable(job.unknown_ms or 0)}"
    return put_off(job, "unknown_task", f"no task is named {job.task!r} here", UnknownTaskError(text))


def _misfit(job: ClaimedJob, misfit: str) -> Outcome:
    """Put a job back whose arguments the handler here does not take: in a rolling deploy another worker's
    may."""
    text = f"{misfit}; no worker's handler took these arguments for {readable(job.unknown_ms or 0)}"
    return put_off(
        job, "bad_payload", f"its arguments do not fit the handler here ({misfit})", ArgumentsError(text)
    )
