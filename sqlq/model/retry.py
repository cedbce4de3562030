"""Decides how a job goes on after an attempt, and has the signals that a handler may raise.

Nothing here touches a database; given the same attempt and the same exception the decision is the same but
for jitter.
"""

from __future__ import annotations

import logging
import re
import time
import traceback as tracebacks
from calendar import timegm
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_tz
from typing import TYPE_CHECKING, Literal

from sqlq.config.constants import ERROR_BYTES, MAX_RELEASES, UNKNOWN_TASK_MS
from sqlq.config.durations import MAX_MS, Duration, aware, milliseconds, readable
from sqlq.errors import ExecutionError, JobTimeoutError, PayloadKeyError, WorkerLostError
from sqlq.model.backoff import Backoff, exponential
from sqlq.model.checks import checked_name, checked_priority, checked_queue
from sqlq.model.history import UNKNOWN, AttemptTimes, written
from sqlq.model.job import ClaimedJob
from sqlq.model.job_options import FailureReason
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Outcome, Released, Retried

if TYPE_CHECKING:
    from email.message import Message

log = logging.getLogger("sqlq.worker")


class Signal(Exception):  # noqa: N818  # raised to say something, not because something went wrong
    """Raised by a handler to end its attempt otherwise than by returning or failing."""


class Retry(Signal):
    """Raise in a handler to end this attempt as failed and try again, after `delay` or else the task's own
    backoff.

    - `delay`: the wait, or a datetime with a time zone; one that is past means at once.
    - `priority`: that of the next attempts.
    - `queue`: that of the next attempts; a job of an App that encrypts or signs stays in its own.

    The attempt counts: when it was the last one, the job fails. Chain the cause with `raise Retry("5m") from
    error`: the job's errors then show it. Raises `ConfigurationError` for options that are none.

    >>> raise Retry("30s", priority=-10)  # doctest: +SKIP
    """

    def __init__(
        self,
        delay: Duration | datetime | None = None,
        *,
        priority: int | None = None,
        queue: str | None = None,
    ) -> None:
        self.delay_ms: int | None = None
        self.at: datetime | None = None
        if delay is not None:
            self.delay_ms, self.at = wait_of(delay, "Retry(delay)")
        self.priority = None if priority is None else checked_priority(priority)
        self.queue = None if queue is None else checked_queue(queue)
        super().__init__("the handler asked for a retry" + ("" if delay is None else f" in {delay}"))


class Snooze(Signal):
    """Raise in a handler to run the job again after `delay`, or at a time as with `Retry`, without counting
    the attempt.

    A job may be released 1,000 times. After that a snooze counts as a failed attempt, so that no job circles
    for ever.
    """

    priority = queue = None
    signal: str | None = None
    timeout_ms: int | None = None

    def __init__(self, delay: Duration | datetime) -> None:
        self.delay_ms, self.at = wait_of(delay, f"{type(self).__name__}(delay)")
        super().__init__(f"the handler asked to be run again in {delay}")


class SlowDown(Snooze):
    """Raise in a handler when a service wants fewer calls: a `Snooze` that also closes the job's limit.

    No other job with the key of its limit starts before that time, on any worker. Running jobs go on. A job
    that a worker has claimed starts within a second, or goes back to its place in the line. Then the key
    opens at its ordinary rate. The later one of two ends counts. Without a limit it is a snooze.

    >>> raise SlowDown("30s")  # doctest: +SKIP
    """

    @classmethod
    def from_headers(cls, headers: Mapping[str, str] | Message, default: Duration = "1m") -> SlowDown:
        """Return one until the time in the `Retry-After` of a response, in seconds or as a date. Where it is
        missing or cannot be read, `default` counts.

        >>> SlowDown.from_headers({"Retry-After": "120"}).delay_ms
        120000
        """
        text = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
        with suppress(ValueError, OverflowError):
            if (date := parsedate_tz(text)) is None:
                seconds = float(text)
            else:
                seconds = timegm(date[:6]) - (date[9] or 0) - time.time()
            return cls(timedelta(milliseconds=min(max(seconds * 1000, 0), MAX_MS)))
        return cls(default)


class WaitFor(Snooze):
    """Raise in a handler to run the job again when `app.signal(name)` is called, uncounted.

    Meanwhile the job takes no slot. The next attempt has the signal's value in `sqlq.current_job().signal`,
    and the cursor of the last checkpoint. A signal that came before is kept, and counts. After `timeout` the
    job runs, too, and reading `signal` raises `sqlq.JobTimeoutError`. It is released as by `Snooze`, up to
    1,000 times. Raises `ConfigurationError` for a name or timeout that is none.

    >>> if sqlq.current_job().waited_for is None:  # doctest: +SKIP
    ...     raise sqlq.WaitFor(f"approved:{order_id}", timeout="3d")
    """

    def __init__(self, name: str, timeout: Duration | None = None) -> None:
        super().__init__("0s")
        self.signal = checked_name(name, "the signal's name")
        self.timeout_ms = None if timeout is None else milliseconds(timeout, "timeout")
        self.args = (f"the handler waits for the signal {name}",)


def wait_of(delay: Duration | datetime, name: str) -> tuple[int, datetime | None]:
    """Return how long to wait, and until when where `delay` is a datetime. The database's clock decides when
    that time has come. The wait until then is for the log and for when to look."""
    if not isinstance(delay, datetime):
        return milliseconds(delay, name), None
    at = aware(delay, name)
    return milliseconds(max(at - datetime.now(UTC), timedelta()), name), at


class Cancel(Signal):
    """Raise in a handler to end the job for good without calling it a failure; `reason` is kept with it."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = None if reason is None else scrubbed(str(reason), ERROR_BYTES)
        super().__init__(reason or "the handler cancelled the job")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed attempt is followed by another: listed exceptions only, or never after listed ones."""

    backoff: Backoff = exponential()  # noqa: RUF009  # immutable
    retry_on: tuple[type[BaseException], ...] | None = None
    fail_on: tuple[type[BaseException], ...] = ()

    def retries(self, error: BaseException) -> bool:
        """Return whether another attempt may follow. One exception of a group that no attempt may follow
        decides for the group."""
        parts = leaves(error)
        if any(isinstance(part, self.fail_on) for part in (error, *parts)):  # guard: groups-are-looked-into
            return False
        listed = self.retry_on
        return listed is None or isinstance(error, listed) or all(isinstance(part, listed) for part in parts)

    def wait_ms(self, attempts: int) -> int:
        """Return the wait before the next attempt; a callable that fails must not lose the job, so it gets
        the default."""
        try:
            return milliseconds(self.backoff(attempts), "what the backoff callable returned")
        # SystemExit and errors that cannot be shown, too: this is called where an attempt ends, in its slot's
        # thread
        except BaseException as error:  # guard: failed-backoff-uses-the-default
            log.warning("the backoff of a task failed (%s), so the default is used", describe(error).message)
            return milliseconds(exponential()(attempts), "backoff")


DEFAULT_POLICY = RetryPolicy()


def decide(job: ClaimedJob, error: BaseException, policy: RetryPolicy = DEFAULT_POLICY) -> Outcome:
    """Return how an attempt that raised `error` ends."""
    parts = leaves(error)
    if len(parts) == 1 and isinstance(parts[0], Signal):  # as of a TaskGroup
        error = parts[0]
    match error:
        case Cancel():
            return Cancelled(error.reason)
        case Snooze() if job.releases < MAX_RELEASES:  # guard: snoozes-are-bounded
            closes = isinstance(error, SlowDown)
            wait = Released(error.delay_ms, snoozed=True, at=error.at, closes=closes)
            return replace(wait, signal=error.signal, timeout_ms=error.timeout_ms)
        case Snooze() | Retry():
            outcome = failed(job, describe(error.__cause__ or error), policy, delay_ms=error.delay_ms)
            if isinstance(outcome, Failed):
                return outcome
            return replace(outcome, at=error.at, priority=error.priority, queue=error.queue)
    is_timeout = isinstance(error, JobTimeoutError)
    reason: FailureReason = "timeout" if is_timeout else "error"
    if isinstance(error, policy.fail_on) if is_timeout else not policy.retries(error):
        return Failed(reason, describe(error))
    return failed(job, describe(error), policy, reason=reason)


def follows(attempts: int, max_attempts: int) -> bool:
    """Return whether another attempt follows a number of failed ones: the one place where that is decided."""
    return attempts < max_attempts  # guard: attempts-are-bounded


def failed(
    job: ClaimedJob,
    error: ErrorText,
    policy: RetryPolicy = DEFAULT_POLICY,
    *,
    reason: FailureReason = "error",
    delay_ms: int | None = None,
) -> Retried | Failed:
    """Return the outcome of an attempt that failed: another one after `delay_ms`, or else the policy's wait.
    No other follows where it was the last."""
    if not follows(job.attempts, job.max_attempts):
        return Failed(reason, error)
    wait_ms = policy.wait_ms(job.attempts) if delay_ms is None else delay_ms
    return Retried(min(wait_ms, MAX_MS), error, reason)


def given_back(job: ClaimedJob, *, delay_ms: int | None = None, crowded: bool = False) -> Outcome:
    """Return the outcome of an attempt that its worker breaks off, or cannot start. It does not count, until
    the job was released too often.

    It keeps its place in the queue, unless its worker delays it by `delay_ms`. Where the processes it needs
    are `crowded`, the delay is a second, and longer each time.
    """
    if job.releases < MAX_RELEASES:
        return Released(milliseconds(_crowded(job.releases + 1), "delay") if crowded else delay_ms)
    error = ErrorText("sqlq.errors.SqlqError", f"given back {job.releases} times without finishing")
    return failed(job, error, delay_ms=delay_ms or 0)


def broken_off(job: ClaimedJob) -> Outcome:
    """Return the outcome of an attempt that had started when its worker had to leave. It does not count, but
    for a job that may start only once. Such a job has failed, as if its worker had been lost."""
    if follows(1, job.max_attempts):  # guard: what-starts-once-is-not-given-back
        return given_back(job)
    why = "its worker had to leave before the handler ended, and with max_attempts=1 it starts only once"
    return Failed("worker_lost", describe(WorkerLostError(why)))


def put_off(
    job: ClaimedJob,
    reason: Literal["unknown_task", "bad_payload", "bad_signature"],
    why: str,
    error: Exception,
    others: str = "another worker's code is newer or older",
) -> Outcome:
    """Return the outcome of a job that this worker cannot run, but another may, and log it. The job is
    returned to the queue with a growing delay, and fails when none could run it for a day."""
    if (job.unknown_ms or 0) >= UNKNOWN_TASK_MS or job.releases >= MAX_RELEASES:
        return Failed(reason, describe(error))
    delay_ms = milliseconds(_put_off(job.releases + 1), "delay")
    if _is_news(reason, job.task):  # guard: a-task-is-put-back-in-one-line
        log.warning(
            "job %d: %s; put back for %s, in case %s. It will fail %s after it was first met. The log has "
            "one such line a minute for each of 20 tasks",
            job.id,
            scrubbed(why, 500),
            readable(delay_ms),
            others,
            readable(UNKNOWN_TASK_MS),
            extra={"job_id": job.id, "task": job.task, "queue": job.queue}
            | {"attempt": job.attempts, "event": reason},
        )
    return Released(delay_ms, unknown_task=True, reason=reason)  # guard: unknown-task-is-put-back


PUT_BACK_SECONDS, PUT_BACK_NAMES = 60.0, 20
"""The log has one line for each unknown task in this time, and for this number of tasks. SQL may insert any
number of names."""
_put_back_at: dict[tuple[str, str], float] = {}


def _is_news(reason: str, task: str) -> bool:
    """Whether the log has had no such line for a task lately; note it."""
    now = time.monotonic()
    if now - min(list(_put_back_at.values()), default=now) >= PUT_BACK_SECONDS:
        _put_back_at.clear()
    if (reason, task) in _put_back_at or len(_put_back_at) >= PUT_BACK_NAMES:
        return False
    _put_back_at[reason, task] = now
    return True


def put_off_without_key(job: ClaimedJob, error: PayloadKeyError) -> Outcome:
    """Return the outcome of a job whose key is not here, for its payload or for a result that it takes."""
    # guard: without-a-key-it-is-put-back
    return put_off(job, "bad_signature", str(error), error, "another worker has that")


_put_off = exponential("1s", cap="10m")
_crowded = exponential("1s", cap="1m")


def wait_after_loss_ms(losses: int) -> int:
    """Return how long a job waits that has lost a number of workers. It does not wait after the first
    loss, which is usually the machine's fault. It waits with backoff when it happens again."""
    return 0 if losses == 0 else DEFAULT_POLICY.wait_ms(losses)


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group and its groups, in their order. Another exception is its only leaf."""
    parts, rest = [], [error]
    while rest:
        part = rest.pop()
        if issubclass(type(part), BaseExceptionGroup):
            # a class of the handler's may have an attribute of that name
            rest.extend(reversed(BaseExceptionGroup.exceptions.__get__(part)))
        else:
            parts.append(part)
    return parts


def describe(error: BaseException) -> ErrorText:
    """Return an exception as text that any database can store, at most 64 KiB in all. A group is described by
    its first exception, which names the cause.

    Never raises: an exception whose `__str__` raises is still an error that must be recorded. Frame locals
    are not kept, since they hold values that were never meant to be stored.
    """
    cause, *others = leaves(error)
    kind = type(cause)
    message = _text(lambda: str(cause))
    if others:
        message += f" (and {len(others)} more)"
    trace = None
    if error.__traceback__ is not None:
        # the cause comes last: error groups and log lines show the last line of the user's code
        parts = [error] if cause is error else [error, cause]
        trace = _text(lambda: "\n".join("".join(tracebacks.format_exception(part)) for part in parts))
        trace = scrubbed(trace, ERROR_BYTES // 2)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ErrorText(scrubbed(name, 512), scrubbed(message, ERROR_BYTES // 4), trace)


def _text(write: Callable[[], str]) -> str:
    """Return a text of a handler's exception, whose methods may raise anything."""
    try:
        return write()
    except BaseException as error:
        return f"<it cannot be shown: {type(error).__name__}>"


def remote_error(error: ErrorText) -> BaseException:
    """Return an exception for error reporters. It stands for one that another process met, and of which there
    is only text."""
    remote = ExecutionError(f"{error.exception}: {error.message}")
    if error.traceback is not None:
        remote.add_note(error.traceback)
    return remote


def scrubbed(value: str, limit: int) -> str:
    """Return text without characters that databases refuse (NUL, lone surrogates), cut to `limit` bytes of
    UTF-8 in the middle.

    Head and tail are kept: the head shows the attempted operation, the tail the error.
    """
    cut = len(value) > limit
    if cut:  # a text of 50 MB is not encoded whole to keep 64 KiB of it
        value = value[:limit] + value[-limit:]
    data = _UNSTORABLE.sub(lambda match: "\u2400" if match[0] == "\0" else "\ufffd", value).encode()
    if not cut and len(data) <= limit:
        return data.decode()
    mark = b"\n... cut ...\n"
    half = (limit - len(mark)) // 2
    return (data[:half] + mark + data[-half:]).decode("utf-8", "ignore")


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")  # guard: texts-are-scrubbed


def error_record(attempts: int, reason: str, error: ErrorText, course: AttemptTimes | None = None) -> str:
    """Return the JSON object that stays with a job for an attempt that failed.

    Its `at` is by this machine's clock unless its course has the end: people read it, and it decides nothing.
    """
    values = {"reason": reason, "exception": error.exception, "message": error.message[:500]}
    return written(attempts, values, course or UNKNOWN)
