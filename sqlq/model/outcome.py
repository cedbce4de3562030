"""The outcomes of an attempt, how they are written, and the job that follows the end of another.

The ways out of `running` are: finished, tried again, released, failed for good. The row of a job names its
follow-ups itself, as JSON in `on_success` and `on_failure`; that of a cancel is inside `on_failure`. So a
supervisor, or a worker that finds the job's owner gone, ends the job without its task and its code. The
follow-up is enqueued in the transaction that ends the job.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Row

from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.errors import ArgumentsError
from sqlq.model.checks import checked_name, checked_priority, checked_queue, refusing_by
from sqlq.model.history import AttemptTimes
from sqlq.model.job import ClaimedJob, NewJob
from sqlq.model.job_options import FailureReason, JobOutcome
from sqlq.payload.encryption import Encryption
from sqlq.payload.headers import shown

log = logging.getLogger("sqlq.worker")


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An exception as text that every database can store; see `retry.describe`."""

    exception: str
    message: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The handler returned; `result` is JSON text, None for no result. `note` is the remark in the row
    about a result that could not be stored."""

    result: str | None = None
    note: str | None = None

    def protected_by(self, encryption: Encryption, task: str, queue: str) -> Finished:
        """Return this with its result signed or encrypted, if it has one."""
        if self.result is None:
            return self
        return Finished(encryption.protect("result", task, queue, self.result), self.note)


NO_RESULT = Finished()
"""The outcome of most jobs, made once: a frozen object takes longer than most calls."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler raised `sqlq.Cancel`: the job ends, is no failure, and is not retried."""

    reason: str | None = None


NOT_NEEDED = "not_needed"
"""The reason of a step that its `only_if` has skipped, and of those that wait for skipped steps alone."""
ON_REQUEST = "cancelled on request"
"""The reason of a job that somebody cancelled. One that came with the request takes its place."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt counted, another follows after `delay_ms`, in another queue or with another priority
    where one is given."""

    delay_ms: int
    error: ErrorText
    reason: FailureReason = "error"
    priority: int | None = None
    queue: str | None = None
    at: datetime | None = None
    """The time at which the next one is due, in place of `delay_ms`."""


@dataclass(frozen=True, slots=True)
class Released:
    """The attempt is released. The job is due again after `delay_ms`, or with None at once, in its old
    place in the queue. `snoozed`: the handler requested that."""

    delay_ms: int | None = None
    unknown_task: bool = False
    snoozed: bool = False
    in_time: bool = False
    """True if the job was started before its deadline, which no longer applies."""
    reason: str | None = None
    """Why no worker could run it here, where that is why."""
    at: datetime | None = None
    """The time at which it is due again, in place of `delay_ms`."""
    closes: bool = False
    """Whether the key of its limit is closed until then."""
    signal: str | None = None
    """The signal for which it waits, in place of a time, at most `timeout_ms`."""
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """No attempt follows; the job moves to failed_jobs."""

    reason: FailureReason
    error: ErrorText

    @property
    def fingerprint(self) -> str:
        """12 hex digits, the same for jobs that failed alike, of any task. Reason, class, message without its
        numbers, and the user's last line of the traceback are alike. The number of that line does not count,
        since the next release changes it."""
        line = users_line(self.error.traceback, or_last=True)
        where = line and f"{line.file} in {line.function}"
        parts = (self.reason, self.error.exception, _alike(self.error.message), where or "")
        return sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:12]


_VARIES = re.compile(
    r"""0x[0-9a-fA-F]+ | [0-9a-fA-F]{8}-[0-9a-fA-F-]{27} | \b[0-9a-fA-F]{16,}\b | '[^']*' | "[^"]*" | \d+ """,
    re.VERBOSE,
)


def _alike(message: str) -> str:
    """Return the first line of a message, at most 200 characters, without numbers, ids and quoted texts.

    >>> _alike("order 17 of 'ada' is gone")
    'order # of # is gone'
    """
    return _VARIES.sub("#", message[:200].strip().partition("\n")[0])


@dataclass(frozen=True, slots=True)
class SelfCompleted:
    """The handler called `complete()`: only the database shows whether its transaction committed. If it did
    not, `otherwise` is how the attempt ended."""

    otherwise: Outcome


Outcome = Finished | Cancelled | Retried | Released | Failed | SelfCompleted
CONTINUES = (Retried, Released)
"""The outcomes after which the job is not over."""


class Settlement(NamedTuple):
    """How an attempt ended, with the right to write it."""

    id: int
    lease_token: int
    attempts: int
    outcome: Outcome
    follow_up: NewJob | None = None
    """The follow-up of the job that ends so, to be enqueued with it."""
    limit_key: str | None = None
    """The limit whose slot it frees, and in whose line it waits where it returns to the queue."""
    course: AttemptTimes | None = None
    """The times in its line of the job's history; None for a first attempt that finished, which has none."""

    @property
    def is_one(self) -> bool:
        """Whether it is written by several statements, which belong into one transaction."""
        return (
            self.follow_up is not None
            or (self.limit_key is not None and isinstance(self.outcome, CONTINUES))
            or self.wait is not None
        )

    @property
    def wait(self) -> tuple[int, str, int | None] | None:
        """The wait for a signal that its job begins with this; see `store.signals.waits`."""
        outcome = self.outcome
        if type(outcome) is Released and outcome.signal is not None:
            return self.id, outcome.signal, outcome.timeout_ms
        return None


# -- what follows --------------------------------------------------------------------------------------------

Ending = ClaimedJob | Row[Any]
"""A job that ends, as a worker holds it or as a rescue finds its row."""


class Follower(NamedTuple):
    """A task that follows the end of a job, as the job's row names it.

    Other options of the task count as for any job that SQL inserts. They take effect when a worker that knows
    the task claims the follow-up.
    """

    task: str
    queue: str = DEFAULT_QUEUE
    priority: int = 0

    def as_text(self) -> str:
        """Return the JSON for the row, without default values."""
        defaults = self._field_defaults
        named = {name: value for name, value in self._asdict().items() if value != defaults.get(name)}
        return json.dumps(named, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str, column: str) -> Follower | None:
        """Return the task that a row names in a column; None where the row has `null`, after which none
        follows.

        Keys that are not known here are another release's, and left alone. Raises `ArgumentsError` for text
        that names no task, in a queue, with a priority.
        """
        try:
            named = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentsError(f"{column} is not JSON: {error}") from None
        if isinstance(named, dict) and column == "on_cancel":
            named = named.get("on_cancel")
        if named is None or (isinstance(named, dict) and named.keys() == {"on_cancel"}):
            return None
        if not isinstance(named, dict):
            raise ArgumentsError(
                f'{column} is not an object that names a task, as in {{"task": "shop.alarm", "queue": "ops"}}'
            )
        with refusing_by(ArgumentsError):
            return cls(
                checked_name(named.get("task", ""), f"the task in {column}"),
                checked_queue(named.get("queue", DEFAULT_QUEUE), f"the queue in {column}"),
                checked_priority(named.get("priority", 0)),
            )


def follow_up(job: Ending, outcome: Outcome, encryption: Encryption | None = None) -> NewJob | None:
    """Return the job that follows one that ends with this outcome, signed or encrypted where there are keys.
    None where none follows, as after an attempt that did not end its job, and after a bad signature. It has
    the headers of the job it follows."""
    try:
        return _following(job, outcome, encryption)
    except Exception as error:
        # guard: a-follow-up-that-cannot-be-made-stops-no-other
        log.error(
            "job %d: no job follows it: %s",
            job.id,
            error,
            exc_info=not isinstance(error, ArgumentsError),
            extra={"job_id": job.id, "task": job.task},
        )
        return None


def _following(job: Ending, outcome: Outcome, encryption: Encryption | None) -> NewJob | None:
    # SQLite lets in bytes, which JSON does not have
    names = str(job.task), str(job.queue)  # guard: callback-names-are-text
    ended = JobOutcome(
        job.id, *names, "finished", job.attempts, label=None if job.label is None else str(job.label)
    )
    text, column = job.on_failure, "on_failure"
    match outcome:
        case Finished():
            text, column = job.on_success, "on_success"
        case Failed("bad_signature"):  # guard: nothing-follows-a-bad-signature
            return None
        case Failed(reason, error):
            about: dict[str, Any] = {"exception": error.exception, "message": error.message}
            ended = replace(ended, outcome="failed", reason=reason, **about)
        case Cancelled(why):
            column = "on_cancel"
            ended = replace(ended, outcome="cancelled", message=why)
        case _:
            return None
    if text is None or (follower := Follower.from_text(text, column)) is None:
        return None
    headers = job.headers
    try:
        shown(headers)
    except ArgumentsError:  # the follow-up would fail of them
        headers = None  # guard: bad-headers-are-not-passed-on
    new: NewJob = NewJob(
        follower.task,
        json.dumps({"args": [asdict(ended)]}, ensure_ascii=False),
        follower.queue,
        max_attempts=None,
        priority=follower.priority,
        headers_text=headers,
    )
    return new if encryption is None else new._protected_by(encryption)  # guard: follow-ups-are-protected


def as_trusted(job: ClaimedJob, encryption: Encryption | None) -> ClaimedJob:
    """Return a job as its row has it, unopened. Where its signature is bad, it has no follow-up: that would
    get, with a good signature, text that anybody may have written."""
    if job.on_failure is None or encryption is None or encryption.opens(job.task, job.queue, job.payload):
        return job
    return job._replace(on_failure=None)  # guard: the-unstarted-are-trusted-by-signature


def settlement(
    job: ClaimedJob,
    outcome: Outcome,
    course: AttemptTimes | None = None,
    *,
    encryption: Encryption | None = None,
) -> Settlement:
    """Return the settlement of an attempt that ended with this outcome, with the follow-up of its job if that
    ends with it. Its result and the follow-up are signed or encrypted where there are keys."""
    if encryption is not None and type(outcome) is Finished:
        outcome = outcome.protected_by(encryption, job.task, job.queue)  # guard: results-are-protected
    follows = None
    if job.on_success is not None or job.on_failure is not None:
        follows = follow_up(job, outcome, encryption)
    return Settlement(job.id, job.lease_token, job.attempts, outcome, follows, job.limit_key, course)


def check_follow_ups(job: Ending) -> None:
    """Raise `ArgumentsError` where a job's row has a follow-up that cannot be read."""
    failure = job.on_failure
    for text, column in ((job.on_success, "on_success"), (failure, "on_failure"), (failure, "on_cancel")):
        if text is not None:
            Follower.from_text(text, column)


# -- the user's line of an error -----------------------------------------------------------------------------

_FRAME = re.compile(r' *File "([^"]+)", line (\d+), in (.+)$')
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_NOT_THE_USERS = ("site-packages", "dist-packages", _OWN, "lib/python3", "<frozen")


class Line(NamedTuple):
    """A line of a traceback; `file` has its folder's name before it."""

    file: str
    number: int
    function: str


def users_line(trace: str | None, *, or_last: bool = False) -> Line | None:
    """Return the last line of a traceback that is the user's own. Where none is, return None, or with
    `or_last` the last one."""
    frames = [frame for text in (trace or "").split("\n") if (frame := _FRAME.match(text))]
    own = [frame for frame in frames if not any(mark in frame[1] for mark in _NOT_THE_USERS)]
    lines = own or (frames if or_last else [])
    if not lines:
        return None
    path, number, function = lines[-1].groups()
    return Line("/".join(path.replace("\\", "/").split("/")[-2:]), int(number), function.strip())
