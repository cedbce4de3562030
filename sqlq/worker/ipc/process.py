"""A subprocess of a worker, as its parent sees it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias
from weakref import WeakSet

from sqlq.worker.ipc.forkserver import Forked
from sqlq.worker.ipc.pipe import Message, Pipe

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
        self.link.close()  # guard: link-of-a-dead-child-is-closed
