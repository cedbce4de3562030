"""The services of a process beside its jobs, and the loop that runs each when it is due."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import monotonic

from sqlq.config.constants import RESCUE_MS
from sqlq.database.database import Database
from sqlq.database.timeouts import answers
from sqlq.store import blockers
from sqlq.store.jobs.settle import Rescued
from sqlq.store.workers.look import Look
from sqlq.worker.maintain.services import (
    EndPauses,
    PolledService,
    Prune,
    Rescue,
    Service,
    Sweep,
    Ticks,
    Unblock,
    jittered,
)
from sqlq.worker.options import WorkerOptions
from sqlq.worker.threads.loop import Loop, Outage
from sqlq.worker.wait.poller import LastLook

TURN_SECONDS = 5.0


class ServiceLoop(Loop):
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
        super().__init__("sqlq-maintenance", Outage("the maintenance", database, quiet=quiet))
        self._shared, self._others_do = shared, others_do
        self._outages = {
            service: Outage(service.activity, database, quiet=quiet, is_vital=isinstance(service, Rescue))
            for service in (*services, *shared)
        }
        self._due = {service: monotonic() + service.first_wait for service in self._outages}
        self._serving = threading.Lock()

    def call(self, service: Service) -> None:
        """Run a service now; any thread may call this."""
        self.at(service, monotonic())

    def at(self, service: Service, due_at: float) -> None:
        """Run a service at a time of the monotonic clock, unless it is due before; any thread may call
        this."""
        with self._lock:
            self._due[service] = min(due_at, self._due[service])
        self.wake()

    def await_turn(self) -> None:
        """Wait for the turn under way, a few seconds at most: a later claim sees its writes."""
        if self._serving.acquire(timeout=TURN_SECONDS):
            self._serving.release()

    def _turn(self) -> float:
        service = min(self._due, key=self._due.__getitem__)
        if monotonic() >= self._due[service]:
            self._due[service] = inf  # a call during its turn comes after this
            self.at(service, monotonic() + self._serve(service, self._outages[service]))
        return min(self._due.values()) - monotonic()

    def _serve(self, service: Service, outage: Outage) -> float:
        """Run a service; return in how many seconds it is due again."""
        times, writing = answers.times, answers.writing
        try:
            with self._serving:
                # guard: maintenance-is-taken-over
                if service in self._shared and self._others_do():
                    return jittered(RESCUE_MS / 1000)
                wait = service.run()
        except Exception as error:
            return outage.wait_after(error)
        if answers.times > times:  # guard: outage-ends-by-a-statement
            outage.over(wrote=answers.writing > writing)  # guard: read-ends-no-outage-of-writes
        return wait


class Maintenance(ServiceLoop):
    """The services of a host and the `own` ones of this process. The supervisor runs those of the host for
    all its workers; without one each worker runs them."""

    def __init__(
        self,
        database: Database,
        options: WorkerOptions,
        own: Sequence[Service],
        *,
        rescued: Callable[[Iterable[Rescued], str], object],
        freed: Callable[[], None],
        pauses_ended: Callable[[list[str]], None],
        last_look: LastLook,
        quiet: bool = False,
    ) -> None:
        """`freed` is called when jobs have become available, `pauses_ended` with the queues that were
        resumed."""
        is_watched = last_look.is_recent
        self._rescue = Rescue(database, options.lease_ms, rescued, freed=freed, is_watched=is_watched)
        self._ticks = None if options.drain else Ticks(database, freed=freed, is_watched=is_watched)
        self._unblocks = [
            Unblock(database, blocker(), freed=freed, is_watched=is_watched)
            for blocker in blockers.BLOCKERS
            # a drain looks itself, and would miss what a service has locked
            if blocker.waited_for is not None or not options.drain
        ]
        self._end_pauses = EndPauses(database, pauses_ended)
        super().__init__(
            [self._rescue, self._end_pauses, *own],
            database,
            shared=[
                *([] if self._ticks is None else [self._ticks]),
                Sweep(database),
                Prune(database, options.retention_ms),
                *self._unblocks,
            ],
            others_do=last_look.supervisor_looks,
            quiet=quiet,
        )

    def act_on(self, look: Look, at: float) -> None:
        """Run now the services for which a look has found work; `at` is when it was answered."""
        called_by: list[tuple[str | None, PolledService]] = [("expired", self._rescue)]
        called_by += [(service.blocker.called_by, service) for service in self._unblocks]
        for name, service in called_by:
            if name is not None and getattr(look, name):
                service.calls += 1  # guard: poll-calls-services
                self.call(service)
        if look.tick_ms is not None and self._ticks is not None:
            due_at = at + look.tick_ms / 1000
            self._ticks.expect(due_at)  # guard: poller-reports-the-next-tick
            self.at(self._ticks, due_at)

    def expect_end_of_pause(self, pause_ms: float | None) -> None:
        """Resume the queues whose pause ends in a number of milliseconds."""
        if pause_ms is not None:
            self.at(self._end_pauses, monotonic() + max(0.0, pause_ms) / 1000)
