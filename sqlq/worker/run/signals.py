"""The ways in which the parts of a worker reach its loop, and each other across rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlq.database.batch import Right
from sqlq.errors import SqlqError
from sqlq.worker.decide import Retire


@dataclass(frozen=True, slots=True)
class Signals:
    """The calls by which parts of a worker report. Any thread may make them, and none waits."""

    work_freed: Callable[[], None]
    """Jobs have become available."""
    due_at: Callable[[float], None]
    """A job can be claimed at this time, by the monotonic clock."""
    settled: Callable[[], None]
    """A batch of outcomes has been written."""
    followed: Callable[[], None]
    """Nothing is left to unblock, or to admit."""
    cancel: Callable[[Iterable[Right]], None]
    """An operator cancels these jobs."""
    state_changed: Callable[[], None]
    """The state in the worker's row is to be written, or its requests to be read."""
    pause_ends: Callable[[float | None], None]
    """The next pause of a queue ends in a number of milliseconds."""
    retire: Callable[[Retire], None]
    """The worker claims no more."""
    fail: Callable[[SqlqError], None]
    """The worker cannot go on, and stops in good order."""
