"""One attempt at one job, with the worker's own facts of it. Handlers see a `JobContext` instead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from time import monotonic
from traceback import clear_frames, walk_tb
from typing import Any

from sqlq.database.batch import Right
from sqlq.database.caller.session import CallersTransaction
from sqlq.database.database import Database
from sqlq.model.flow import Growth, Plan
from sqlq.model.flow_parts import AnyFlow
from sqlq.model.job import ClaimedJob, Progress
from sqlq.model.task import Task
from sqlq.payload.codec import Arguments
from sqlq.payload.encryption import Encryption
from sqlq.store.flows.flows import Before
from sqlq.store.jobs.lease import Note
from sqlq.worker.threads.log import log


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a job: its database, the tasks of its App, and how that App plans the steps of flows."""

    open_database: Callable[[], Database] | None = None
    """None for a job without a row: it runs inline, or eagerly."""
    encryption: Encryption | None = None
    schema: str | None = None
    tasks: Mapping[str, Task[..., Any]] = field(default_factory=dict)
    plan: Callable[[AnyFlow], Plan] | None = None


NO_ARGUMENTS: Arguments = ([], {})
"""Those of an ended attempt; nothing is added to them."""


class Attempt:
    """An attempt at a claimed job, from the claim until its outcome is written."""

    # Defaults are class attributes: a worker makes ten thousands of attempts a second.
    worker: str | None = None
    """The id of its worker; None where no worker runs it, as in tests."""
    lifespan: Any = None
    """The value that the App's lifespan yielded in this process."""
    arguments: Arguments
    """The arguments of the handler."""
    started: float | None = None
    deadline: float | None = None
    timed_out = False
    alone = False
    """Whether its process runs no other job, before or after."""
    cancelled_at: float | None = None
    stop_noticed = False
    """Whether the handler has read that it should stop."""
    error: BaseException | None = None
    """The exception of the handler, or of its timeout; None where another process raised it."""
    completed = False
    """Whether the handler called `complete()`."""
    has_result = False
    """Whether it gave that a result."""
    ended = False
    """Whether the outcome is known, or the job was released without waiting for its handler."""
    ended_at: float | None = None
    """When its outcome was handed to the settler."""
    lost_reported = False
    """Whether the log and listeners have that the job has another owner."""
    trace_id: str | None = None
    span_id: str | None = None
    """The names of this attempt in a trace, as hexadecimal text."""
    progress: Progress | None = None
    """The last progress that the handler reported."""
    progress_written: Progress | None = None
    """The last progress in the job's row."""
    keeps_noted = False
    """Whether the job's row has the retention of its task."""
    growth: Growth | None = None
    """The steps that the handler adds to its flow."""
    before: Sequence[Before] | None = None
    """The steps before it, where they are known without a query."""
    wait: Any = None
    """Its last wait for a signal, where that is known without a query."""
    on_progress: Callable[[Attempt], None] | None = None
    """Called when there is progress to write."""
    on_saved: Callable[[CallersTransaction | None, str], None] | None = None
    """Called with each new cursor, as JSON, and the transaction of the handler that has it, if any."""
    context: Any = None
    """The `JobContext` of the handler; made when the handler needs it."""
    isolate: Any = None
    """The process in which it runs, where it has one of its own and that is started."""
    kill: Callable[[], None] | None = None
    """Ends the process of the handler, where it has one of its own."""
    _stop: Callable[[], object] | None = None

    def __init__(
        self,
        claimed: ClaimedJob,
        task: Task[..., Any] | None,
        trusted_until: float,
        target: Target = Target(),
        *,
        isolated: bool = False,
    ) -> None:
        """`isolated` for a handler that runs in a process of its own."""
        self.claimed = claimed
        self.id, self.task, self.queue = claimed.id, claimed.task, claimed.queue
        self.right: Right = (claimed.id, claimed.lease_token)
        """Id and lease token: they entitle to write to the job's row."""
        if task is not None and task._elsewhere:
            task = task._in_queue(claimed.queue)
        self.registered = task
        self.trusted_until = trusted_until
        """Until when, by this machine's monotonic clock, the lease is certainly ours."""
        self.target = target
        self.isolated = isolated
        self.is_async = task is not None and task.is_async and not isolated
        """Whether it runs on this process's event loop."""
        self.timeout_ms: int | None = (
            task.timeout_ms if task is not None and claimed.timeout_ms is None else claimed.timeout_ms
        ) or None
        """The longest that an attempt may take. In a row 0 is no limit, and None leaves it to the task."""
        self.claimed_at = monotonic()
        self.cancel_requested = claimed.cancel_requested_at is not None
        """Whether an operator cancels the job."""

    @property
    def label(self) -> str | None:
        # SQLite lets in bytes, which the log could not write
        return None if self.claimed.label is None else str(self.claimed.label)  # guard: labels-are-text

    # -- its row ---------------------------------------------------------------------------------------------

    @property
    def has_row(self) -> bool:
        """False for a job that runs inline, or eagerly."""
        return self.target.open_database is not None

    @property
    def keeps_ms(self) -> int | None:
        """The retention of the task, where the row has none."""
        if self.claimed.retention_ms is not None or self.registered is None:
            return None
        return self.registered.retention_ms

    def note(self) -> Note:
        """Return the progress and the retention, as they are written to the row."""
        progress = self.progress
        if progress is None:
            return Note(*self.right, None, None, None, self.keeps_ms)
        return Note(*self.right, progress.done, progress.of, progress.note, self.keeps_ms)

    def report_progress(self, progress: Progress) -> None:
        """Take progress that the handler reports, here or in a process of its own."""
        self.progress = progress
        if self.on_progress is not None:
            self.on_progress(self)

    # -- its end ---------------------------------------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        return self.cancelled_at is not None

    def on_cancel(self, stop: Callable[[], object] | None) -> None:
        """Set the function that stops the handler; it is called at once where the handler is to stop."""
        self._stop = stop
        if stop is not None and self.cancelled_at is not None:
            stop()

    def forget(self) -> None:
        """Drop what the handler had. Its exception refers to its frames, and they refer to this attempt, or
        in `contextlib` to the exception. Only Python's collector would free all that."""
        if self.error is not None:
            for frame, _ in walk_tb(self.error.__traceback__):
                if frame.f_code.co_filename == contextlib.__file__:
                    with contextlib.suppress(RuntimeError):  # it goes on, in a thread of the handler's own
                        frame.clear()
            self.error = None  # guard: an-ended-attempt-keeps-no-frames
        if self.context is not None:
            self.__dict__.pop("context", None)  # a thread that goes on makes another
        self.arguments = NO_ARGUMENTS

    def drop_locals(self) -> None:
        """Drop the arguments, and the locals in the frames of the exception and of those that led to it. The
        lines of their tracebacks stay."""
        self.arguments = NO_ARGUMENTS
        errors, known = [self.error], set[int]()
        with contextlib.suppress(Exception):  # an exception may have code of its own
            while errors:
                error = errors.pop()
                if error is not None and id(error) not in known:
                    known.add(id(error))
                    clear_frames(error.__traceback__)
                    errors += [error.__cause__, error.__context__]
                    errors += error.exceptions if isinstance(error, BaseExceptionGroup) else ()

    def cancel(self) -> None:
        """Request a stop of the handler. A coroutine or a process can be forced to stop, a thread cannot."""
        if self.cancelled_at is None:
            self.cancelled_at = monotonic()
        if (stop := self._stop) is not None:  # read once: the handler's thread may end meanwhile
            stop()

    # -- times, and log lines --------------------------------------------------------------------------------

    def mark_started(self) -> None:
        self.started = monotonic()
        if self.timeout_ms is not None:
            self.deadline = self.started + self.timeout_ms / 1000

    def seconds(self) -> float:
        """Return how long the handler has run, or ran."""
        return 0.0 if self.started is None else (self.ended_at or monotonic()) - self.started

    @property
    def is_first_claim(self) -> bool:
        """Whether no worker had claimed the job before: its history is this attempt."""
        return self.claimed.lease_token <= 1

    def times(self) -> tuple[datetime, datetime | None, datetime]:
        """Return when the attempt was claimed, started and ended. Changes of this machine's clock meanwhile
        do no harm."""
        now, clock = datetime.now(UTC), monotonic()
        started = None if self.started is None else now - timedelta(seconds=clock - self.started)
        ended = now if started is None else started + timedelta(seconds=self.seconds())
        return now - timedelta(seconds=clock - self.claimed_at), started, ended

    def labels(self) -> dict[str, Any]:
        """Return the fields that name this job and attempt in a log line."""
        labels = {
            "job_id": self.id,
            "task": self.task,
            "queue": self.queue,
            "attempt": self.claimed.attempts,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "label": self.label,
        }
        return {name: label for name, label in labels.items() if label is not None}

    def log(self, level: int, event: str, text: str, *values: object, exc_info: bool = False) -> None:
        """Write a line about this job to the log."""
        log.log(
            level,
            f"job %d: {text}",
            self.id,
            *values,
            **self.labels(),
            event=event,
            exc_info=exc_info,
            stacklevel=2,
        )

    log_error = partialmethod(log, logging.ERROR)
    log_warning = partialmethod(log, logging.WARNING)
