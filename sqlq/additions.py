"""What an App adds to jobs before they are written: what their limit, their queue and its stamps say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlq.enqueue import check_new
from sqlq.flow import AnyFlow, Flow, Plan, without_expiry
from sqlq.job import NewJob
from sqlq.limit import DeclaredLimits
from sqlq.stamp import Stamps
from sqlq.task import Registry, Task


class Additions:
    """What one App adds to jobs, by what was declared to it up to now."""

    def __init__(self, tasks: Registry, limits: DeclaredLimits, stamps: Stamps) -> None:
        self._tasks = tasks
        self._limits = limits
        self._stamps = stamps

    def to(self, new: list[NewJob[Any]]) -> list[NewJob[Any]]:
        """Return jobs with what is added to them."""
        if self._limits:
            new = [self._limited(job) for job in new]
        if not (self._stamps or self._tasks.adds_to_jobs):
            return new
        check_new(new)
        carried = self._stamps.carried()
        done = []
        for job in new:
            task = self._tasks.get(job.task)
            if task is not None and job.queue != task.queue and task.elsewhere:
                task = task.for_queue(job.queue)
                job = replace(job, **_as_in_queue(job, task))
            done.append(self._stamps.stamped(job, {} if task is None else task.headers, carried))
        return done

    def _limited(self, job: NewJob[Any]) -> NewJob[Any]:
        """Return a job with what its limit says, where it names one."""
        key: str | None = getattr(job, "limit_key", None)
        if key is None:
            return job
        rule = self._limits.rule_of(key, job.rule)
        return job if rule is job.rule else replace(job, rule=rule)

    def to_flow(self, job: AnyFlow) -> Plan:
        """Return a flow as it is written, with what is added to its jobs."""
        plan = Flow.of(job).plan()
        return plan._replace(jobs=[without_expiry(job) for job in self.to(plan.jobs)])

    def template(self, job: NewJob[Any]) -> NewJob[Any]:
        """Return the job of a schedule with what its task and queue say of jobs. No stamps: what they say
        belongs to the moment of an enqueue, and would make another schedule of it at each deploy."""
        job = self._limited(job)  # guard: a-schedule-knows-its-limit
        task = self._tasks.get(job.task)
        if task is None:
            return job
        if job.queue != task.queue and task.elsewhere:
            task = task.for_queue(job.queue)
            job = replace(job, **_as_in_queue(job, task))
        return Stamps().stamped(job, task.headers, {}) if task.headers else job


def _as_in_queue(job: NewJob[Any], task: Task[..., Any]) -> dict[str, Any]:
    """Return what a task says of its jobs in a queue other than its own, but for what the job says itself."""
    found = {
        "max_attempts": task.max_attempts,
        "priority": task.priority,
        "timeout_ms": task.timeout_ms,
        "retention_ms": task.retention_ms,
        "expires_ms": task.expires_ms,
    }
    return {name: value for name, value in found.items() if name not in job.given}
