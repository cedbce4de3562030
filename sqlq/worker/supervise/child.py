"""A worker process as its supervisor sees it, and how many of them there are.

STARTING ──ready──► WORKING ──leaving──► LEAVING   (another takes its place at once)
                                    └──► RETIRING  (its place is closed when it has ended in good order)

WORKING ──restart──► OUTDATED ──another is ready──► LEAVING
                        └──another cannot start──► WORKING
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from time import monotonic

from sqlq.database.batch import Right
from sqlq.worker.ipc.parent import SharedMemory
from sqlq.worker.ipc.pipe import Message, Process, spawn

FAILED_STARTS = 5
"""The supervisor gives up after this number of children in a row that died before they were ready."""
MAX_PAUSE_SECONDS = 60.0


class Stage(Enum):
    """How far a worker process has come."""

    STARTING = auto()
    WORKING = auto()
    OUTDATED = auto()
    """It works on until another process works in its place."""
    LEAVING = auto()
    """It ends after its running jobs, and another process has its place."""
    RETIRING = auto()
    """It ends after its running jobs, and keeps its place until then."""


@dataclass
class RestartPolicy:
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

    def to_start(self, stages: Sequence[Stage]) -> int:
        """Return how many processes to start now: the missing ones, or the next that replaces an outdated
        one."""
        replaces = Stage.OUTDATED in stages and Stage.STARTING not in stages
        return max(self.missing(stages), int(replaces))

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

    def failed(self, status: int, now: float, *, others: bool = False) -> float:
        """Note that a process has ended before it was ready. Return how many seconds later the next starts,
        unless it is hopeless. It never is while there are `others` that have begun to work."""
        self.failed_starts += 1
        if others:  # guard: failed-starts-end-no-other-process
            pass
        elif not self._any_ready and status in (1, 2):  # it has logged why, as the next one would
            self.is_hopeless, self.code = True, status
        elif self.failed_starts >= FAILED_STARTS:
            self.is_hopeless, self.code = True, 1
        wait: float = min(MAX_PAUSE_SECONDS, 0.25 * 2**self.failed_starts)
        self.start_at = now + wait
        return wait


TICK_SECONDS = 0.2
LATE_SECONDS = 0.01
LAST_SECONDS = 10.0
"""How long beyond the grace time children have to end by themselves."""


class Child(Process):
    """A worker process, with its last messages and signs of life."""

    stage = Stage.STARTING
    worker: str | None = None
    """Its id in the database, once it is ready."""
    has_reported = False
    """Whether it has sent its last message, the outcomes of its attempts."""
    running = 0
    """Both by its last message."""
    idle_ms = 0.0
    """For how long it had no work, by its last message."""
    slots = 0
    """How many jobs it runs at a time."""
    sent_at = 0.0
    """When it was sent to claim the last time, by the monotonic clock."""
    requests: Message | None = None
    """The last message with requests of operators to it."""
    sign = silent = 0.0
    """The last sign of life, and for how long the supervisor has seen no other, while it ran itself."""
    is_silent = False
    stuck: tuple[str, set[Right]] | None = None
    """Why it was killed, and the jobs it ran past their timeouts."""
    start_error: str | None = None
    """Why it could not begin to work, as it has reported."""
    _gone_since: float | None = None

    def __init__(
        self,
        command: Sequence[str],
        receive: Callable[[Child, Message | None], None],
        setup: Message,
    ) -> None:
        """`command` starts it, with the descriptor of its pipe behind."""
        self.box, box_fd = SharedMemory.create()
        try:
            super().__init__(lambda fd: spawn([*command, str(fd)], (fd, box_fd)), {**setup, "box": box_fd})
        finally:
            os.close(box_fd)
        self.counts: Counter[str] = Counter()
        try:
            self.link.listen("sqlq-receive", partial(receive, self), f"worker process {self.process.pid}")
        except BaseException:  # guard: child-without-a-reader-is-killed
            self.process.kill()
            self.process.wait()
            self.link.close()
            raise

    def send(self) -> None:
        """Have it claim now."""
        self.sent_at = monotonic()
        self.link.offer(droppable=True, look=True)  # may be lost; guard: stopped-child-is-called-once

    def is_late(self) -> bool:
        """Whether its loop has not turned soon after it was sent."""
        return self.box.last_pulse() < self.sent_at < monotonic() - LATE_SECONDS

    def has_left(self) -> bool:
        """Whether it has closed its pipe, or has ended and had time to be read. A process that a handler
        forked may keep the pipe open."""
        if self._gone_since is None and self.process.poll() is not None:
            self._gone_since = monotonic()
        return self._gone_since is not None and monotonic() > self._gone_since + TICK_SECONDS

    def end(self) -> int | None:
        """Return the status of a process that has left; None while it may still end by itself."""
        now = monotonic()
        self._gone_since = self._gone_since or now
        try:
            return self.process.wait(TICK_SECONDS)
        except subprocess.TimeoutExpired:
            if now > self._gone_since + LAST_SECONDS:
                self.process.kill()
            return None
