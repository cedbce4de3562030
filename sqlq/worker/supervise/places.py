"""Decides how many worker processes a supervisor starts, and what follows when one of them has ended.

    STARTING ──ready──► WORKING ──leaving──► LEAVING   (another takes its place at once)
                                        └──► RETIRING  (its place is closed when it has ended in good order)

It does nothing itself: it takes times and states, and returns decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

FAILED_STARTS = 5
"""The supervisor gives up after this number of children in a row that died before they were ready."""
LONGEST_PAUSE_SECONDS = 10.0


class Stage(Enum):
    """How far a worker process has come."""

    STARTING = auto()
    WORKING = auto()
    LEAVING = auto()
    """It ends after its running jobs, and another process has its place."""
    RETIRING = auto()
    """It ends after its running jobs, and keeps its place until then."""


@dataclass
class Places:
    """The places of worker processes: each is taken, to be filled, or closed."""

    number: int
    closed: int = 0
    """How many will not be filled again: their processes have ended in good order."""
    code: int = 0
    """The exit code of the supervisor, if it ended now."""
    failed_starts: int = 0
    """How many processes in a row have ended before they were ready."""
    start_at: float = 0.0
    """No process starts before this time of the monotonic clock."""
    is_hopeless: bool = False
    """Whether no other process is to be started, because none would become ready."""
    _any_ready: bool = False

    def missing(self, stages: Iterable[Stage]) -> int:
        """Return how many processes are missing beside those in these stages."""
        return self.number - self.closed - sum(stage is not Stage.LEAVING for stage in stages)

    def ready(self) -> None:
        """Note that a process is at work."""
        self._any_ready, self.failed_starts = True, 0

    def ended(self, stage: Stage, status: int, *, has_reported: bool) -> bool:
        """Note that a process that was at work has ended. Return whether it did so in good order, after its
        last message."""
        if not (has_reported and status in (0, 1)):  # with 1 it has logged why, as another one would
            return False
        self.closed += stage is not Stage.LEAVING
        self.code = max(self.code, status)
        return True

    def failed(self, status: int, now: float) -> float:
        """Note that a process has ended before it was ready. Return how many seconds later the next starts,
        unless it is hopeless."""
        self.failed_starts += 1
        if not self._any_ready and status in (1, 2):  # it has logged why, as the next one would
            self.is_hopeless, self.code = True, status
        elif self.failed_starts >= FAILED_STARTS:
            self.is_hopeless, self.code = True, 1
        wait: float = min(LONGEST_PAUSE_SECONDS, 0.25 * 2**self.failed_starts)
        self.start_at = now + wait
        return wait
