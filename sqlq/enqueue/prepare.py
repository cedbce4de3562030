"""Adds to an App's jobs when they are enqueued: headers, and the context variables that the App carries.

Where several set a header, the job's own counts (`.set(headers=…)`). Next come the functions registered by
`App.stamp`, the last of them first, then the task's headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any

from sqlq.enqueue.enqueue import check_new
from sqlq.errors import ConfigurationError, EnqueueError
from sqlq.model.checks import JOB_OPTIONS, job_fields, refusing_by
from sqlq.model.flow import AnyFlow, Flow, Plan, without_expiry
from sqlq.model.job import NewJob
from sqlq.model.limit import DeclaredLimits
from sqlq.model.middleware import Scope, check_plain, name_of
from sqlq.model.task import Registry
from sqlq.payload import headers

Stamp = Callable[[NewJob], Mapping[str, Any] | None]


class Stamps:
    """The enqueue middleware of one App."""

    def __init__(self, carry: Sequence[ContextVar[Any]] = ()) -> None:
        """Raises `ConfigurationError` for anything but context variables with distinct names."""
        self._functions: list[Stamp] = []
        self._carry = {var.name: var for var in _checked_carry(carry)}

    def __bool__(self) -> bool:
        return bool(self._functions or self._carry)

    def add(self, function: Any) -> None:
        """Register a function that returns headers for each job. Raises `ConfigurationError` for one that
        cannot."""
        check_plain(function, "stamp", "def origin(job), which returns headers", object())
        if function in self._functions:
            raise ConfigurationError(f"stamp is {name_of(function)} a second time: register it once")
        self._functions.append(function)

    def carried(self) -> dict[str, Any]:
        """Return the values of the context variables that are carried and set here. Raises `EnqueueError` for
        one that is not JSON."""
        if not self._carry:
            return {}
        context = copy_context()
        values = {name: context[var] for name, var in self._carry.items() if var in context}
        with refusing_by(EnqueueError):
            for name, value in values.items():
                headers.check(value, f"the context variable {name!r}, which the App carries,")
        return values

    def stamped(self, job: NewJob, first: Mapping[str, Any], carried: Mapping[str, Any]) -> NewJob:
        """Return a job with all its headers, `first` being its task's. Raises `EnqueueError` for one that is
        no valid header."""
        found = dict(first)
        for function in self._functions:
            said = function(job)
            if said is not None:
                with refusing_by(EnqueueError):
                    found |= headers.checked(said, f"what the stamp {name_of(function)} returned")
        found |= job.headers  # guard: what-a-job-says-wins
        if carried:
            found[headers.CARRY] = carried
        with refusing_by(EnqueueError):
            text = headers.encode(found, f"the headers of this job of {job.task}")
        return job if text == job.headers_text else replace(job, headers_text=text)

    def scope(self) -> Scope | None:
        """Return the middleware of jobs with carried values; None where none are carried."""
        if not self._carry:
            return None
        return Scope("sqlq.carry", self._carrying, self._carrying, is_async=False)

    @contextmanager
    def _carrying(self, job: Any) -> Iterator[None]:
        """Set the context variables as they were where the job was enqueued. Each attempt has a context of
        its own, so that nobody else sees them."""
        carried = headers.carried(job._attempt.claimed.headers)  # noqa: SLF001 - sqlq's own middleware
        for name, value in carried.items():
            if name in self._carry:
                self._carry[name].set(value)
        yield


def _checked_carry(carry: Any) -> Sequence[ContextVar[Any]]:
    is_list = isinstance(carry, Sequence) and all(isinstance(var, ContextVar) for var in carry)
    if not is_list or len({var.name for var in carry}) < len(carry):
        raise ConfigurationError(
            f"carry is {carry!r}: it is a list of context variables with different names, made by "
            "contextvars.ContextVar, as in carry=[tenant]"
        )
    return carry  # type: ignore[no-any-return]  # checked above


class Additions:
    """Adds to jobs the declarations of one App up to now: headers, limits, and options of their queues."""

    def __init__(
        self,
        tasks: Registry,
        limits: DeclaredLimits,
        stamps: Stamps,
        defaults: Callable[[Mapping[str, Any], str | None], Mapping[str, Any]],
    ) -> None:
        """`defaults` returns the App's options of jobs in a queue, by default those of its own queue."""
        self._tasks = tasks
        self._limits = limits
        self._stamps = stamps
        self._defaults = defaults

    def to(self, new: list[NewJob]) -> list[NewJob]:
        """Return jobs with the App's additions."""
        if self._limits:
            new = [self._limited(job) for job in new]
        adds = self._stamps or self._tasks.adds_to_jobs
        if not (adds or any(getattr(job, "by_name_alone", False) for job in new)):
            return new
        check_new(new)
        carried = self._stamps.carried()
        done = []
        for job in new:
            job, first = self._as_in_its_queue(job)
            done.append(self._stamps.stamped(job, first, carried))
        return done

    def _as_in_its_queue(self, job: NewJob) -> tuple[NewJob, Mapping[str, Any]]:
        """Return a job with the options that its task has for its queue, and the task's headers."""
        task = self._tasks.get(job.task)
        if task is None:
            return self._by_name_alone(job) if job.by_name_alone else (job, {})
        if job.queue != task.queue and task.elsewhere:
            task = task.for_queue(job.queue)
            fields = {option.field for option in JOB_OPTIONS.values()} - {"queue"} - job.given
            job = replace(job, **{name: getattr(task, name) for name in fields})
        return job, task.headers

    def _by_name_alone(self, job: NewJob) -> tuple[NewJob, Mapping[str, Any]]:
        """Return a job whose task is not known here with the App's options for its queue, and their headers.
        The worker's task has the attempts and the timeout."""
        options = self._defaults({}, job.queue if "queue" in job.given else None)
        its_own = job.given | {"max_attempts", "timeout_ms"}
        fields = job_fields(options)
        job = replace(job, **{name: value for name, value in fields.items() if name not in its_own})
        return job, options.get("headers") or {}

    def _limited(self, job: NewJob) -> NewJob:
        """Return a job with the rule of its limit, where it names one."""
        key: str | None = getattr(job, "limit_key", None)
        if key is None:
            return job
        rule = self._limits.rule_of(key, job.rule)
        return job if rule is job.rule else replace(job, rule=rule)

    def to_flow(self, job: AnyFlow) -> Plan:
        """Return a flow as it is written, with the App's additions to its jobs."""
        plan = Flow.of(job).plan()
        return plan._replace(jobs=[without_expiry(job) for job in self.to(plan.jobs)])

    def template(self, job: NewJob) -> NewJob:
        """Return the job of a schedule with the options that its task and queue have for jobs. Enqueue
        middleware is not applied: its headers depend on the enqueue, and would make another schedule of it at
        each deploy."""
        job = self._limited(job)  # guard: a-schedule-knows-its-limit
        job, first = self._as_in_its_queue(job)
        return Stamps().stamped(job, first, {}) if first else job
