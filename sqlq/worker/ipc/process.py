"""A subprocess of a worker, as its parent sees it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TypeAlias
from weakref import WeakSet

from sqlq.database.batch import Right
from sqlq.store.workers.workers import Request
from sqlq.worker.ipc.forkserver import Forked
from sqlq.worker.ipc.pipe import Message, Pipe, spawn
from sqlq.worker.ipc.shared_memory import SharedMemory
from sqlq.worker.log import log

TICK_SECONDS = 0.2
LAST_SECONDS = 10.0
"""How long beyond the grace time children have to end by themselves."""


Spawn: TypeAlias = "Callable[[int], subprocess.Popen[bytes] | Forked]"
"""Starts a process, which inherits the descriptor of its end of a pipe."""


_SPAWNING = threading.Lock()
_OWN: WeakSet[Process] = WeakSet()


def bury_orphans() -> None:
    """As process 1 of a container, bury the orphans that handlers, or a dead fork server, have left. It
    leaves the status of a child of its own to its owner."""
    with _SPAWNING:  # else it might see a process that has no owner yet
        own = {known.process.pid for known in _OWN if not isinstance(known.process, Forked)}
        # there may be no child now: the last one has died, and its replacement is not there yet
        with suppress(ChildProcessError):  # guard: process-1-has-no-child
            while (
                found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None and found.si_pid not in own:
                os.waitpid(found.si_pid, 0)


class Process:
    """A subprocess and the pipe to it."""

    def __init__(self, start: Spawn, setup: Message | None = None) -> None:
        """`setup` is the first message to it."""
        self.link, there = Pipe.pair()
        if setup is not None:
            self.link.offer(**setup)
        try:
            with there, _SPAWNING:
                self.process = start(there.fileno())
                _OWN.add(self)
        except BaseException:  # the process may have too many open files
            self.link.close()
            raise

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Close the pipe. Shared memory stays: threads with an older list of children may still read it."""
        self.link.close()  # guard: boxes-outlive-their-children


class Child(Process):
    """A worker process as its supervisor sees it."""

    worker: str | None = None
    """Its id in the database, once it is ready."""
    leaving = False
    replaced = True
    ended = False
    """Whether it has sent its last message, the outcomes of its attempts."""
    running = 0
    """Both by its last message."""
    idle_ms = 0.0
    """For how long it had no work, by its last message."""
    slots = 0
    """How many jobs it runs at a time."""
    sent_at = 0.0
    """When it was sent to claim the last time, by the monotonic clock."""
    closed_since: float | None = None
    dead_since: float | None = None
    sign = 0.0
    """The last sign of life, and `sign_at` when it was first seen, by the clock of the watchdog."""
    sign_at: float | None = None
    is_silent = False
    request: Request | None = None
    """The last request of an operator that was sent to it."""
    stuck: tuple[str, set[Right]] | None = None
    """Why it was killed, and the jobs it ran past their timeouts."""
    all_paused: bool | None = None
    """Whether all queues are paused, by the last message to it."""

    def __init__(
        self,
        command: Sequence[str],
        heard: Callable[[Child, Message | None], None],
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
        self.tally: Counter[str] = Counter()
        self._heard = heard
        try:
            threading.Thread(target=self._hear, name="sqlq-receive", daemon=True).start()
        except BaseException:  # guard: nobody-works-unheard
            self.process.kill()
            self.process.wait()
            self.link.close()
            raise

    def _hear(self) -> None:
        while (message := self.link.receive()) is not None:
            try:
                self._heard(self, message)
            except Exception:
                # guard: a-supervisor-goes-on-hearing
                log.exception("what worker process %d says could not be followed", self.process.pid)
        self._heard(self, None)

    def send(self) -> None:
        """Have it claim now."""
        self.sent_at = monotonic()
        self.box.called()
        self.link.offer(droppable=True, look=True)  # may be lost; guard: a-stopped-child-is-called-once

    def end(self) -> int | None:
        """Return the status of a process that has closed its pipe; None while it may still end by itself."""
        moment = monotonic()
        self.closed_since = self.closed_since or moment
        try:
            return self.process.wait(TICK_SECONDS)
        except subprocess.TimeoutExpired:
            if moment > self.closed_since + LAST_SECONDS:
                self.process.kill()
            return None
