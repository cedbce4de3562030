"""The connection of a worker to its supervisor: messages both ways, and the memory they share.

A worker in a program of its own making (`app.worker()`) has no supervisor: `NoParent` does nothing.

A process that is killed sends no last message, and a message per job would cost more than many jobs do. So a
worker keeps the rights that it has started and not yet settled in shared memory, which outlives it. Its last
signs of life are there, too.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from time import monotonic
from typing import Any, NamedTuple

from sqlq.config.durations import readable
from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.worker.ipc.pipe import Message, Pipe
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Meter
from sqlq.worker.threads.log import log

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
        _CELL.pack_into(self._memory, _offset(cell), *right, math.inf if deadline is None else deadline)

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

    def running(self) -> list[tuple[Right, float]] | None:
        """Return the rights started and not settled; None when there were too many for the cells. The
        deadline of an attempt is infinite without a timeout, and `READS` before the handler has begun."""
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


ORPHANED_MS = 5_000
"""How long jobs may go on when the supervisor is gone, and no process watches."""

MORE_SECONDS = 0.1
"""The shortest time between two messages to the supervisor that there are more jobs."""


Handlers = Mapping[str, Callable[[Any], None]]
"""The functions that take the messages of a supervisor, by the names of these."""


class Facts(NamedTuple):
    """The facts by which a supervisor stands in for a worker."""

    worker: str
    url: str
    schema: str | None
    listen_url: str | None
    encryption: list[Any] | None
    options: dict[str, Any]

    @classmethod
    def of(cls, worker: str, database: Database, options: WorkerOptions) -> Facts:
        listen_url = None if database.address is None else database.address.listen_url
        return cls(
            worker,
            database.engine.url.render_as_string(hide_password=False),
            database.schema,
            None if listen_url is None else listen_url.render_as_string(hide_password=False),
            None if database.encryption is None else database.encryption.facts,
            asdict(options),
        )


class NoParent:
    """No supervisor: nothing is sent."""

    supervised = False
    is_alone = True
    """Whether no supervisor will ever look for jobs for this worker."""
    box: SharedMemory | None = None
    began_at: float | None = None
    """When the supervisor began, by the monotonic clock that all processes of a machine share."""

    def listen(self, handlers: Handlers, report: Callable[[], dict[str, Any]]) -> None:
        """Receive messages of the supervisor from now on, and send it a `report` each second."""

    def ready(self, facts: Facts) -> None:
        """Report that this worker is up."""

    def leaving(self, why: str, *, replace: bool) -> None:
        """Report that this worker claims no more and ends after its running jobs. With `replace` another
        should take its place."""

    def paused(self, paused: bool) -> bool:
        """Report that an operator has paused or resumed this worker by its row, which counts for all workers
        of its supervisor. Return whether there is one."""
        return False

    def restart(self, request_time: Any) -> bool:
        """Report that an operator restarts this worker: it works on until another process works. Return
        whether there is a supervisor, which starts that."""
        return False

    def pulse(self) -> None:
        """Show that the loop turns."""

    def beat(self) -> None:
        """Show that the process runs, whatever its loop waits for."""

    def more(self) -> None:
        """Report that there may be more jobs than this worker could take."""

    def last_poll(self) -> float:
        """Return when the supervisor has looked for this worker last, by the monotonic clock; 0.0 for
        never."""
        return 0.0

    def meter(self, tasks: Mapping[str, Any]) -> Meter | None:
        """Return the meter of this worker; None without metrics."""
        return None


class Parent(NoParent):
    """A supervisor at the other end of a pipe. When the pipe ends the supervisor is gone, and the worker
    stops."""

    supervised = True

    _meter: Meter | None = None
    _over = False
    _report_at = _more_at = 0.0

    def __init__(
        self,
        link: Pipe,
        box: SharedMemory,
        *,
        began_at: float | None = None,
        is_alone: bool = False,
        is_metered: bool = False,
    ) -> None:
        self.is_alone = is_alone
        self._is_metered = is_metered
        self._link = link
        self.box: SharedMemory = box
        self.began_at = began_at
        self._report: Callable[[], dict[str, Any]] = dict
        self.announce: Callable[[], None] = lambda: None
        """Called when the worker is ready, before it starts anything."""

    def listen(self, handlers: Handlers, report: Callable[[], dict[str, Any]]) -> None:
        self._report = report

        def receive(message: Message | None) -> None:
            if message is not None:
                for name, content in message.items():
                    handlers[name](content)
                return
            if not self._over:
                text = "the supervisor is gone: this worker stops within %s"
                log.error(text, readable(ORPHANED_MS), event="stopping")
            handlers["stop"](ORPHANED_MS)  # guard: orphans-stop

        self._link.listen("sqlq-child", receive, "the supervisor")

    def ready(self, facts: Facts) -> None:
        self.announce()
        self._link.send(ready=facts._asdict())

    def leaving(self, why: str, *, replace: bool) -> None:
        # does not wait for a supervisor that is stopped: the caller may be the thread that keeps the
        # deadlines
        self._link.offer(leaving={"why": why, "replace": replace})

    def failed_to_start(self, error: str) -> None:
        """Report why this worker cannot begin to work."""
        self._link.send(start_error=error)

    def ended(self, counts: dict[str, int]) -> None:
        """Send the outcomes of the attempts, as the last message."""
        self._over = True
        if self._meter is not None:
            self._meter.flush(lambda numbers: self._link.send(metrics=numbers))
        self._link.send(ended=counts)

    def beat(self) -> None:
        self.box.beat()

    def more(self) -> None:
        if monotonic() >= self._more_at:
            self._more_at = monotonic() + MORE_SECONDS
            self._link.offer(droppable=True, more=True)

    def last_poll(self) -> float:
        return self.box.last_poll()

    def paused(self, paused: bool) -> bool:
        self._link.offer(paused=paused)
        return True

    def restart(self, request_time: Any) -> bool:
        self._link.offer(restart=request_time)
        return True

    def pulse(self) -> None:
        self.box.pulse()
        if monotonic() >= self._report_at:
            self._report_at = monotonic() + 1.0
            self._link.offer(droppable=True, report=self._report())
            if self._meter is not None:
                self._meter.flush()
        self._link.flush()

    def meter(self, tasks: Mapping[str, Any]) -> Meter | None:
        if self._is_metered:
            self._meter = Meter(lambda numbers: self._link.offer(droppable=True, metrics=numbers), tasks)
        return self._meter
