"""The part of a `Job` that knows the transaction in which it was enqueued.

On SQLite a transaction that is rolled back gives its ids back: the next job, a stranger's, has one of them.
So the handle has to know that its own is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlq.errors import ConfigurationError, JobNotFoundError


@dataclass
class Origin:
    """The transaction of a caller, or the part of one that a savepoint undoes, in which jobs were
    enqueued."""

    created: Mapping[int, int] = field(default_factory=dict)
    """The creation time of each job, as SQLite has it, where nothing reports how the transaction ends."""
    is_rolled_back: bool = False

    def undo(self) -> None:
        self.is_rolled_back = True


class Handle:
    """The answer of `enqueue` for a job. This very object knows its origin, and no copy of it."""

    __slots__ = ("_origin",)
    id: int
    task: str
    state: Any

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.task!r} {self.state}>"

    def enqueued_in(self, origin: Origin) -> None:
        object.__setattr__(self, "_origin", origin)

    def require_own(self, created: int | None = None) -> None:
        """Raise `JobNotFoundError` where the row of its id is another job's: one `created` at another time,
        or any row after a rollback."""
        origin: Origin = getattr(self, "_origin", None) or Origin()
        is_another = created is not None and origin.created.get(self.id, created) != created
        if origin.is_rolled_back or is_another:  # guard: a-handle-knows-of-its-rollback
            raise JobNotFoundError(
                f"job {self.id} is not there: the transaction that enqueued it was rolled back, and its id "
                "may be another job's by now"
            )


AnyJob = Handle | int
AnyJobs = Collection[AnyJob]


def id_of(job: Any) -> int:
    """Return the id of a job that is given by it, or as a handle. Raises `ConfigurationError` for anything
    else."""
    id = job.id if isinstance(job, Handle) else job
    if not isinstance(id, int) or isinstance(id, bool):
        raise ConfigurationError(
            f"{id!r:.99} is not the id of a job: give what app.enqueue has returned, or a whole number"
        )
    return int(id)  # of an enum's member its number: `in range(…)` counts up to such a one
