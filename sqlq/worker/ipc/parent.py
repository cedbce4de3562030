"""The connection of a worker to its supervisor: messages both ways, and the memory they share.

A worker in a program of its own making (`app.worker()`) has no supervisor: `NoParent` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import monotonic
from typing import Any, NamedTuple

from sqlq.config.durations import readable
from sqlq.database.database import Database
from sqlq.worker.ipc.pipe import Message, Pipe
from sqlq.worker.ipc.shared_memory import SharedMemory
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Meter
from sqlq.worker.threads.log import log

ORPHANED_MS = 5_000
"""How long jobs may go on when the supervisor is gone, and no process watches."""

REPORT_SECONDS = 1.0
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
        self.announce: Callable[[Facts], None] = lambda facts: None
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
        self.announce(facts)
        self._link.send(ready=facts._asdict())

    def leaving(self, why: str, *, replace: bool) -> None:
        # does not wait for a supervisor that is stopped: the caller may be the thread that keeps the
        # deadlines
        self._link.offer(leaving={"why": why, "replace": replace})

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

    def pulse(self) -> None:
        self.box.pulse()
        if monotonic() >= self._report_at:
            self._report_at = monotonic() + REPORT_SECONDS
            self._link.offer(droppable=True, report=self._report())
            if self._meter is not None:
                self._meter.flush()
        self._link.flush()

    def meter(self, tasks: Mapping[str, Any]) -> Meter | None:
        if self._is_metered:
            self._meter = Meter(lambda numbers: self._link.offer(droppable=True, metrics=numbers), tasks)
        return self._meter
