"""A worker process as its supervisor sees it."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from sqlq.database.batch import Right
from sqlq.store.workers.workers import Request
from sqlq.worker.ipc.pipe import Message, spawn
from sqlq.worker.ipc.process import Process
from sqlq.worker.ipc.shared_memory import SharedMemory
from sqlq.worker.supervise.places import Stage

TICK_SECONDS = 0.2
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
    request: Request | None = None
    """The last request of an operator that was sent to it."""
    all_paused: bool | None = None
    """Whether all queues are paused, by the last message to it."""
    sign = silent = 0.0
    """The last sign of life, and for how long the supervisor has seen no other, while it ran itself."""
    is_silent = False
    stuck: tuple[str, set[Right]] | None = None
    """Why it was killed, and the jobs it ran past their timeouts."""
    _gone_since: float | None = None

    def __init__(
        self,
        command: Sequence[str],
        hear: Callable[[Child, Message | None], None],
        setup: Message | None = None,
    ) -> None:
        """`command` starts it, with the descriptor of its pipe behind."""
        self.box, box_fd = SharedMemory.create()
        try:
            super().__init__(
                lambda fd: spawn([*command, str(fd)], (fd, box_fd)), {**(setup or {}), "box": box_fd}
            )
        finally:
            os.close(box_fd)
        self.counts: Counter[str] = Counter()
        try:
            self.link.listen("sqlq-receive", partial(hear, self), f"worker process {self.process.pid}")
        except BaseException:  # guard: child-without-a-reader-is-killed
            self.process.kill()
            self.process.wait()
            self.link.close()
            raise

    def send(self) -> None:
        """Have it claim now."""
        self.sent_at = monotonic()
        self.link.offer(droppable=True, look=True)  # may be lost; guard: a-stopped-child-is-called-once

    def has_gone(self) -> bool:
        """Whether its loop has claimed since it was sent."""
        return self.box.last_turn() >= self.sent_at

    def rests(self) -> bool:
        """Whether its loop claims nothing until it is sent, by a pulse since it was sent the last time."""
        return self.box.last_pulse() > max(self.box.last_turn(), self.sent_at)

    def has_left(self) -> bool:
        """Whether it has closed its pipe, or has ended and had time to be read. A process that a handler
        forked may keep the pipe open."""
        if self._gone_since is None and self.has_ended():
            self._gone_since = monotonic()
        return self._gone_since is not None and monotonic() > self._gone_since + TICK_SECONDS

    def end(self) -> int | None:
        """Return the status of a process that has left; None while it may still end by itself."""
        moment = monotonic()
        self._gone_since = self._gone_since or moment
        try:
            return self.process.wait(TICK_SECONDS)
        except subprocess.TimeoutExpired:
            if moment > self._gone_since + LAST_SECONDS:
                self.process.kill()
            return None
