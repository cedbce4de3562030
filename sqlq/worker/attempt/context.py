"""A job while a handler runs it, and how the handler finds it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlq.config.constants import NOTE_CHARACTERS
from sqlq.errors import ConfigurationError, SealError
from sqlq.model.flow import Growth
from sqlq.model.job import ClaimedJob, NewJob, Progress
from sqlq.model.retry import scrubbed
from sqlq.payload import headers as headings
from sqlq.store.flows import flows
from sqlq.store.flows.flows import Before
from sqlq.worker.attempt.own_row import Commits, CompletionTarget

if TYPE_CHECKING:
    from sqlq.model.task import Task
    from sqlq.payload.annotations import Arguments

log = logging.getLogger("sqlq.worker")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_current: ContextVar[RunningJob | None] = ContextVar("sqlq_current_job", default=None)


D = TypeVar("D")
_RAISES: Any = object()


@overload
def current_job() -> RunningJob: ...


@overload
def current_job(default: D) -> RunningJob | D: ...


def current_job(default: Any = _RAISES) -> Any:
    """Return the job that the calling handler runs, and outside a handler the default.

    Works in `def` and `async def` handlers and in what they call, also through `asyncio.to_thread`; not in
    threads a handler starts by itself. Raises `ConfigurationError` outside a handler where no default is
    given. A function that runs as a job, and is called as a function too, asks `current_job(None)`.

    >>> sqlq.current_job().id  # doctest: +SKIP
    42
    >>> if job := sqlq.current_job(None):  # doctest: +SKIP
    ...     job.progress(25, of=100)
    """
    job = _current.get()
    if job is not None:
        return job
    if default is _RAISES:
        raise ConfigurationError(
            "current_job() was called outside a handler: there is no job here; current_job(None) is None then"
        )
    return default


class RunningJob(Commits):
    """The job a handler runs.

    `id`, `task`, `queue`, `attempts` (1 in the first attempt) and `max_attempts` say what it is.
    `lease_token` rises with every claim and can fence external effects; `id` can serve as their idempotency
    key. `label` and `headers` (read-only) are what was set where it was enqueued. `lifespan` is what
    `App.lifespan` has yielded in this process. `worker` is the id of the worker that runs it.
    """

    # Class attributes, not instance ones: a worker makes ten thousands of jobs a second.
    worker: str | None = None
    """The id of its worker, as `app.workers.list()` has it; None where no worker runs it, as in tests."""
    lifespan: Any = None
    """What the App's lifespan has yielded in this process; None for an App without one."""
    deadline: float | None = None
    timed_out = False
    arguments: Arguments
    """What the handler is called with."""
    heeded = False
    """Whether the handler has seen that it should stop."""
    error: BaseException | None = None
    """What the handler raised, or the timeout it met; None where that happened in another process."""
    ended = False
    """Whether the attempt has: its outcome is known, or it was given back without waiting for its
    handler."""
    told_lost = False
    """Whether listeners know that the job has another owner."""
    trace_id: str | None = None
    span_id: str | None = None
    """What names this attempt in a trace, as hexadecimal text; set by what surrounds it, for log lines."""
    on_start: Callable[[RunningJob], None] | None = None
    """Told when the handler is about to run, here or in a process of its own."""
    kill: Callable[[], None] | None = None
    """Ends the process the handler runs in, where it has one of its own."""
    _stop: Callable[[], object] | None = None
    said_written: Progress | None = None
    """What of that is in the job's row."""
    keeps_noted = False
    """Whether the job's row says how long it is kept, where its task does."""
    _warned = False
    before: Sequence[Before] | None = None
    """The steps before it, where that is known without asking the database."""
    on_progress: Callable[[RunningJob], None] | None = None
    """Told when there is something new to write."""
    cancel_noted = False
    """Whether the worker knows that an operator asked for the job's end."""

    def __init__(
        self,
        claimed: ClaimedJob,
        task: Task[..., Any] | None,
        trusted_until: float,
        target: CompletionTarget | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self.claimed = claimed
        self.right = (claimed.id, claimed.lease_token)
        if task is not None and task.elsewhere:
            task = task.for_queue(claimed.queue)
        self.task_found = task
        self.trusted_until = trusted_until
        """Until when, by this machine's monotonic clock, the lease is certainly ours."""
        self.target = target
        self.isolated = isolated
        """Whether the handler runs in a process of its own."""
        self.alone = False
        """Whether its process is to have run nothing before, and runs nothing after it."""
        self.is_async = task is not None and task.is_async and not isolated
        timeout_ms = claimed.timeout_ms
        if timeout_ms is None and task is not None:
            timeout_ms = task.timeout_ms
        self.timeout_ms: int | None = timeout_ms or None
        """How long an attempt may take: what the row says, in which 0 is no limit, or else what the task
        says."""
        self.claimed_at = time.monotonic()
        self.cancel_requested = claimed.cancel_requested_at is not None

    @property
    def attempts(self) -> int:
        return self.claimed.attempts

    @property
    def max_attempts(self) -> int:
        return self.claimed.max_attempts

    @property
    def releases(self) -> int:
        """How often it was given back or snoozed before, which `attempts` does not count. A checkpoint, or
        `sqlq retry`, begins the number anew."""
        return self.claimed.releases

    @property
    def lease_token(self) -> int:
        return self.claimed.lease_token

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that enqueued the job; None for one that was enqueued otherwise."""
        return self.claimed.schedule

    @property
    def scheduled_for(self) -> datetime | None:
        """The moment of its schedule for which the job was enqueued, in UTC; None for a job of no schedule.

        It is the planned moment, whenever the job runs: late, a second time, or a day after an outage.
        """
        ms = self.claimed.scheduled_ms
        return None if ms is None else _EPOCH + timedelta(milliseconds=ms)

    @property
    def label(self) -> str | None:
        # SQLite lets in bytes, which the log could not say
        return None if self.claimed.label is None else str(self.claimed.label)  # guard: labels-are-text

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """What the job's row says, or else its task, without sqlq's own. Raises `ArgumentsError` for headers
        that SQL has inserted and that are none, so that the attempt fails before it begins."""
        if self.claimed.headers is None:
            return headings.NO_HEADERS if self.task_found is None else self.task_found.headers
        return headings.shown(self.claimed.headers)

    @property
    def carried(self) -> Mapping[str, Any]:
        """The values of context variables that came with the job."""
        return headings.carried(self.claimed.headers)

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: its timeout has passed, its lease was lost, an operator cancelled
        the job, or the worker is shutting down and the grace time is over. A `def` handler that runs long
        should look now and then, and return when it is so: having seen this, it has not finished by
        returning, but is given back (or cancelled, or timed out). An `async def` handler is cancelled, and
        one in a process of its own is asked, and then killed."""
        if self.asked_to_stop:
            self.heeded = True
        return self.heeded

    @property
    def asked_to_stop(self) -> bool:
        return self.cancelled_at is not None

    def progress(self, done: float, of: float | None = None, note: str | None = None) -> None:
        """Say how far the job has come, for those who look: `done`, `of` so much in all, and a `note` of up
        to 255 characters.

        Costs next to nothing and waits for nothing, also on an event loop: what was said last is written at
        most once a second, and when the job ends. It never makes the job fail; what is no number is left out,
        with a warning in the log. `app.jobs.get(id).progress`, `job_states`, `sqlq show` and `sqlq jobs` show
        it.

        >>> for i, row in enumerate(rows):  # doctest: +SKIP
        ...     sqlq.current_job().progress(i, of=len(rows))
        """
        try:
            said = _progress(done, of, note)
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "job %d: its progress cannot be shown: %s",
                    *(self.id, scrubbed(str(error), 200)),
                    extra=self.fields("progress_dropped"),
                )
            return
        self.has_said(said)

    def has_said(self, said: Progress) -> None:
        """Take note of how far the handler has come, here or in a process of its own."""
        self.said = said
        if self.on_progress is not None:
            self.on_progress(self)

    # -- its flow --------------------------------------------------------------------------------------------

    @property
    def flow_id(self) -> int | None:
        """The flow of which it is a step; None for a job that is in none."""
        return self.claimed.flow_id

    @property
    def flow(self) -> Growth:
        """The flow of which it is a step: steps added to it are written in the transaction in which this job
        completes itself (`completing`, `complete`), so that a flow grows exactly once.

        They wait for this job, and may take its result: `flow.step.result`. A handler that adds steps and
        does not complete its job has failed, and is tried again. Raises `ConfigurationError` for a job that
        is in no flow.

        >>> job = sqlq.current_job()  # doctest: +SKIP
        >>> with job.completing(engine) as session:  # doctest: +SKIP
        ...     job.flow.add(index.map(pages_of(session)))
        """
        if self.claimed.flow_id is None:
            raise ConfigurationError(
                f"job {self.id} is a step of no flow: enqueue jobs with app.enqueue, or a flow of their own"
            )
        if self.growth is None:
            self.growth = Growth(
                self.claimed.flow_id, NewJob(self.task, self.claimed.payload, self.queue, self.max_attempts)
            )
        return self.growth

    @cached_property
    def results(self) -> list[Any]:
        """What the steps before this one have returned, in the order in which they were named: as their
        return annotations say, where this App knows their tasks. None for a step that has no result, as one
        that failed.

        Asks the database when it is first looked at. Raises `ConfigurationError` for a job that is in no
        flow, and `SealError` for a result that is not opened.

        >>> sqlq.current_job().results  # doctest: +SKIP
        [Receipt(number=12), 3]
        """
        if self.claimed.flow_id is None:
            raise ConfigurationError(f"job {self.id} is a step of no flow, and comes after no other")
        steps = self.before
        if steps is None:
            with self.app.database.read() as conn:
                steps = flows.before(conn, {self.id: self.queue}, self._seal).get(self.id, [])
        return [self._result_of(step) for step in steps]

    def _result_of(self, step: Before) -> Any:
        if step.unopened is not None:  # guard: a-result-that-is-not-opened-is-no-none
            raise SealError(f"the result {step.why}")
        if step.result is None:
            return None
        task = None if step.task is None else self.app.tasks.get(step.task)
        form = json.loads(step.result)
        if task is None or (conversion := task.result_conversion) is None:
            return form
        return conversion.decode(form, f"the result of job {step.id}")

    # -- for the worker --------------------------------------------------------------------------------------

    @property
    def is_too_late(self) -> bool:
        """Whether the time is over in which the job had to be started, and it never was."""
        late_ms = self.claimed.late_ms
        if late_ms is None or self.attempts > 1:  # guard: what-was-started-does-not-expire
            return False
        return late_ms + 1000 * (time.monotonic() - self.claimed_at) >= 0

    def on_cancel(self, stop: Callable[[], object] | None) -> None:
        """Say what makes the handler stop; called at once where that was asked for already."""
        self._stop = stop
        if stop is not None and self.asked_to_stop:
            stop()

    def cancel(self) -> None:
        """Ask the handler to stop. A thread cannot be made to; a coroutine is, and a process."""
        if self.cancelled_at is None:
            self.cancelled_at = time.monotonic()
        if (stop := self._stop) is not None:  # read once: the handler's thread may end meanwhile
            stop()

    def is_trusted(self) -> bool:
        return time.monotonic() < self.trusted_until

    def begin(self) -> None:
        """Mark the start of the attempt, in the thread or asyncio task that runs it."""
        self.mark_started()
        _current.set(self)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "job %d %s (queue %s, attempt %d of %d) starts",
                *(self.id, self.task, self.queue, self.attempts, self.max_attempts),
                extra=self.fields("begun"),
            )

    def leave(self) -> None:
        """Mark the end of the attempt there: what this thread does next is of no job."""
        _current.set(None)

    def mark_started(self) -> None:
        self.started = time.monotonic()
        if self.timeout_ms is not None:
            self.deadline = self.started + self.timeout_ms / 1000
        if self.on_start is not None:
            self.on_start(self)

    def labels(self) -> dict[str, object]:
        """What names this job and attempt in a log line."""
        names: dict[str, object] = {
            "job_id": self.id,
            "task": self.task,
            "queue": self.queue,
            "attempt": self.attempts,
        }
        if self.trace_id is not None:
            names |= {"trace_id": self.trace_id, "span_id": self.span_id}
        return names if self.claimed.label is None else {**names, "label": self.label}

    def fields(self, event: str) -> dict[str, object]:
        """What a log line about this job carries."""
        return {**self.labels(), "event": event}


def _progress(done: Any, of: Any, note: Any) -> Progress:
    numbers = [float(done), *([] if of is None else [float(of)])]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{done!r} of {of!r} are no numbers")
    text = None if note is None else scrubbed(str(note)[:NOTE_CHARACTERS], 4 * NOTE_CHARACTERS)
    return Progress(numbers[0], None if of is None else numbers[1], text)
