"""Publishes job events to the listeners of an App (`App.on`): after the fact, in batches, never in the way.

Each listener has a thread and a bounded queue of its own. So a slow one delays neither jobs nor other
listeners.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal, get_args

from sqlq.config.background import Background
from sqlq.config.constants import MAX_ATTEMPTS
from sqlq.errors import ConfigurationError
from sqlq.model.job import Job, NewJob
from sqlq.model.middleware import check_plain
from sqlq.model.outcome import ErrorText

log = logging.getLogger("sqlq")

EventName = Literal[
    "enqueued",
    "started",
    "finished",
    "retried",
    "failed",
    "snoozed",
    "released",
    "cancelled",
    "lost",
    "rescued",
]
NAMES: tuple[EventName, ...] = get_args(EventName)

LARGEST_BATCH = 1_000
MAX_WAITING = 100_000
"""How many events may wait for one listener; later ones are dropped."""
GATHER_SECONDS = 0.1
"""How long events gather before a listener gets them."""
IDLE_SECONDS = 10.0
"""The thread of a listener ends after this long without an event."""
COMPLAINT_SECONDS = 60.0
LAST_WORDS_SECONDS = 1.0
"""How long a process that ends waits for its listeners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event in the life of a job. `name` is one of the names that `App.on` takes; `at` is its time, by
    this machine's clock.

    `seconds` is how long the attempt ran, `delay_seconds` after how long the next one is due. `reason` is as
    in `failed_jobs`: error, timeout, worker_lost, unknown_task, bad_payload or bad_signature. For a cancelled
    job it is the text given to `sqlq.Cancel`, for a lost or rescued one the cause. `error` is the exception
    as text: `error.exception` its class, `error.message`, `error.traceback`. `exception` is the exception
    itself where this process has met it, else one that stands for it. `worker` is the id of the worker that
    lost the job. `label` is the job's, of events of attempts in this process and of `enqueued`. `trace_id`
    and `span_id` are the attempt's where it was traced (`sqlq.otel`).
    """

    name: str
    id: int
    task: str
    queue: str
    attempt: int
    max_attempts: int | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    seconds: float | None = None
    delay_seconds: float | None = None
    reason: str | None = None
    error: ErrorText | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    worker: str | None = None
    label: str | None = None
    trace_id: str | None = None
    span_id: str | None = None


Receive = Callable[[list[JobEvent]], object]


class Listener(Background):
    """A function that gets events in a thread of its own, some at a time."""

    thread_name = "sqlq-listener"

    def __init__(self, names: frozenset[str], function: Receive) -> None:
        self.names = names
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        super().__init__()

    def begin_anew(self) -> None:
        super().begin_anew()
        self._waiting: deque[JobEvent] = deque()
        self._busy = False
        self._flushing = 0
        self._dropped = self._failed = 0
        self._complained_at = float("-inf")

    def put(self, event: JobEvent) -> None:
        """Pass an event to the function soon; returns at once."""
        with self._changed:
            if len(self._waiting) < MAX_WAITING:  # guard: events-are-bounded
                self._waiting.append(event)
                if self._thread is None:
                    with suppress(RuntimeError):  # the next event tries again
                        self._begin()
                elif len(self._waiting) in (1, LARGEST_BATCH):
                    self._changed.notify_all()
                return
            self._dropped += 1
        self._complain()

    def flush(self, seconds: float) -> bool:
        """Pass all waiting events to the function. Return whether it was done within `seconds`."""
        with self._changed:
            if self._waiting:
                with suppress(RuntimeError):
                    self._begin()
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)
            finally:
                self._flushing -= 1

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, IDLE_SECONDS):
                    self._thread = None
                    return
                self._changed.wait_for(
                    lambda: self._flushing or len(self._waiting) >= LARGEST_BATCH, GATHER_SECONDS
                )
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
                self._busy = True
            try:
                self._function(batch)
            except BaseException as error:
                self._failed += 1  # only this thread counts them
                self._complain(error)
            else:
                self._complain()
            del batch  # it holds exceptions, while this thread waits
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _complain(self, error: BaseException | None = None) -> None:
        """Log what is wrong with this listener, at most once a minute."""
        now = monotonic()
        with self._changed:
            failed, dropped = self._failed, self._dropped
            if not (failed or dropped) or now < self._complained_at + COMPLAINT_SECONDS:
                return
            self._complained_at, self._dropped, self._failed = now, 0, 0
        if failed:
            log.error("the listener %s failed (times: %d)", self._name, failed, exc_info=error)
        if dropped:
            log.warning("the listener %s is too slow: %d events were dropped", self._name, dropped)


def enqueued(job: Any, max_attempts: int | None, delay_ms: int, label: str | None) -> JobEvent:
    """Return the event of a job that was enqueued."""
    return JobEvent(
        name="enqueued",
        id=job.id,
        task=job.task,
        queue=job.queue,
        attempt=0,
        max_attempts=max_attempts,
        delay_seconds=delay_ms / 1000 or None,
        label=label,
    )


class Events:
    """The listeners of an App."""

    _listeners: tuple[Listener, ...] = ()
    subscribed: frozenset[str] = frozenset()
    """The names of the events to which anything listens."""

    def add(self, names: Sequence[EventName], function: Receive) -> None:
        """Subscribe a function to events of these names. Raises `ConfigurationError` for a function that
        cannot listen."""
        check_plain(function, "the listener", "def alarm(events), which runs in a thread", [])
        if not self._listeners:
            atexit.register(_finish, weakref.ref(self))
        self._listeners = (*self._listeners, Listener(frozenset(names), function))
        self.subscribed |= {*names}

    def publish(self, *events: JobEvent) -> None:
        """Publish events to the listeners; returns at once, and raises nothing."""
        for event in events:
            for listener in self._listeners:
                if event.name in listener.names:
                    listener.put(event)

    def enqueued(self, new: Sequence[NewJob], jobs: Sequence[Job]) -> None:
        """Publish the events of jobs that were enqueued, in a transaction that has committed."""
        for options, job in zip(new, jobs, strict=True):
            if job.created:
                self.publish(
                    enqueued(job, options.max_attempts or MAX_ATTEMPTS, options.delay_ms, options.label)
                )

    def replayed(self, jobs: Iterable[Any]) -> None:
        """Publish the events of copies that were enqueued."""
        self.publish(*(enqueued(job, job.max_attempts, 0, job.label) for job in jobs))

    def flush(self, seconds: float) -> bool:
        """Pass all waiting events to their listeners. Return whether all was done within `seconds`."""
        until = monotonic() + seconds
        return all(listener.flush(max(0.0, until - monotonic())) for listener in self._listeners)


def check_names(names: Sequence[Any]) -> None:
    """Raise `ConfigurationError` for names that are none of an event."""
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        subject = f"got {unknown[0]!r}, which is no event" if unknown else "names no event"
        raise ConfigurationError(f"on() {subject}: name some of {', '.join(NAMES)}, as in @app.on('failed')")


def _finish(reference: weakref.ref[Events]) -> None:
    if (events := reference()) is not None:
        events.flush(LAST_WORDS_SECONDS)
