"""STAGE 3: an attempt, from a claimed job to its outcome.

    task known? ─► payload readable? ─► arguments fit? ─► run the handler ─► its result as JSON ─► Finished
         │               │                   │                  │
         ▼               ▼                   ▼                  ▼
     released,        Failed             released,         retry.decide
    later Failed                        later Failed

Everything that happens here ends as an outcome: no row and no handler may stop the jobs behind it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import types
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from time import monotonic
from typing import Any

from sqlq.config.durations import readable
from sqlq.errors import (
    ArgumentsError,
    ConfigurationError,
    ExecutionError,
    JobTimeoutError,
    PayloadKeyError,
    UnknownTaskError,
)
from sqlq.model import backoff
from sqlq.model.checks import NOT_IN_TIME
from sqlq.model.outcome import (
    ON_REQUEST,
    Cancelled,
    ErrorText,
    Failed,
    Outcome,
    SelfCompleted,
    check_follow_ups,
)
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
from sqlq.payload.codec import MismatchError
from sqlq.payload.reader import read
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.context import begin, current_job, running_attempt
from sqlq.worker.attempt.own_row import completion, decode_cursor

UNWRITTEN_GROWTH = (
    "steps were added to the flow, but the job was not completed in a transaction with them: add them inside "
    "`with current_job().completing(…)`"
)
Starting = Callable[[Attempt], None]
"""Called before the arguments of a job are read, and when its handler is about to run."""
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end and returns its result."""


def execute(attempt: Attempt, starting: Starting = lambda _: None, run: Run = asyncio.run) -> Outcome:
    """Run the handler of a job in this thread and return how the attempt ended. Raises nothing.

    `run` runs a coroutine, for a `def` handler that returns one.
    """
    pid = os.getpid()
    try:
        if (ended := _prepared(attempt, starting)) is not None:
            return ended
        starting(attempt)  # guard: shared-memory-is-written-before-the-handler
        return _ended(attempt, call_handler(attempt, run))
    # SystemExit and KeyboardInterrupt of a handler end its attempt, not the worker
    except BaseException as error:
        return raised(attempt, error)
    finally:
        _end(pid)


async def aexecute(attempt: Attempt, starting: Starting = lambda _: None) -> Outcome:
    """Run the coroutine of a job on this event loop and return how the attempt ended. Raises nothing."""
    pid = os.getpid()
    try:
        if (ended := _prepared(attempt, starting)) is not None:
            return ended
        starting(attempt)
        attempt.on_cancel(_canceller())
        return _ended(attempt, await acall_handler(attempt))
    except BaseException as error:
        return raised(attempt, error)
    finally:
        attempt.on_cancel(None)
        _end(pid)


def _end(pid: int) -> None:
    """Mark that this thread has no job until the next one. End a child that a handler has forked and that
    returns from it: it would run further jobs, and send outcomes for its parent."""
    if os.getpid() != pid:  # guard: a-forked-child-runs-no-jobs
        os._exit(0)
    running_attempt.set(None)


def _prepared(attempt: Attempt, starting: Starting) -> Outcome | None:
    """Read the arguments of a job's handler and begin the attempt; return the outcome of a job that is not
    run here.

    Raises `ArgumentsError` for a payload that no handler can be called with, and for a cursor that is none.
    """
    job, task = attempt.claimed, attempt.registered
    if (ended := _not_runnable(attempt)) is not None:
        return ended
    assert task is not None
    starting(attempt)  # what kills or stalls the process from here on is this job; guard: reading-is-a-start
    if job.on_success is not None or job.on_failure is not None:
        check_follow_ups(job)
    try:
        attempt.arguments = task._interface.from_json(*read(job.payload))
    except MismatchError as error:  # in a rolling deploy another worker's handler may take them
        # guard: misfits-are-put-back
        return put_off(
            job,
            "bad_payload",
            f"its arguments do not fit the handler here ({error})",
            ArgumentsError(
                f"{error}; no worker's handler took these arguments for {readable(job.unknown_ms or 0)}"
            ),
        )
    if job.headers is not None:
        headers.decode(job.headers)  # guard: headers-are-read-first
    if job.cursor is not None:
        decode_cursor(job.cursor)  # guard: cursors-are-read-first
    begin(attempt)
    return None


def call_handler(attempt: Attempt, run: Run = asyncio.run) -> Any:
    """Call a `def` handler and return its result. `run` awaits an awaitable result.

    Handlers and their middleware are called only here and in `acall_handler`. So workers and
    `sqlq.testing.inline` allow the same results. Raises `TypeError` for a generator, and the handler's
    exceptions.
    """
    task = attempt.registered
    assert task is not None
    if task._surroundings:
        # context variables of middleware do not reach the next job; guard: a-context-for-each-attempt
        return contextvars.copy_context().run(_call_surrounded, attempt, task, run)
    return _call(attempt, task, run)


def acall_handler(attempt: Attempt) -> Coroutine[Any, Any, Any]:
    """Return the call of an `async def` handler, to be awaited. Otherwise as `call_handler`."""
    task = attempt.registered
    assert task is not None
    return _acall_surrounded(attempt, task) if task._surroundings else _acall(attempt, task)


def _call(attempt: Attempt, task: Task[..., Any], run: Run) -> Any:
    args, kwargs = attempt.arguments
    result = task.handler(*args, **kwargs)
    if result is None:
        return None
    if _is_awaitable(result):  # guard: awaitables-are-awaited
        errors: list[BaseException] = []
        result = run(_awaited(attempt, result, errors))
        if errors:
            raise errors.pop()
    return _checked(result)


async def _acall(attempt: Attempt, task: Task[..., Any]) -> Any:
    args, kwargs = attempt.arguments
    result = await task.handler(*args, **kwargs)
    if result is None:
        return None
    while _is_awaitable(result):
        result = await result
    return _checked(result)


def _call_surrounded(attempt: Attempt, task: Task[..., Any], run: Run) -> Any:
    job = current_job()
    with ExitStack() as stack:
        for scope in task._surroundings:
            stack.enter_context(scope.open(job))
        return _call(attempt, task, run)
    return _swallowed(attempt)


async def _acall_surrounded(attempt: Attempt, task: Task[..., Any]) -> Any:
    job = current_job()
    async with AsyncExitStack() as stack:
        for scope in task._surroundings:
            if scope.is_async:
                await stack.enter_async_context(scope.open(job))
            else:
                stack.enter_context(scope.open(job))
        return await _acall(attempt, task)
    return _swallowed(attempt)


def _swallowed(attempt: Attempt) -> None:
    """Return the result of an attempt whose exception middleware has swallowed. It has finished, unless it
    was made to stop."""
    attempt.stop_noticed = attempt.stop_noticed or attempt.stop_requested  # guard: swallowed-stop-is-released


async def _awaited(attempt: Attempt, awaitable: Any, errors: list[BaseException]) -> Any:
    """Wait for the awaitable that a `def` handler returned. A cancel of the job cancels the asyncio task.

    Its exception is added to `errors`. A future would keep it, and the exception's own frames that future."""
    attempt.on_cancel(_canceller())
    try:
        result = await awaitable
        while _is_awaitable(result):
            result = await result
        return result
    except BaseException as error:
        errors.append(error)
    finally:
        attempt.on_cancel(None)


def _is_awaitable(result: Any) -> bool:
    # by its type: attributes of the object, its __class__ too, are code that may raise
    return hasattr(type(result), "__await__")


def _checked(result: Any) -> Any:
    """Return the result of a handler. Raises `TypeError` for a generator."""
    kind = type(result)
    # guard: generators-are-no-results
    if issubclass(kind, (types.GeneratorType, types.AsyncGeneratorType)):
        raise TypeError(
            f"the handler returned a {kind.__name__.replace('_', ' ')}, of whose body nothing has run: loop "
            "over it in the handler, and return a list"
        )
    return result


def _canceller() -> Callable[[], object]:
    """Return a function that cancels the calling asyncio task, from any thread."""
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        # in a closed loop nothing runs that a cancel could end
        with suppress(RuntimeError):  # guard: cancel-survives-a-closed-loop
            task.get_loop().call_soon_threadsafe(task.cancel)

    return cancel


def _ended(attempt: Attempt, result: Any) -> Outcome:
    """Return the outcome of a handler that returned."""
    if attempt.completed:
        if result is not None and not attempt.has_result:
            attempt.log_warning(
                "result_dropped",
                "%s returned a result after it was completed without one; null is stored: give it to "
                "complete(session, result)",
                attempt.task,
            )
        text = "complete() was called, but its transaction did not commit"
    elif attempt.growth is not None and attempt.growth.steps:  # guard: growth-is-not-dropped
        text = UNWRITTEN_GROWTH
    elif attempt.stop_noticed:  # guard: stopped-is-not-finished
        return late(attempt) or stopped(attempt)
    else:
        return late(attempt) or completion(result, attempt.claimed, attempt.registered)
    outcome = late(attempt) or failed(
        attempt.claimed, ErrorText("sqlq.errors.SqlqError", text), _policy(attempt)
    )
    return SelfCompleted(outcome) if attempt.completed else outcome  # guard: complete-must-commit


def raised(attempt: Attempt, error: BaseException) -> Outcome:
    """Return the outcome of a handler that raised, or was cancelled."""
    attempt.error = error
    try:
        outcome = late(attempt) or _judged(attempt, error)
    # An exception may refuse even to be looked at: its __class__ is code, too. One that left this function
    # would end the slot's thread, and the job's lease would be renewed for ever.
    except BaseException as second:  # guard: attempt-raises-nothing
        attempt.log_error("unjudged", "how its attempt ended cannot be judged", exc_info=True)
        unjudged = ExecutionError(
            f"the attempt ended by a {type(error).__qualname__}; judging it raised a "
            f"{type(second).__qualname__}"
        )
        outcome = failed(attempt.claimed, describe(unjudged), _policy(attempt))
    return SelfCompleted(outcome) if attempt.completed else outcome


def stopped(attempt: Attempt) -> Outcome:
    """Return the outcome of a handler that was made to stop: cancelled on request, else released."""
    return Cancelled(ON_REQUEST) if attempt.cancel_requested else broken_off(attempt.claimed)


def _judged(attempt: Attempt, error: BaseException) -> Outcome:
    if isinstance(error, ArgumentsError) and attempt.started is None:  # guard: bad-payload-fails
        return Failed("bad_payload", describe(error))
    if isinstance(error, PayloadKeyError) and attempt.started is None:  # guard: protected-without-a-key-fails
        return Failed("bad_signature", describe(error))
    # a CancelledError that no part of sqlq requested is the handler's own, and an error like others
    if (
        attempt.stop_requested
        and (attempt.cancel_requested or isinstance(error, asyncio.CancelledError))
        and not isinstance(error, Signal)
    ):
        return stopped(attempt)
    return decide(attempt.claimed, _in_user_code(error), _policy(attempt))


def _in_user_code(error: BaseException) -> BaseException:
    """Return the exception without the frames of this file, which do not help its reader."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _policy(attempt: Attempt) -> RetryPolicy:
    policy = DEFAULT_POLICY if attempt.registered is None else attempt.registered.retry
    if attempt.claimed.backoff is None:
        return policy
    try:
        return replace(policy, backoff=backoff.read(attempt.claimed.backoff))
    except ConfigurationError as error:
        attempt.log_warning("backoff", "%s; its task's is used", error)
        return policy


def late(attempt: Attempt) -> Outcome | None:
    """Return the outcome of an attempt past its timeout, whatever the handler returned or raised; None before
    it."""
    if attempt.deadline is not None and monotonic() > attempt.deadline:
        attempt.timed_out = True
    if not attempt.timed_out:
        return None
    ran, allowed = readable(attempt.seconds() * 1000), readable(attempt.timeout_ms or 0)
    attempt.forget()
    attempt.error = JobTimeoutError(f"{attempt.task} ran {ran}, longer than its timeout of {allowed}")
    return decide(attempt.claimed, attempt.error, _policy(attempt))


def _not_runnable(attempt: Attempt) -> Outcome | None:
    """Return the outcome of a job that is not to be run, or not here; None for one that is."""
    job = attempt.claimed
    if attempt.cancel_requested:  # guard: cancelled-before-it-starts
        return Cancelled(ON_REQUEST)
    if attempt.cancelled_at is not None:  # guard: what-is-given-back-does-not-start
        return given_back(job)
    if job.late_ms is not None and job.attempts <= 1:  # guard: what-was-started-does-not-expire
        late_ms = job.late_ms + 1000 * (monotonic() - attempt.claimed_at)
        if late_ms >= 0:  # guard: too-late-is-not-started
            return Cancelled(NOT_IN_TIME)
    if job.attempts > job.max_attempts:
        text = f"its {job.max_attempts} attempts were spent before this one began"
        return Failed("error", ErrorText("sqlq.errors.SqlqError", text))
    if attempt.registered is None:
        text = f"no worker knew a task named {job.task!r} for {readable(job.unknown_ms or 0)}"
        return put_off(job, "unknown_task", f"no task is named {job.task!r} here", UnknownTaskError(text))
    return None
