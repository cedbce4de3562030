"""What an App adds to its jobs when they are enqueued: headers, and the context variables that it carries.

Of a header that several say, the job's own counts (`.set(headers=…)`), then what the functions registered by
`App.stamp` say, the last of them first, then the task's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any, TypeAlias

from sqlq import headers
from sqlq.around import Scope, is_plain, name_of, takes
from sqlq.errors import ConfigurationError
from sqlq.job import NewJob

Stamp: TypeAlias = Callable[[NewJob], Mapping[str, Any] | None]


class Stamps:
    """What stamps the jobs of one App."""

    def __init__(self, carry: Sequence[ContextVar[Any]] = ()) -> None:
        """Raises `ConfigurationError` for what cannot be carried."""
        self._functions: list[Stamp] = []
        self._carry = {var.name: var for var in _checked_carry(carry)}

    def __bool__(self) -> bool:
        return bool(self._functions or self._carry)

    def add(self, function: Any) -> None:
        """Have a function stamp each job. Raises `ConfigurationError` for what cannot."""
        _check_stamps(function)
        if function in self._functions:
            raise ConfigurationError(f"stamp is {name_of(function)} a second time: register it once")
        self._functions.append(function)

    def of_replays(self) -> dict[str, str]:
        """Return what stamps say of the caller of a replay, those that do (`of_replays`): which goes into the
        copies' own place among the headers, since all others stay as they were."""
        said: dict[str, str] = {}
        for function in self._functions:
            if (of_replays := getattr(function, "of_replays", None)) is not None:
                said |= of_replays()
        return said

    def carried(self) -> dict[str, Any]:
        """Return the values of the context variables that are carried and set here. Raises `EnqueueError` for
        one that is not JSON."""
        if not self._carry:
            return {}
        context = copy_context()
        values = {name: context[var] for name, var in self._carry.items() if var in context}
        for name, value in values.items():
            headers.check(value, f"the context variable {name!r}, which the App carries,")
        return values

    def stamped(self, job: NewJob, first: Mapping[str, Any], carried: Mapping[str, Any]) -> NewJob:
        """Return a job with all its headers, `first` being its task's. Raises `EnqueueError` for what cannot
        be one."""
        found = dict(first)
        for function in self._functions:
            said = function(job)
            if said is not None:
                found |= headers.checked(said, f"what the stamp {name_of(function)} returned")
        found |= job.headers  # guard: what-a-job-says-wins
        if carried:
            found[headers.CARRY] = carried
        text = headers.encode(found, f"the headers of this job of {job.task}")
        return job if text == job.headers_text else replace(job, headers_text=text)

    def scope(self) -> Scope | None:
        """Return what surrounds the attempts of jobs with carried values; None where none are carried."""
        if not self._carry:
            return None
        return Scope("sqlq.carry", self._carrying, self._carrying, is_async=False)

    @contextmanager
    def _carrying(self, running: Any) -> Iterator[None]:
        """Set the context variables as they were where the job was enqueued."""
        tokens = [
            (self._carry[name], self._carry[name].set(value))
            for name, value in running.carried.items()
            if name in self._carry
        ]
        try:
            yield
        finally:
            for var, token in reversed(tokens):
                var.reset(token)  # guard: carried-values-are-the-jobs


def _checked_carry(carry: Any) -> Sequence[ContextVar[Any]]:
    if isinstance(carry, str) or not isinstance(carry, Sequence):
        raise ConfigurationError(
            f"carry is {carry!r}: it is a list of context variables, as in carry=[tenant]"
        )
    names = set()
    for var in carry:
        if not isinstance(var, ContextVar):
            raise ConfigurationError(
                f"carry holds {var!r}: it lists context variables, made by contextvars.ContextVar"
            )
        if var.name in names:
            raise ConfigurationError(
                f"carry holds two context variables named {var.name!r}: name one of them otherwise"
            )
        names.add(var.name)
    return carry


def _check_stamps(function: Any) -> None:
    name = name_of(function)
    if not callable(function):
        raise ConfigurationError(
            f"stamp is {name}, which is no function: it takes a job, and returns headers"
        )
    if not is_plain(function):
        raise ConfigurationError(
            f"stamp is {name}, which cannot be called here and now: make it a def that returns headers"
        )
    if not takes(function, object()):
        raise ConfigurationError(f"stamp is {name}: it takes one argument, the job")
