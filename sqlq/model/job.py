"""A job: as a caller makes it, as it is stored, and as a worker holds it.

    enqueue ──► scheduled/available ──claim──► running ──settle──► finished, failed or cancelled
       │                ▲     ▲                   │
       └──► blocked ────┘     └── retry, snooze, release

The state is derived from the row, so it cannot contradict itself: is it reserved, is it due, which table is
it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Unpack

from sqlq.config.json_text import AsJson
from sqlq.errors import EnqueueError
from sqlq.model.checks import OnConflict, Rule, UniqueUntil, refusing_by
from sqlq.model.foreign_names import NameOfAnotherQueue, hints
from sqlq.model.handle import Handle
from sqlq.model.history import AttemptRecord
from sqlq.model.job_options import JobOptions, changed_fields, merge_cancel
from sqlq.payload import headers as headings
from sqlq.payload.codec import HasArguments
from sqlq.payload.encryption import Encryption

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R = TypeVar("R", default=Any)
    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R = TypeVar("R")
    R_co = TypeVar("R_co", covariant=True)
"""The return type of a job's handler; known to type checkers alone."""
J_co = TypeVar("J_co", covariant=True)


class State(StrEnum):
    """Where a job is, as the view `job_states` shows it."""

    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobOrFlow(Protocol[J_co]):
    """The argument of `enqueue`: a job, of which it makes a `Job`, or a flow. Known to type checkers
    alone."""

    @property
    def _becomes(self) -> J_co: ...


@dataclass(frozen=True, repr=False)
class NewJob(HasArguments, Generic[R_co]):
    """A job that is not enqueued yet: made by `task.new(…)`, given options by `.set(…)`.

    It is immutable: `.set()` returns another one, so a NewJob may be kept and enqueued many times.
    """

    task: str
    payload: str
    queue: str
    max_attempts: int | None
    """None: its task's number, which a worker that knows the task takes when it claims the job."""
    priority: int = 0
    timeout_ms: int | None = None
    delay_ms: int = 0
    available_at: datetime | None = None
    unique_key: str | None = None
    unique_until: UniqueUntil = "finish"
    on_conflict: OnConflict = "keep"
    max_wait_ms: int | None = None
    """How long after it was first enqueued a debounced job may be due at the latest."""
    start_within_ms: int | None = None
    """How long after it is due the job may be started; None where the row has no such time."""
    start_by: datetime | None = None
    """Until when it may be started."""
    on_success: str | None = None
    """The task that follows, as the job's row names it; see `outcome.Follower`."""
    on_failure: str | None = None
    """The same after a failure, with what follows a cancel inside it."""
    label: str | None = None
    batch_key: str | None = None
    headers_text: str | None = None
    """Its own headers, as JSON; the App adds its own when the job is enqueued."""
    backoff: str | None = None
    """As the job's row has it; None where the task defines it."""
    retention_ms: int | None = None
    schedule: str | None = None
    """The schedule that it is of; None for a job that was enqueued otherwise."""
    scheduled_for: datetime | None = None
    """The schedule's run time for which it is enqueued."""
    limit_key: str | None = None
    """The key of the limit that it waits for; None where there is none."""
    rule: Rule | None = None
    """The rule of that limit; None where only its key is given, and the App defines it."""
    _results: tuple[tuple[int | str, Any], ...] = field(default=(), repr=False)
    """The arguments that are results of steps before it, by place or name, each a `flow.Result`."""
    _by_name_alone: bool = field(default=False, compare=False, repr=False)
    """Whether its task is known by its name alone, so that the App's defaults count for it."""
    _options_set: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The options that `.set` was given."""

    if TYPE_CHECKING:

        @property
        def _becomes(self) -> Job[R_co]: ...

    def __repr__(self) -> str:
        return f"<NewJob {self.task!r}>"

    @property
    def headers(self) -> Mapping[str, Any]:
        """The headers that `.set` was given, read-only."""
        return headings.shown(self.headers_text)

    def _with_payload(self, payload: str) -> NewJob[R_co]:
        """Return this job with other arguments, as JSON text; in a fifth of the time of making it anew."""
        fields = vars(self).copy()
        fields["payload"] = payload
        new: NewJob[R_co] = object.__new__(NewJob)
        object.__setattr__(new, "__dict__", fields)
        return new

    def _protected_by(self, encryption: Encryption) -> NewJob[R_co]:
        """Return this job with its payload signed or encrypted, for the task and queue that it has."""
        return self._with_payload(encryption.protect("payload", self.task, self.queue, self.payload))

    def set(self, **options: Unpack[JobOptions]) -> NewJob[R_co]:
        """Return this job with other options; an option that is not given stays as it is.

        - `queue`: another one than the task's own.
        - `delay`: how long after the enqueue it is due, by the database's clock.
        - `available_at`: when it is due, with a time zone, in place of a delay.
        - `priority`: −100 to 100; a larger one runs first.
        - `max_attempts`: how often it is tried.
        - `timeout`: how long an attempt may take; None takes the task's away.
        - `backoff`: the wait before the next attempt, in any form the task takes but a function of your own.
        - `retention`: how long it is kept after it has finished or failed, or "forever".
        - `unique_key`: at most one job of that key is live in its queue; None takes it away.
        - `unique_until`: the end of that: "finish", "start" for its first claim, or "pruned".
        - `on_conflict`: "keep" the live job; "replace" it while it waits; "debounce" it to this one's time.
        - `max_wait`: how long after its first enqueue a debounced job is due at the latest.
        - `start_within`: how long after it is due it may be started, else it is cancelled; None for any time.
        - `start_by`: until when it may be started, in place of `start_within`.
        - `on_success`: a task of which a job follows when this one has finished; None for none.
        - `on_failure`: the same when it has failed for good.
        - `on_cancel`: the same when it was cancelled.
        - `label`: a short text for people; None takes it away.
        - `batch`: a text by which `app.jobs` finds jobs of separate calls; None takes it away.
        - `headers`: a mapping of names to JSON that travels with the job, beside those set before.
        - `limit`: a `sqlq.Limit` or `sqlq.Serial` with a plain key, or a declared name; None takes it away.

        `enqueue` answers with the live job of a `unique_key`; with "pruned" with one that has ended, too. A
        job that replaces another is due when that is. Raises `EnqueueError` for a value out of range, naming
        it.

        >>> send_receipt.new(7).set(delay="5m", priority=10)  # doctest: +SKIP
        """
        known = JobOptions.__annotations__
        if unknown := sorted(options.keys() - known.keys()):
            raise EnqueueError(
                f"set takes no {', '.join(unknown)}: {hints(unknown, known)}it takes {', '.join(known)}"
            )
        for one, other in (("delay", "available_at"), ("start_within", "start_by")):
            if options.get(one) is not None and options.get(other) is not None:
                raise EnqueueError(f"both {one} and {other} are set: give one of them")
        with refusing_by(EnqueueError):
            changes = changed_fields(options)
            if "headers" in changes:
                changes["headers_text"] = headings.encode(
                    {**self.headers, **changes.pop("headers")}, "the headers"
                )
        merge_cancel(changes, self.on_failure)
        new = replace(self, **changes, _options_set=self._options_set | changes.keys())
        for name, default in (("unique_until", "finish"), ("on_conflict", "keep"), ("max_wait", None)):
            value = options.get(name)
            if new.unique_key is None and value not in (None, default):
                raise EnqueueError(f'{name}="{value}" is about a unique key: set unique_key together with it')
        if (new.on_conflict == "debounce") != (new.max_wait_ms is not None):
            raise EnqueueError(
                'on_conflict="debounce" without max_wait could put the job off for ever, and max_wait is for '
                'that alone: set both, as in on_conflict="debounce", max_wait="10m"'
            )
        if new.limit_key is not None and new.on_conflict != "keep":
            raise EnqueueError(
                f'on_conflict="{new.on_conflict}" is not for a job under a limit, which waits in line: leave '
                "one of the two out, or take the task's limit away with .set(limit=None)"
            )
        return new


@dataclass(frozen=True, slots=True, repr=False)
class Job(Handle, Generic[R_co]):
    """The answer of `enqueue`: the job's id, and whether this call created it.

    `created` is False when a live job with the same unique key was there, or with `unique_until="pruned"` one
    that has ended. Then `id` and `state` are that job's. `replaced` is True when that one was waiting, and
    this call has put its own job in its place. After a rollback of its transaction each use of it raises
    `JobNotFoundError`, also where SQLite has given its id to another job.
    """

    id: int
    queue: str
    task: str
    state: State
    created: bool
    replaced: bool = False


NameOfAnotherQueue.answer(
    Job,
    {
        "get result return_value": "app.result(job, timeout=…)",
        "wait join": "app.wait_all([job])",
        "refresh reload info": "app.jobs.get(job.id)",
        "get_status status": "job.state, or app.jobs.get(job.id).state for what it is now",
        "cancel revoke abort": "app.jobs.cancel([job.id])",
    },
)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job, as its handler has set it. `done` is how much is done, `of` is the total where
    that is known, and `note` is for people."""

    done: float
    of: float | None = None
    note: str | None = None

    @property
    def share(self) -> float | None:
        """The part that is done, from 0 to 1; None where it is not known how much there is to do."""
        return min(max(self.done / self.of, 0.0), 1.0) if self.of else None

    def __str__(self) -> str:
        text = f"{self.done:g}" if self.of is None else f"{self.done:g} of {self.of:g}"
        if self.share is not None and self.of != 100:
            text += f" ({self.share:.0%})"
        return f"{text}: {self.note}" if self.note else text


@dataclass(frozen=True, slots=True, repr=False)
class JobDetails(HasArguments, AsJson, Handle):
    """Everything about one job, in whichever table it is. Times carry their time zone. `errors` are those of
    earlier attempts, oldest first. `history` has a line for each attempt, and for each retry by an operator.
    `result`, `payload` and `headers` are decoded JSON, or the stored text where it cannot be decoded. An
    encrypted or signed one is opened. Where these keys do not open it, it is an object with one text,
    `unreadable`, which is the reason. `error` is the error of a failed job in one text, or the reason of a
    cancelled one."""

    COLUMNS = ("id", "state", "queue", "task", "attempts", "time", "progress", "label", "error")
    id: int
    queue: str
    task: str
    state: State
    payload: Any
    priority: int
    attempts: int
    max_attempts: int | None
    """None where the row does not have it, and this App does not know the task."""
    releases: int
    unique_key: str | None
    created_at: datetime
    available_at: datetime | None
    """When it is due; None while it is blocked, or where it was to its end."""
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
    batch_key: str | None = None
    headers: Any = field(default_factory=dict)
    progress: Progress | None = None
    """The last progress that its handler has set. The progress of an earlier attempt stays until the next one
    sets some."""
    cursor: Any = None
    """How far it has come: the cursor that its last checkpoint has saved, or the saved steps of a job with
    steps."""
    start_by: datetime | None = None
    """Until when it has to be started; cancelled if it is not."""
    retention_ms: int | None = None
    """How long it is kept after its end, where it has a retention of its own."""
    expires_at: datetime | None = None
    """When it may be deleted, of an ended job with a retention of its own."""
    backoff: str | None = None
    on_success: Any = None
    """The task that follows when it has finished, as in `{"task": "shop.thank", "queue": "mail"}`."""
    on_failure: Any = None
    """The same for when it has failed for good."""
    schedule: str | None = None
    """The schedule that enqueued it."""
    scheduled_for: datetime | None = None
    """The schedule's run time for which it was enqueued; None for a job of no schedule."""
    flow_id: int | None = None
    limit_key: str | None = None
    blocked_by: str | None = None
    """Why it is blocked, while it is: `flow`, for steps before it, or `limit`, for its turn."""
    due_at: datetime | None = None
    """When a blocked job wants to start at the earliest, where it has such a time."""
    replay_of: int | None = None
    """The job of which it is a replay."""
    history: tuple[AttemptRecord, ...] = ()
    """Its attempts from the first to the last, each with its outcome; the one that goes on included."""
    fingerprint: str | None = None
    """The id of the error of a failed job, as `sqlq failed` has it; empty where SQL inserted the row."""
    encryption: str | None = None
    """How its payload is signed or encrypted, as in `encrypted with key 3f9a2c41`; None for a plain one."""

    @property
    def time(self) -> datetime | None:
        """Since when it is in its state, or when it is due."""
        if self.state == "running":
            return self.reserved_at
        return self.ended_at or self.available_at or self.created_at

    @property
    def error(self) -> str | None:
        """The exception and message of a failed job, or the reason where there is no exception; the reason of
        a cancelled one. The same text as `error` in the view `job_states`; None where there is neither."""
        if self.state is State.FAILED and self.exception is not None:
            return f"{self.exception}: {self.message or ''}"
        return self.reason

    def as_json(self, *, whole: bool = True) -> dict[str, Any]:
        """Return it as an object; without its large fields where it stands in a list."""
        fields = {**asdict(self), "error": self.error}
        return fields if whole else {name: value for name, value in fields.items() if name not in LARGE}


LARGE = ("payload", "result", "traceback")


def error_line(reason: str | None, exception: str | None, message: str | None) -> str:
    """Return the error of a failed job in one line: the exception and the first line of its message. A reason
    other than an error of the handler comes before it."""
    lines = (message or "").strip().splitlines()
    text = ": ".join(part for part in (exception, lines[0] if lines else None) if part) or reason or "?"
    return text if reason == "error" else f"{reason}: {text}"


NameOfAnotherQueue.answer(JobDetails, {"status": "job.state"})


class ClaimedJob(NamedTuple):
    """A job a worker holds. Its id and lease token are the right to write it; the rest is for running it."""

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
    """How long ago by the database's clock a worker first could not run it; None where none has reported
    that."""
    cancel_requested_at: datetime | None = None
    """When an operator requested its end, while an earlier attempt ran."""
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
    schedule: str | None = None
    scheduled_ms: float | None = None
    """The schedule's run time for which it was enqueued, in milliseconds since 1970."""
    cursor: str | None = None
    """How far it has come, as JSON: the cursor that the last checkpoint has saved."""
    late_ms: int | None = None
    """How long before its claim the time was over by which it had to be started. Negative where that time is
    still to come, None where it may start at any time."""
    flow_id: int | None = None
    """The flow of which it is a step, so that others may wait for it."""
    limit_key: str | None = None
