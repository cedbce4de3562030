"""Adds to an App's jobs when they are enqueued: headers, and the context variables that the App carries.

Where several set a header, the job's own counts (`.set(headers=…)`). Next come the functions registered by
`App.before_enqueue`, the last of them first, then the task's headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any

from sqlq.errors import ConfigurationError, EnqueueError
from sqlq.model.checks import refusing_by
from sqlq.model.job import NewJob
from sqlq.model.middleware import Scope, check_plain, name_of
from sqlq.payload import headers
from sqlq.payload.headers import Headers

BeforeEnqueue = Callable[[NewJob], Headers | None]


class EnqueueMiddleware:
    """The enqueue middleware of one App."""

    def __init__(self, carry: Sequence[ContextVar[Any]] = ()) -> None:
        """Raises `ConfigurationError` for anything but context variables with distinct names."""
        if (
            not isinstance(carry, Sequence)
            or not all(isinstance(var, ContextVar) for var in carry)
            or len({var.name for var in carry}) < len(carry)
        ):
            raise ConfigurationError(
                f"carry is {carry!r}: it is a list of context variables with different names, made by "
                "contextvars.ContextVar, as in carry=[tenant]"
            )
        self._functions: list[BeforeEnqueue] = []
        self._carry = {var.name: var for var in carry}
        self.are_any = bool(carry)
        """Whether there is anything to add to a job."""

    def add(self, function: Any) -> None:
        """Register a function that returns headers for each job. Raises `ConfigurationError` for one that
        cannot."""
        check_plain(function, "before_enqueue", "def origin(job), which returns headers", object())
        self._functions.append(function)
        self.are_any = True

    def with_headers(self, job: NewJob, first: Headers) -> NewJob:
        """Return a job with all its headers, `first` being its task's. Raises `EnqueueError` for one that is
        no valid header."""
        merged = dict(first)
        with refusing_by(EnqueueError):
            for function in self._functions:
                if (more := function(job)) is not None:
                    merged |= headers.checked(more, f"what the function {name_of(function)} returned")
            merged |= job.headers  # guard: what-a-job-says-wins
            context = copy_context()
            carried = {name: context[var] for name, var in self._carry.items() if var in context}
            for name, value in carried.items():
                headers.check(value, f"the context variable {name!r}, which the App carries,")
            if carried:
                merged[headers.CARRY] = carried
            text = headers.encode(merged, f"the headers of this job of {job.task}")
        return job if text == job.headers_text else replace(job, headers_text=text)

    def scopes(self) -> list[Scope]:
        """Return the middleware of attempts: one that sets the carried values, where any are carried."""
        scope = Scope("sqlq.carry", self._carrying, self._carrying, is_async=False)
        return [scope] if self._carry else []

    @contextmanager
    def _carrying(self, job: Any) -> Iterator[None]:
        """Set the context variables as they were where the job was enqueued. Each attempt has a context of
        its own, so that nobody else sees them."""
        text = job._attempt.claimed.headers  # noqa: SLF001 - no import of the worker's room
        for name, value in headers.carried(text).items():
            if name in self._carry:
                self._carry[name].set(value)
        yield
