"""The work of the jobs, the same in every subject: they do nothing, or sleep; and they are counted.

Every handler of every subject is one line that calls `done` or `nap`. A call is counted in a file that is
mapped into memory, one file for each process and one cell for each thread. So the count is exact without a
lock. It needs no system call, which would make threads hand the interpreter to each other. The module imports
nothing but the standard library, since it runs in peers' environments.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

CALLS = "SQLQ_BENCHMARK_CALLS"
"""The environment variable with the folder of the counts."""
CELLS = 4096
FIRST_CALL, THREADS = 0, 1
"""The first cell has the time of the first call, by the machine's monotonic clock in ns; the others count."""


class _Process:
    """The cells of this process; the file is made at the first call."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        self._lock = threading.Lock()
        self._cells: memoryview | None = None
        self._threads = 0
        self.local = threading.local()
        self.starts: memoryview | None = None  # where the starts of jobs are noted

    def thread(self) -> tuple[memoryview, int]:
        with self._lock:
            if self._cells is None:
                folder = Path(os.environ[CALLS])
                self._cells = _mapped(folder / f"calls-{os.getpid()}", CELLS)
                self._cells[FIRST_CALL] = time.monotonic_ns()
                starts = folder / "starts"
                if starts.exists():
                    self.starts = _mapped(starts)
            self._threads += 1
            cell = THREADS + (self._threads - 1) % (CELLS - THREADS)
        self.local.place = (self._cells, cell)
        return self._cells, cell


def _mapped(file: Path, cells: int | None = None) -> memoryview:
    """Return a file as 64-bit integers; with `cells` it is made, full of zeros, and only then found under its
    name."""
    if cells is not None:
        unnamed = file.with_name(f"new-{file.name}")
        with unnamed.open("wb") as made:
            made.truncate(cells * 8)
        unnamed.rename(file)
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")


TICKS = 20

_process = _Process()
os.register_at_fork(after_in_child=_process.start_anew)


def done(number: int) -> None:
    """Count a call, and note when it came where somebody wants to know (see `Calls.note_starts`)."""
    process = _process
    try:
        cells, cell = process.local.place
    except AttributeError:
        cells, cell = process.thread()
    cells[cell] += 1
    starts = process.starts
    if starts is not None and 0 <= number < len(starts):
        starts[number] = time.monotonic_ns()


def ticked(moment: float) -> None:
    """Count a call for a full second, in seconds of the clock; its number is the second's, modulo TICKS."""
    done(int(moment) % TICKS)


def nap(number: int, ms: int) -> None:
    """A job that waits for something."""
    done(number)
    time.sleep(ms / 1000)


class Calls:
    """The counts of a measurement, as the one who measures sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[int, int] | None = None

    def keep(self) -> None:
        """Remember the counts: the processes have ended, and the folder is about to go."""
        self._kept = self.by_process()

    def note_starts(self, numbers: int) -> None:
        """Note the starts of the jobs 0 to `numbers` − 1; it has to be called before the first job."""
        _mapped(self.folder / "starts", numbers)

    def starts(self) -> list[int]:
        """When each job was started, in ns of the monotonic clock; 0 for one that was not."""
        return list(_mapped(self.folder / "starts"))

    def by_process(self) -> dict[int, int]:
        """How many calls each process made."""
        if self._kept is not None:
            return self._kept
        return {
            int(file.name.partition("-")[2]): sum(_mapped(file)[THREADS:])
            for file in self.folder.glob("calls-*")
        }

    def count(self) -> int:
        return sum(self.by_process().values())

    def first(self) -> float:
        """When the first call came, in seconds of the monotonic clock."""
        moments = [_mapped(file)[FIRST_CALL] for file in self.folder.glob("calls-*")]
        return min(moment for moment in moments if moment) / 1e9
