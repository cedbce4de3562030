"""What a `Job` knows of the transaction in which it was enqueued, beside what it shows.

On SQLite a transaction that is rolled back gives its ids back: the next job, a stranger's, has one of them.
So the handle has to know that its own is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sqlq.errors import JobNotFoundError


@dataclass(eq=False, slots=True)
class Origin:
    """The transaction of a caller, or the part of one that a savepoint undoes, in which jobs were
    enqueued."""

    ids: Collection[int]
    created: Mapping[int, int] = field(default_factory=dict)
    """When each was created, as SQLite has it, where nobody tells how the transaction ends."""
    is_undone: bool = False

    def committed(self) -> None:
        pass

    def undone(self) -> None:
        self.is_undone = True


class Handle:
    """What `enqueue` answers for a job."""

    __slots__ = ("_origin",)
    id: int

    @property
    def origin(self) -> Origin | None:
        """Where it was enqueued, if in a caller's transaction on SQLite; known to this very object alone."""
        return getattr(self, "_origin", None)

    def enqueued_in(self, origin: Origin) -> None:
        object.__setattr__(self, "_origin", origin)

    def require_own(self, created: int | None = None) -> None:
        """Raise `JobNotFoundError` where the row of its id is another job's: of one that was `created` at
        another moment, or of whatever came after a rollback."""
        origin = self.origin
        if origin is None or not (
            origin.is_undone  # guard: a-handle-knows-of-its-rollback
            or (created is not None and origin.created.get(self.id, created) != created)
        ):
            return
        raise JobNotFoundError(
            f"job {self.id} is not there: the transaction that enqueued it was rolled back, and its id may "
            "be another job's by now"
        )


AnyJob: TypeAlias = Handle | int
AnyJobs: TypeAlias = Sequence[AnyJob]
