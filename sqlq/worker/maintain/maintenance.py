"""The services of a process beside its jobs, and the loop that runs each when it is due."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_

from sqlq.config.constants import RESCUE_MS
from sqlq.database.database import Database, asked
from sqlq.database.dialects import is_refused
from sqlq.store.workers.look import Look
from sqlq.worker.ipc.parent import Facts
from sqlq.worker.maintain.pauses import EndPauses
from sqlq.worker.maintain.services import (
    NEVER,
    Admit,
    Prune,
    Rescue,
    SchemaWatch,
    Service,
    Sweep,
    Ticks,
    Unblock,
    jittered,
)
from sqlq.worker.options import WorkerOptions
from sqlq.worker.outage import AWAY, Outage
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.wait.poller import LastLook

log = logging.getLogger("sqlq.worker")

TURN_SECONDS = 5.0
FAILED_SECONDS = 7.0
"""A service that failed is tried again after so long, unless the database was away."""


class ServiceLoop:
    """Runs services in a thread of its own, each when it is due, the earliest first."""

    def __init__(
        self,
        services: Sequence[Service],
        database: Database | None = None,
        *,
        shared: Sequence[Service] = (),
        others_do: Callable[[], bool] = lambda: False,
        quiet: bool = False,
    ) -> None:
        """While `others_do` them the `shared` services are left out. With `quiet` others report an outage of
        the `database`."""
        self._shared, self._others_do = shared, others_do
        order = itertools.count()
        self._due = [
            (
                time.monotonic(),
                next(order),
                service,
                Outage(service.doing, database, quiet=quiet, is_vital=isinstance(service, Rescue)),
            )
            for service in (*services, *shared)
        ]
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sqlq-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Begin no other turn."""
        self._ended.set()
        self._changed.set()

    def call(self, service: Service) -> None:
        """Run a service now; any thread may call this."""
        self.at(service, time.monotonic())

    def at(self, service: Service, due_at: float) -> None:
        """Run a service at a time of the monotonic clock, unless it is due before; any thread may call
        this."""
        self._put(partial(is_, service), due_at)
        self._changed.set()

    def await_turn(self) -> None:
        """Wait for the turn under way, a few seconds at most: a later claim sees its writes."""
        if self._turn.acquire(timeout=TURN_SECONDS):
            self._turn.release()

    def join(self, seconds: float) -> None:
        """Wait for the last turn, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()))
            self._changed.clear()
            due_at, _, service, outage = self._due[0]
            if self._ended.is_set() or time.monotonic() < due_at:
                continue
            self._put(partial(is_, service), NEVER, sooner=False)  # a call during its turn comes after this
            times, writing = asked.times, asked.writing
            try:
                with self._turn:
                    wait = self._serve(service)
                if asked.times > times:  # guard: who-asked-nothing-knows-nothing
                    outage.over(wrote=asked.writing > writing)  # guard: a-look-is-no-write
                else:
                    outage.forget()
            except AWAY as error:
                wait = outage.met(error)
                # The database may refuse a query for a column that is gone. In an outage the watch would see
                # nothing; a watch that hastened itself would query without a pause.
                # guard: who-watches-does-not-hasten-itself
                if is_refused(error) and not isinstance(service, SchemaWatch):
                    self._put(lambda other: isinstance(other, SchemaWatch), time.monotonic())
            except Exception as error:
                wait = max(FAILED_SECONDS, outage.failed(error))
            self.at(service, time.monotonic() + wait)

    def _serve(self, service: Service) -> float:
        # guard: maintenance-is-taken-over
        if service in self._shared and self._others_do():
            return jittered(RESCUE_MS / 1000)
        return service.run()

    def _put(self, which: Callable[[Service], bool], due_at: float, *, sooner: bool = True) -> None:
        """Set when services are due; with `sooner` none becomes due later than it was."""
        with self._lock:
            self._due = sorted(
                (min(due_at, entry[0]) if sooner else due_at, *entry[1:]) if which(entry[2]) else entry
                for entry in self._due
            )


class Maintenance(ServiceLoop):
    """The services of a host and the `own` ones of this process. The supervisor runs those of the host for
    all its workers; without one each worker runs them."""

    def __init__(
        self,
        database: Database,
        options: WorkerOptions | Facts,
        own: Sequence[Service],
        *,
        reporter: Reporter,
        freed: Callable[[], None],
        pauses_ended: Callable[[list[str]], None],
        last_look: LastLook,
        quiet: bool = False,
    ) -> None:
        """`freed` is called when jobs have become available, `pauses_ended` with the queues that were
        resumed."""
        rescued, looked_at = reporter.rescued, last_look.leases_at
        self._rescue = Rescue(database, options.lease_ms, rescued, freed, looked_at=looked_at)
        # Shared services wait for `others_do` already. A look of a supervisor that has fallen silent must not
        # keep them from taking over.
        own_at = last_look.own_leases_at  # guard: a-last-look-holds-no-service-back
        self._ticks = Ticks(database, looked_at=own_at, ticked=freed)
        self._admit = Admit(database, freed, looked_at=own_at)
        self._end_pauses = EndPauses(database, pauses_ended)
        super().__init__(
            [self._rescue, self._end_pauses, *own],
            database,
            shared=[
                *([] if options.drain else [self._ticks]),
                Sweep(database),
                Prune(database, options.retention_ms),
                Unblock(database, freed),
                self._admit,
            ],
            others_do=last_look.supervisor_looks,
            quiet=quiet,
        )

    def looked(self, look: Look, at: float) -> None:
        """Run now the services for which a look has found work; `at` is when it was answered."""
        for is_found, service in (
            (look.expired, self._rescue),
            (look.limited, self._admit),
        ):
            if is_found:
                service.is_called = True  # guard: a-look-calls-to-services
                self.call(service)
        if look.tick_ms is not None:
            due_at = at + look.tick_ms / 1000
            self._ticks.expect(due_at)  # guard: the-lookout-tells-of-ticks
            self.at(self._ticks, due_at)

    def expect_end_of_pause(self, pause_ms: float | None) -> None:
        """Resume the queues whose pause ends in so many milliseconds."""
        if pause_ms is not None:
            self.at(self._end_pauses, self._end_pauses.expect(pause_ms))
