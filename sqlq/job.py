"""A job: as it is asked for, as it is stored, as a worker holds it, and how an attempt of it may end.

    enqueue ──► scheduled/available ──claim──► running ──settle──► finished, failed or cancelled
                        ▲                         │
                        └── retry, snooze, release ┘

The state is derived from the row (is it reserved, is it due, which table is it in), so it cannot contradict
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias

from sqlq import backoff as backoffs
from sqlq import headers as headings
from sqlq.backoff import BackoffOption
from sqlq.clock import LONGEST_MS, Duration, aware, milliseconds
from sqlq.errors import EnqueueError
from sqlq.settings import LONGEST_NAME, PRIORITIES

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)
"""What the handler of a job returns; known to type checkers alone."""

FailureReason: TypeAlias = Literal["error", "timeout", "worker_lost", "unknown_task", "bad_payload"]
UniqueUntil: TypeAlias = Literal["finish", "start"]


class Kept(Enum):
    """Stands for an option that is not given, where None is a value of its own."""

    KEPT = "kept"


KEPT = Kept.KEPT
NO_TIMEOUT_MS = 0
"""In a job's row: it has no timeout, whatever its task says."""
FOR_EVER_MS = LONGEST_MS
"""A retention without end: a century."""


class State(StrEnum):
    """Where a job is, as the view `job_states` says it."""

    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class NewJob(Generic[R_co]):
    """A job that is not enqueued yet: made by `task.new(…)`, given options by `.set(…)`.

    It is immutable: `.set()` returns another one, so a NewJob may be kept and enqueued many times.
    """

    task: str
    payload: str
    queue: str
    max_attempts: int | None
    """None: what the task says, when a worker that knows it claims the job."""
    priority: int = 0
    timeout_ms: int | None = None
    delay_ms: int = 0
    available_at: datetime | None = None
    unique_key: str | None = None
    unique_until: UniqueUntil = "finish"
    on_success: str | None = None
    """The task that follows, as the job's row names it; see `endings.Follower`."""
    on_failure: str | None = None
    label: str | None = None
    headers_text: str | None = None
    """Its own headers, as JSON; what the App adds comes to them when the job is enqueued."""
    backoff: str | None = None
    """As the job's row has it; None where the task says it."""
    retention_ms: int | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The options that `.set` was given."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """The headers that `.set` was given, read-only."""
        return headings.shown(self.headers_text)

    def with_payload(self, payload: str) -> NewJob[R_co]:
        """Return this job with other arguments, as JSON text; in a fifth of the time of making it anew."""
        fields = vars(self).copy()
        fields["payload"] = payload
        new: NewJob[R_co] = object.__new__(NewJob)
        object.__setattr__(new, "__dict__", fields)
        return new

    def set(
        self,
        *,
        queue: str | None = None,
        delay: Duration | None = None,
        available_at: datetime | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        timeout: Duration | Kept | None = KEPT,
        backoff: BackoffOption | None = None,
        retention: Duration | Kept | None = KEPT,
        unique_key: str | None = None,
        unique_until: UniqueUntil | None = None,
        on_success: Follows | Kept | None = KEPT,
        on_failure: Follows | Kept | None = KEPT,
        label: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> NewJob[R_co]:
        """Return this job with other options; what is not given stays as it is.

        `delay` counts from the enqueue by the database's clock; `available_at` is a moment with a time zone;
        give one of the two. A larger `priority` (−100 to 100) runs first. With a `unique_key`, at most one
        job of that key is live in its queue: until it finishes, or with `unique_until="start"` until it is
        first claimed. A `timeout` of None takes the task's away. `backoff` is the wait before the next
        attempt, in any form the task takes but a function of your own. `retention` says how long the job is
        kept after it has finished or failed, None for ever. `label` is a short text for people, `headers` a
        mapping of names to JSON that travels with the job; those set before stay where they are not set
        anew. `on_success` and `on_failure` are tasks of which a job follows when this one has finished, or
        has failed for good; with None none does, whatever the task says. Raises `EnqueueError` for a value
        out of range, naming it.

        >>> send_receipt.new(7).set(delay="5m", priority=10)  # doctest: +SKIP
        """
        if delay is not None and available_at is not None:
            raise EnqueueError("both delay and available_at are set: give one of them")
        changes: dict[str, Any] = {}
        if queue is not None:
            changes["queue"] = checked_queue(queue)
        if delay is not None:
            changes.update(delay_ms=milliseconds(delay, "delay", EnqueueError), available_at=None)
        if available_at is not None:
            changes.update(available_at=aware(available_at, "available_at", EnqueueError), delay_ms=0)
        if priority is not None:
            changes["priority"] = checked_priority(priority)
        if max_attempts is not None:
            changes["max_attempts"] = checked_max_attempts(max_attempts)
        if not isinstance(timeout, Kept):
            changes["timeout_ms"] = NO_TIMEOUT_MS if timeout is None else checked_timeout(timeout)
        if backoff is not None:
            changes["backoff"] = backoffs.stored(backoff, EnqueueError)
        if not isinstance(retention, Kept):
            changes["retention_ms"] = checked_retention(retention)
        if label is not None:
            changes["label"] = checked_name(label, "label")
        if headers is not None:
            changes["headers_text"] = headings.encode(
                {**self.headers, **headings.checked(headers, "headers")}, "the headers"
            )
        if unique_key is not None:
            changes["unique_key"] = checked_name(unique_key, "unique_key")
        if unique_until is not None:
            if unique_until not in ("finish", "start"):
                raise EnqueueError(f'unique_until is {unique_until!r}: it is "finish" or "start"')
            changes["unique_until"] = unique_until
        if not isinstance(on_success, Kept):
            changes["on_success"] = checked_follow_up(on_success, "on_success")
        if not isinstance(on_failure, Kept):
            changes["on_failure"] = checked_follow_up(on_failure, "on_failure")
        new = replace(self, **changes, given=self.given | changes.keys())
        if unique_until == "start" and new.unique_key is None:
            raise EnqueueError('unique_until="start" is about a unique key: set unique_key together with it')
        return new


def checked_name(value: str, what: str, error: type[Exception] = EnqueueError) -> str:
    """Return the name of a queue or task, or a unique key, if every database can store and compare it."""
    if not isinstance(value, str) or not value.strip():
        raise error(f"{what} is {value!r}: it must be text that is not blank")
    if len(value) > LONGEST_NAME:
        raise error(
            f"{what} has {len(value)} characters: at most {LONGEST_NAME} are possible; for a long key "
            "enqueue a hash of it"
        )
    if "\0" in value or any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise error(f"{what} is {value!r}: it holds a NUL or a lone surrogate, which databases cannot store")
    return str.__str__(value)  # of an enum's member its text, not its name


def checked_queue(value: str, error: type[Exception] = EnqueueError) -> str:
    """Return the name of a queue that may be given to jobs."""
    name = checked_name(value, "queue", error)
    if "," in name:  # guard: no-comma-in-a-queue
        raise error(f"queue is {name!r}: a comma separates queues, as in sqlq work -q high,low; leave it out")
    return name


def checked_priority(value: int, error: type[Exception] = EnqueueError) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in PRIORITIES:
        raise error(
            f"priority is {value!r}: it must be a whole number from {PRIORITIES.start} to "
            f"{PRIORITIES.stop - 1}; larger runs first"
        )
    return int(value)


def checked_max_attempts(value: int, error: type[Exception] = EnqueueError) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000_000:
        raise error(f"max_attempts is {value!r}: it must be a whole number from 1 to 1,000,000")
    return int(value)


def checked_follow_up(task: Any, option: str, error: type[Exception] = EnqueueError) -> str:
    """Return what a job's row says of the task that follows its end; `null` for None, after which none
    does."""
    if task is None:
        return "null"
    if not hasattr(type(task), "as_follow_up"):
        raise error(
            f"{option} is {task!r}: it is a task, as in {option}=alarm, whose handler takes how the job ended"
        )
    text: str = task.as_follow_up(option, error)
    return text


def checked_timeout(value: Duration, error: type[Exception] = EnqueueError) -> int:
    ms = milliseconds(value, "timeout", error)
    if ms == 0:
        raise error("timeout is zero: no job could finish in it; leave it out for no limit")
    return ms


def checked_retention(value: Duration | None, error: type[Exception] = EnqueueError) -> int:
    """Return how long a job is kept after its end; None stands for ever."""
    return FOR_EVER_MS if value is None else milliseconds(value, "retention", error)


@dataclass(frozen=True, slots=True)
class Job(Generic[R_co]):
    """What `enqueue` answers: the job's id, and whether this call created it.

    `created` is False when a live job with the same unique key existed; then `id` and `state` are that job's.
    """

    id: int
    queue: str
    task: str
    state: State
    created: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come, as its handler said: so much `done`, `of` so much in all where that is known,
    and a `note` for people."""

    done: float
    of: float | None = None
    note: str | None = None

    @property
    def share(self) -> float | None:
        """The part that is done, from 0 to 1; None where it is not known how much there is to do."""
        return min(max(self.done / self.of, 0.0), 1.0) if self.of else None

    def __str__(self) -> str:
        share = self.share
        text = f"{self.done:g}" if self.of is None else f"{self.done:g} of {self.of:g}"
        if share is not None and self.of != 100:
            text += f" ({share:.0%})"
        return f"{text}: {self.note}" if self.note else text


@dataclass(frozen=True, slots=True)
class JobDetails:
    """Everything about one job, in whichever table it is. Moments carry their time zone; `errors` are those
    of earlier attempts, oldest first; `result`, `payload` and `headers` are decoded JSON, or the stored text
    where it cannot be decoded. `error` says in one text what a failed job failed of, and why one was
    cancelled."""

    id: int
    queue: str
    task: str
    state: State
    payload: Any
    priority: int
    attempts: int
    max_attempts: int | None
    """None where the row does not say it, and this App does not know the task."""
    releases: int
    unique_key: str | None
    created_at: datetime
    available_at: datetime
    reserved_at: datetime | None
    reserved_by: str | None
    lease_token: int
    ended_at: datetime | None
    result: Any
    reason: str | None
    exception: str | None
    message: str | None
    traceback: str | None
    errors: list[Mapping[str, Any]]
    timeout_ms: int | None = None
    """How long an attempt may take; 0 or None for no limit."""
    unique_until: UniqueUntil = "finish"
    cancel_requested_at: datetime | None = None
    label: str | None = None
    headers: Any = field(default_factory=dict)
    progress: Progress | None = None
    """What its handler said last; that of an earlier attempt until the next one says something."""
    retention_ms: int | None = None
    """How long it is kept after its end, where it says so itself."""
    expires_at: datetime | None = None
    """When it may be deleted, of an ended job that says itself how long it is kept."""
    backoff: str | None = None
    on_success: Any = None
    """The task that follows when it has finished, as in `{"task": "shop.thank", "queue": "mail"}`."""
    on_failure: Any = None
    """The same for when it has failed for good."""

    @property
    def error(self) -> str | None:
        """The exception and message of a failed job, or the reason where there is no exception; the reason of
        a cancelled one. The same text as `error` in the view `job_states`; None where there is nothing to
        say."""
        if self.state is State.FAILED and self.exception is not None:
            return f"{self.exception}: {self.message or ''}"
        return self.reason


def error_line(reason: str | None, exception: str | None, message: str | None) -> str:
    """Say in one line what a job failed of: the exception and the first line of its message, after a reason
    other than an error of the handler."""
    lines = (message or "").strip().splitlines()
    text = ": ".join(part for part in (exception, lines[0] if lines else None) if part) or reason or "?"
    return text if reason == "error" else f"{reason}: {text}"


class ClaimedJob(NamedTuple):
    """A job a worker holds: id and token are its right to it, the rest is what it needs to run it."""

    id: int
    lease_token: int
    queue: str
    task: str
    payload: str
    attempts: int
    max_attempts: int
    releases: int = 0
    timeout_ms: int | None = None
    unknown_ms: int | None = None
    """How long ago by the database's clock a worker first could not run it; None where none has said so."""
    cancel_requested_at: datetime | None = None
    """When an operator asked for its end, while an earlier attempt ran."""
    losses: int = 0
    """How often a worker was lost that had started it. After the first, the next attempt runs in a process of
    its own."""
    priority: int = 0
    due_ms: float = 0.0
    """When it was due, in milliseconds since 1970."""
    on_success: str | None = None
    on_failure: str | None = None
    label: str | None = None
    headers: str | None = None
    """As JSON, unread: SQL may have inserted anything."""
    backoff: str | None = None
    retention_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An exception as text that every database can store; see `retry.describe`."""

    exception: str
    message: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """T4: the handler returned; `result` is JSON text, None for no result. `note` says, in the row, what
    became of a result that could not be stored."""

    result: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler raised `sqlq.Cancel`: the job ends, is no failure, and is not retried."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Retried:
    """T5: the attempt counted, another follows after `delay_ms`."""

    delay_ms: int
    error: ErrorText
    reason: FailureReason = "error"


@dataclass(frozen=True, slots=True)
class Released:
    """T6: the attempt is given back; the job is due again after `delay_ms`. `snoozed`: the handler asked for
    that."""

    delay_ms: int = 0
    unknown_task: bool = False
    snoozed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """T7: no attempt follows; the job moves to failed_jobs."""

    reason: FailureReason
    error: ErrorText


@dataclass(frozen=True, slots=True)
class SelfCompleted:
    """The handler called `complete()`: whether its transaction committed is for the database to say. If it
    did not, `otherwise` is how the attempt ended."""

    otherwise: Outcome


Outcome: TypeAlias = Completed | Cancelled | Retried | Released | Failed | SelfCompleted


@dataclass(frozen=True, slots=True)
class Settlement:
    """How an attempt ended, with the right to write it."""

    id: int
    lease_token: int
    attempts: int
    outcome: Outcome
    follow_up: NewJob | None = None
    """What follows the job that ends so, to be enqueued with it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: the one argument of the task that follows it.

    `outcome` is `completed` or `failed`, `attempts` the number of attempts it took. Of a failed job `reason`
    is what `failed_jobs` has (error, timeout, worker_lost, unknown_task or bad_payload), `exception` the
    class and `message` the text of its last error. `label` is the one that the job has. More is to be had by
    the id: `app.get(ended.id)` has the traceback and the errors of earlier attempts, `app.result(ended.id)`
    what it returned.

    >>> @app.task  # doctest: +SKIP
    ... def alarm(ended: sqlq.Ended) -> None:
    ...     pager.send(f"{ended.task} {ended.id} failed: {ended.message}")
    """

    id: int
    task: str
    queue: str
    outcome: Literal["completed", "failed"]
    attempts: int
    reason: FailureReason | None = None
    exception: str | None = None
    message: str | None = None
    label: str | None = None


E_contra = TypeVar("E_contra", contravariant=True)


class TakesEnding(Protocol[E_contra]):
    """A task whose handler takes how a job ended."""

    def new(self, ended: E_contra, /) -> NewJob[Any]: ...


Follows: TypeAlias = TakesEnding[Ended] | TakesEnding[dict[str, Any]]
"""A task that may follow the end of a job: its handler takes an `Ended`, or that as a dict."""
