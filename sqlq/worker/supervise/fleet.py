"""Several Apps, such as those of tenants or shards, that one `sqlq work` serves.

Each App has a supervisor, and worker processes, of its own. So none waits for another, and none is harmed by
another's database. They share this process, its signals, its health file and its metrics."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from sqlq.worker.ipc.process import TICK_SECONDS, bury_orphans
from sqlq.worker.supervise.health_file import HealthFile
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.threads import serving

log = logging.getLogger("sqlq.worker")
RESTART_SECONDS = 10.0


class Fleet:
    """Runs a supervisor, or one for each App where the first one finds several. `run` blocks; the other
    methods may be called from any thread.

    The workers of an App that end with an error, as while its database is away, are started again while
    others work.
    """

    def __init__(
        self,
        make: Callable[[str | None], Supervisor],
        *,
        health_file: HealthFile | None = None,
        max_idle_ms: int | None = None,
        retries: bool = True,
    ) -> None:
        """`make` makes the supervisor of an App by its name, and the first one without a name. Without
        `retries` an App whose workers could not start stays without."""
        self._make = make
        self._health_file = health_file
        self._max_idle_ms = max_idle_ms
        self._retries = retries
        self._lock = threading.RLock()
        self.first = make(None)
        self._supervisors: dict[str, Supervisor] = {}
        self._stopped = threading.Event()
        self._is_paused = False
        self._codes: dict[str, int] = {}
        """The exit code of each App whose workers ended with one."""
        self._worked = False
        """Whether a worker of any App was ever ready."""
        self._past: Counter[str] = Counter()

    # -- from outside ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let running jobs finish within the grace time, and end."""
        with self._lock:
            self._stopped.set()
            for supervisor in self._all():
                supervisor.stop()

    def restart(self) -> None:
        """Replace the worker processes by new ones, which import the Apps anew."""
        for supervisor in self._all():
            supervisor.restart()

    def pause(self, *, paused: bool = True) -> None:
        """Claim nothing until `resume`; running jobs go on."""
        with self._lock:
            self._is_paused = paused
            for supervisor in self._all():
                (supervisor.pause if paused else supervisor.resume)()

    def resume(self) -> None:
        """Claim again."""
        self.pause(paused=False)

    def kill(self) -> None:
        """Kill the worker processes now."""
        for supervisor in self._all():
            supervisor.kill()

    def run(self) -> int:
        """Work until stopped, or until every worker has ended; return the exit code."""
        code = self.first.run()
        if self.first.apps is None:
            return code
        threads = [
            threading.Thread(target=self._keep, args=(name,), name=f"sqlq-app-{name}", daemon=True)
            for name in self.first.apps
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(TICK_SECONDS)
                self._tick()
        return max(self._codes.values(), default=0)

    # -- figures ---------------------------------------------------------------------------------------------

    def apps(self) -> Mapping[str, Supervisor] | None:
        """Return the supervisors of several Apps by their names; None of a single one."""
        with self._lock:
            return dict(self._supervisors) if self.first.apps is not None else None

    def _all(self) -> list[Supervisor]:
        with self._lock:
            return list(self._supervisors.values()) or [self.first]

    @property
    def tally(self) -> Counter[str]:
        """How many attempts ended how so far."""
        return sum((supervisor.tally for supervisor in self._all()), self._past)

    @property
    def running(self) -> int:
        """How many jobs ran by the last reports."""
        return sum(supervisor.running for supervisor in self._all())

    @property
    def ready_since(self) -> float | None:
        """Since when a worker of any App is at work, by the monotonic clock."""
        known = [supervisor.ready_since for supervisor in self._all()]
        return min((since for since in known if since is not None), default=None)

    @property
    def place(self) -> tuple[str, str | None] | None:
        """URL and schema of the database of a single App."""
        return self.first.place

    # -- the threads, one for each App -----------------------------------------------------------------------

    def _keep(self, name: str) -> None:
        serving.set(name)
        while True:
            with self._lock:  # so that `stop` reaches each one that is made
                if self._stopped.is_set():  # guard: what-is-stopped-does-not-start-again
                    return
                supervisor = self._supervisors[name] = self._make(name)
                if self._is_paused:
                    supervisor.pause()
            try:
                code = supervisor.run()
            except Exception:
                log.exception("the supervisor failed")
                code = 1
            if not self._goes_on(name, supervisor, code):
                return
            self._stopped.wait(RESTART_SECONDS)

    def _goes_on(self, name: str, supervisor: Supervisor, code: int) -> bool:
        """Whether the workers of an App, which ended with this code, are to be started again."""
        with self._lock:
            self._worked = self._worked or supervisor.ready_since is not None
            self._codes[name] = code
            if code == 0 or self._stopped.is_set() or not self._retries:
                return False
            apps = self.first.apps or ()
            if not self._worked and all(self._codes.get(app) for app in apps):
                self._stopped.set()  # guard: a-fleet-that-cannot-start-ends
                return False
            self._past += supervisor.tally
            del self._supervisors[name]
        log.error("the workers ended with code %d; trying again in %.0f s", code, RESTART_SECONDS)
        return True

    def _tick(self) -> None:
        with self._lock:
            supervisors = list(self._supervisors.values())
        if self._health_file is not None and not self._stopped.is_set():
            # an App whose database is away is not mended by a restart, and so counts for nothing here
            self._health_file.tick(is_well=all(supervisor.is_well for supervisor in supervisors))
        idle_ms = min((supervisor.idle_ms for supervisor in supervisors), default=0.0)
        if self._max_idle_ms is not None and idle_ms >= self._max_idle_ms and not self._stopped.is_set():
            log.info("stopping: nothing has come to any App", extra={"event": "stopping"})
            self.stop()
        if os.getpid() == 1:
            bury_orphans()
