"""How a job ended: the argument of the task that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

FailureReason: TypeAlias = Literal[
    "error", "timeout", "worker_lost", "unknown_task", "bad_payload", "bad_signature"
]


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: the one argument of the task that follows it.

    `outcome` is `completed`, `failed` or `cancelled`, `attempts` the number of attempts it took. For a failed
    job `reason` is as in `failed_jobs`: error, timeout, worker_lost, unknown_task or bad_payload; nothing
    follows a bad signature. `exception` is the class and `message` the text of its last error, or the reason
    of a cancel. `label` is the one that the
    job has. The id gives more. `app.jobs.get(ended.id)` has the traceback and the errors of earlier attempts,
    `app.result(ended.id)` the result.

    >>> @app.task  # doctest: +SKIP
    ... def alarm(ended: sqlq.JobResult) -> None:
    ...     pager.send(f"{ended.task} {ended.id} failed: {ended.message}")
    """

    id: int
    task: str
    queue: str
    outcome: Literal["completed", "failed", "cancelled"]
    attempts: int
    reason: FailureReason | None = None
    exception: str | None = None
    message: str | None = None
    label: str | None = None


E_contra = TypeVar("E_contra", contravariant=True)


class TakesEnding(Protocol[E_contra]):
    """A task whose handler takes how a job ended."""

    def new(self, ended: E_contra, /) -> Any: ...


Follows: TypeAlias = TakesEnding[JobResult] | TakesEnding[dict[str, Any]]
"""A task that may follow the end of a job: its handler takes a `JobResult`, or that as a dict."""
