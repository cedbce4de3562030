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
from typing import Any

from sqlq.store.dialect import Right

CELLS = 8_192
"""More than a worker may hold: its slots, what is ready to start, and what waits to be settled."""
_HEADER = struct.Struct("<dqqqqd")
"""The last pulse, whether it overflowed, how often the loop has turned, whether it rests, how many rights are
started, and when the lookout of the supervisor looked last."""
_PULSE, _OVERFLOW, _TURNS, _RESTS, _STARTED, _LOOKED = range(6)
_OFFSETS = (0, 8, 16, 24, 32, 40)
_CELL = struct.Struct("<qq")
_WORD = struct.Struct("<q")
_MOMENT = struct.Struct("<d")
_SIZE = _HEADER.size + CELLS * _CELL.size


class BlackBox:
    """Shared memory: what a worker and its supervisor want to know of each other at any moment, and a cell
    for each right started."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE)
        self._free = list(range(CELLS))
        self._taken: dict[Right, int] = {}
        self._turns = 0
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> tuple[BlackBox, int]:
        """Return a new box, and the descriptor by which a child finds it; to be closed when the child has
        started."""
        if hasattr(os, "memfd_create"):  # not on macOS, nor in a Python built for an old C library
            # No file: a disk that is full, or in a container read-only, ends no worker.
            fd = os.memfd_create("sqlq")  # guard: boxes-need-no-disk
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd), fd

    # -- in the worker ---------------------------------------------------------------------------------------

    def started(self, right: Right) -> None:
        """Note that a handler is about to run."""
        with self._lock:
            if not self._free:
                _WORD.pack_into(self._memory, _OFFSETS[_OVERFLOW], 1)  # guard: box-overflow
                return
            cell = self._taken[right] = self._free.pop()
            _WORD.pack_into(self._memory, _OFFSETS[_STARTED], len(self._taken))
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
            _WORD.pack_into(self._memory, _OFFSETS[_STARTED], len(self._taken))

    def pulse(self, *, rests: bool = False) -> None:
        """Note that the worker's loop turns; when it `rests` it claims nothing until it is called."""
        _MOMENT.pack_into(self._memory, _OFFSETS[_PULSE], time.monotonic())
        if not rests:
            self._turns += 1
            _WORD.pack_into(self._memory, _OFFSETS[_TURNS], self._turns)
        _WORD.pack_into(self._memory, _OFFSETS[_RESTS], rests)

    def looked_at(self) -> float:
        """Return when the supervisor has looked for this worker last, by the monotonic clock that all
        processes of a machine share; 0.0 for never."""
        return float(self._header()[_LOOKED])

    # -- in the supervisor -----------------------------------------------------------------------------------

    def last_pulse(self) -> float:
        """Return the moment of the last pulse, by the monotonic clock that all processes of a machine share;
        0.0 for none."""
        return float(self._header()[_PULSE])

    def turns(self) -> int:
        """Return how often the worker's loop has begun to claim."""
        return int(self._header()[_TURNS])

    def rests(self) -> bool:
        """Return whether the worker claims nothing until it is called."""
        return bool(self._header()[_RESTS])

    def started_now(self) -> int:
        """Return how many rights are started and not settled."""
        return int(self._header()[_STARTED])

    def called(self) -> None:
        """Note that the worker was called: it rests no more."""
        _WORD.pack_into(self._memory, _OFFSETS[_RESTS], 0)

    def looked(self, moment: float) -> None:
        """Note that a look was made for this worker."""
        _MOMENT.pack_into(self._memory, _OFFSETS[_LOOKED], moment)

    def read(self) -> set[Right] | None:
        """Return the rights started and not settled; None when there were too many to tell."""
        if self._header()[_OVERFLOW]:
            return None
        cells = _CELL.iter_unpack(self._memory[_HEADER.size :])
        return {(id, token) for id, token in cells if id}

    def close(self) -> None:
        self._memory.close()

    def _header(self) -> tuple[Any, ...]:
        return _HEADER.unpack_from(self._memory, 0)
