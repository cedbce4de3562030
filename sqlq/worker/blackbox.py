"""What a worker process had started when it died, and when it was last seen to turn: memory it shares with
its supervisor.

A process that is killed has no last words, and a message per job would cost more than many jobs do. So it
keeps in shared memory which rights it has started and not yet settled; the memory outlives it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable

from sqlq.store.dialect import Right

CELLS = 8_192
"""More than a worker may hold: its slots, what is ready to start, and what waits to be settled."""
_HEADER = struct.Struct("<dq")
_CELL = struct.Struct("<qq")
_WORD = struct.Struct("<q")


class BlackBox:
    """Shared memory: the moment of the last pulse, whether it overflowed, and a cell for each right
    started."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _HEADER.size + CELLS * _CELL.size)
        self._free = list(range(CELLS))
        self._taken: dict[Right, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> tuple[BlackBox, int]:
        """Return a new box, and the descriptor by which a child finds it; to be closed when the child has
        started."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_HEADER.size + CELLS * _CELL.size)
            fd = os.dup(file.fileno())
        return cls(fd), fd

    # -- in the worker ---------------------------------------------------------------------------------------

    def started(self, right: Right) -> None:
        """Note that a handler is about to run."""
        with self._lock:
            if not self._free:
                _WORD.pack_into(self._memory, 8, 1)  # guard: box-overflow
                return
            cell = self._taken[right] = self._free.pop()
        # the handler starts after this: a kill in the middle leaves a right that no worker has, of a job that
        # has not started
        _CELL.pack_into(self._memory, _HEADER.size + cell * _CELL.size, *right)

    def ended(self, rights: Iterable[Right]) -> None:
        """Note that rights are settled or lost; rights that never started are ignored."""
        with self._lock:
            for right in rights:
                cell = self._taken.pop(right, None)
                if cell is not None:
                    _WORD.pack_into(self._memory, _HEADER.size + cell * _CELL.size, 0)
                    self._free.append(cell)

    def pulse(self) -> None:
        """Note that the worker's loop turns."""
        struct.pack_into("<d", self._memory, 0, time.monotonic())

    # -- in the supervisor -----------------------------------------------------------------------------------

    def last_pulse(self) -> float:
        """Return the moment of the last pulse, by the monotonic clock that all processes of a machine share;
        0.0 for none."""
        return float(_HEADER.unpack_from(self._memory, 0)[0])

    def read(self) -> set[Right] | None:
        """Return the rights started and not settled; None when there were too many to tell."""
        if _HEADER.unpack_from(self._memory, 0)[1]:
            return None
        cells = _CELL.iter_unpack(self._memory[_HEADER.size :])
        return {(id, token) for id, token in cells if id}

    def close(self) -> None:
        self._memory.close()
