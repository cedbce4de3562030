"""Memory that a worker process shares with its supervisor: the jobs it has started, and its last signs of
life.

A process that is killed sends no last message, and a message per job would cost more than many jobs do. So it
keeps the rights that it has started and not yet settled in shared memory, which outlives it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterable
from time import monotonic

from sqlq.database.batch import Right

CELLS = 8_192
"""More than a worker may hold: jobs in its slots, ready jobs, and jobs that wait to be settled."""
_PULSE, _OVERFLOW, _STARTED, _POLLED, _BEAT = range(5)
"""The last pulse, whether it overflowed, how many rights are started, the last look of the supervisor's
poller, and the last beat."""
_FACTS_BYTES = 5 * 8
_CELL = struct.Struct("<qqd")
"""A right, and the deadline of its attempt by the monotonic clock."""
_SIZE = _FACTS_BYTES + CELLS * _CELL.size
READS = math.nan
"""The deadline of an attempt whose handler has not begun: its arguments are read, or its process starts."""

Started = tuple[Right, float]
"""A right that was started and is not settled, and the deadline of its attempt. This is infinite without a
timeout, and `READS` before the handler has begun."""


class SharedMemory:
    """Memory with the current state of a worker and its supervisor, and a cell for each right started."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE)
        self._facts = memoryview(self._memory)[:_FACTS_BYTES].cast("d")
        """Each is written as a whole, so that no process reads half of one."""
        self._free = list(range(CELLS))
        self._taken: dict[Right, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> tuple[SharedMemory, int]:
        """Return a new box, and the descriptor by which a child finds it; to be closed when the child has
        started."""
        if hasattr(os, "memfd_create"):  # not on macOS, nor with an old C library
            # No file: a full or read-only disk, as in a container, ends no worker.
            fd = os.memfd_create("sqlq")  # guard: shared-memory-needs-no-disk
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd), fd

    # -- in the worker ---------------------------------------------------------------------------------------

    def started(self, right: Right, deadline: float | None = None) -> None:
        """Note that an attempt starts, or the deadline of one noted before."""
        with self._lock:
            cell = self._taken.get(right)
            if cell is None:
                if not self._free:
                    self._facts[_OVERFLOW] = True  # guard: shared-memory-overflow-is-marked
                    return
                cell = self._taken[right] = self._free.pop()
                self._facts[_STARTED] = len(self._taken)
        # The attempt starts after this. A kill in the middle leaves a right that no worker has; its job has
        # not started.
        until = math.inf if deadline is None else deadline
        _CELL.pack_into(self._memory, _offset(cell), *right, until)

    def ended(self, rights: Iterable[Right]) -> None:
        """Note that rights are settled or lost; rights that never started are ignored."""
        with self._lock:
            for right in rights:
                cell = self._taken.pop(right, None)
                if cell is not None:
                    _CELL.pack_into(self._memory, _offset(cell), 0, 0, 0.0)
                    self._free.append(cell)
            self._facts[_STARTED] = len(self._taken)

    def pulse(self) -> None:
        """Note that the worker's loop turns."""
        self._facts[_PULSE] = monotonic()

    def beat(self) -> None:
        """Note that the process runs, whatever its loop waits for."""
        self._facts[_BEAT] = monotonic()

    def last_poll(self) -> float:
        """Return when the supervisor last looked for this worker, by the monotonic clock of the machine; 0.0
        for never."""
        return self._facts[_POLLED]

    # -- in the supervisor -----------------------------------------------------------------------------------

    def last_pulse(self) -> float:
        """Return the time of the last pulse, by the monotonic clock that all processes of a machine share;
        0.0 for none."""
        return self._facts[_PULSE]

    def last_sign(self) -> float:
        """Return the time of the last pulse or beat."""
        return max(self._facts[_PULSE], self._facts[_BEAT])

    def started_now(self) -> float:
        """Return how many rights are started and not settled."""
        return self._facts[_STARTED]

    def note_poll(self, at: float) -> None:
        """Note when a look was made for this worker."""
        self._facts[_POLLED] = at

    def read(self) -> set[Right] | None:
        """Return the rights started and not settled; None when there were too many for the cells."""
        return None if (jobs := self.running()) is None else {right for right, _ in jobs}

    def running(self) -> list[Started] | None:
        """Return the rights started and not settled, with deadlines; None when there were too many for the
        cells."""
        if self._facts[_OVERFLOW]:
            return None
        return [
            ((id, token), until) for id, token, until in _CELL.iter_unpack(self._memory[_FACTS_BYTES:]) if id
        ]

    def close(self) -> None:
        self._facts.release()
        self._memory.close()


def _offset(cell: int) -> int:
    return _FACTS_BYTES + cell * _CELL.size
