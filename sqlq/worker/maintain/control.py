"""The row of a worker, its state in that row, and the requests of operators to it. An operator may pause,
resume, stop or restart it, or cancel its jobs.

    SIGUSR2, SIGCONT ──► supervisor ──┐
    sqlq workers pause ──► its row ───┼─► Control ──► the worker's loop
    sqlq queues pause ──► sqlq_queues ┘

A request counts once, and the newest of all counts. On PostgreSQL the poller sees the requests in rows; on
SQLite the worker reads them after a commit.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sqlq.config.constants import VERSION
from sqlq.errors import MissingFileError, SchemaVersionError
from sqlq.schema import version
from sqlq.store.workers import workers
from sqlq.store.workers.workers import PAUSED, STARTING, STOPPING, WORKING, Request, Requests
from sqlq.worker.decide import Retire, Signals
from sqlq.worker.ipc.parent import Handlers, NoParent
from sqlq.worker.lifecycle.stop import Grace
from sqlq.worker.maintain.services import UNCALLED_SECONDS, Service
from sqlq.worker.options import WorkerOptions
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import Outage, passing_over
from sqlq.worker.wait.wake import Wake

LOOK_SECONDS = 0.5
"""On SQLite a worker looks no more often, however much is committed."""
PAUSES = "paused: this worker claims nothing until it is resumed; what runs goes on"
RESUMES = "resumed: this worker claims again"


@dataclass(eq=False)
class Control(Service):
    """The row of one worker, and the requests of operators to it. As a service it writes the worker's state,
    when that has changed, and looks for jobs to cancel, when there are some."""

    _worker: str
    _options: WorkerOptions
    _wake: Wake
    _grace: Grace
    _supervision: NoParent
    _signals: Signals

    activity = "writing the state of this worker"
    _last: tuple[Any, Any] = (None, None)
    _state = _written_state = STARTING

    _worker_paused = _all_paused = False
    _cancels_at: Any = None
    """When an operator last cancelled a job of this worker."""
    _cancelled_at: Any = None
    """The same, for the cancels that its handlers know."""
    _commits: int | None = None
    _look_at = -inf
    _signed_off = False

    @property
    def is_paused(self) -> bool:
        """Whether this worker claims nothing for now."""
        return self._worker_paused or self._all_paused

    @property
    def state(self) -> str:
        """The state of this worker."""
        return PAUSED if self._state == WORKING and self.is_paused else self._state

    def ready(self) -> None:
        """Note that the worker works from now on."""
        self._state = WORKING
        self._changed()

    def stopping(self) -> None:
        """Write that the worker claims no more and ends after its running jobs. Does nothing where the
        database is away."""
        self._state = STOPPING
        with passing_over("could not say that this worker stops"):
            self.write()

    # -- requests --------------------------------------------------------------------------------------------

    def pause(self, *, paused: bool = True) -> None:
        """Claim nothing from now on, or claim again."""
        if paused != self._worker_paused:
            self._worker_paused = paused
            self._changed()

    def pause_all(self, *, paused: bool) -> None:
        """Note whether all queues are paused, those made later included."""
        if paused != self._all_paused:
            self._all_paused = paused
            log.info(
                "an operator has paused all queues: claiming nothing"
                if paused
                else "the pause of all queues is over: claiming again",
                event="paused" if paused else "resumed",
            )
            self._changed()

    def handlers(self) -> Handlers:
        """Return the handlers of messages of the supervisor."""
        return {
            "paused": lambda paused: self.pause(paused=paused),
            "all_paused": lambda paused: self.pause_all(paused=paused),
            "retire": lambda why: self._signals.retire(Retire(why)),
            "write_state": lambda _: self._changed(rewrite=True),
            "request": lambda fields: self._requested(Request(*fields)),
        }

    def follow(self, orders: Requests) -> None:
        """Follow the requests that a look has returned, as far as they are new."""
        self.pause_all(paused=orders.all_paused)
        for request in orders.requests:
            if request.worker == self._worker:
                self._requested(request)
        self._signals.pause_ends(orders.pause_ms)

    def _requested(self, request: Request) -> None:
        if request.cancels_at != self._cancels_at:
            self._cancels_at = request.cancels_at
            self._signals.state_changed()
        newest = (request.asked, request.asked_at)
        if newest == self._last:  # guard: control-request-applies-once
            return
        self._last = newest
        if request.asked in ("pause", "resume"):
            paused = request.asked == "pause"
            if not self._supervision.paused(paused) and paused != self._worker_paused:
                log.info(PAUSES if paused else RESUMES, event="paused" if paused else "resumed")
            self.pause(paused=paused)
        elif request.asked == "stop":
            log.info("stopping: an operator stops this worker; what runs may finish", event="stopping")
            self._signals.retire(Retire("an operator stops it", replace=False))
        # guard: a-restart-starts-another-first
        elif request.asked == "restart" and not self._supervision.restart(request.asked_at):
            self._signals.retire(Retire("an operator restarts it"))

    # -- in the worker's loop --------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the requests of operators, where a commit since the last look may have changed them and no
        poller reads them."""
        commits = self._wake.commits()
        if commits is None or commits == self._commits or monotonic() < self._look_at:
            return
        self._look_at = monotonic() + LOOK_SECONDS
        # for example, every connection of the pool may be in use; guard: control-read-errors-are-survived
        with passing_over("what operators want could not be read; trying again"):
            with self.database.read() as conn:
                orders = workers.read(conn, self._worker)
            self._commits = commits
            self.follow(orders)

    # -- the state in its row --------------------------------------------------------------------------------

    def run(self) -> float:
        cancels_at = self._cancels_at
        if cancels_at != self._cancelled_at:  # first: a state that cannot be written keeps no request back
            with self.database.read() as conn:
                rights = workers.cancelled(conn, self._worker)
            self._cancelled_at = cancels_at  # a request that came meanwhile is read the next time
            self._signals.cancel(rights)
        self.write()
        return UNCALLED_SECONDS

    def write(self) -> None:
        """Write the state of this worker, unless it is written."""
        state = self.state
        if state != self._written_state:
            with self.database.begin() as conn:
                workers.write_state(conn, self._worker, state)
            self._written_state = state

    def pauses_ended(self, names: list[str]) -> None:
        """Note which queues are resumed because the time of their pause is over."""
        if workers.ALL_QUEUES in names:
            self.pause_all(paused=False)
        self._wake.call()

    def _changed(self, *, rewrite: bool = False) -> None:
        """Act on a new state. `rewrite` it where the supervisor has written another one."""
        if rewrite:
            self._written_state = ""
        self._wake.call()
        self._signals.state_changed()

    # -- the row itself --------------------------------------------------------------------------------------

    def enter(self, *, patient: bool | float) -> bool:
        """Enter the worker into the database; return False when it was stopped before it could be."""
        until = inf if patient is True else monotonic() + patient
        outage = Outage("starting", self.database)
        while not self._grace.stopping.is_set():
            try:
                with self.database.begin() as conn:
                    version.watch(conn, self.database.schema)
                    self.register(conn)
                    orders = workers.read(conn, self._worker)
                self.follow(orders)
                outage.over()
                return True
            except (DBAPIError, MissingFileError, SchemaVersionError) as error:
                # at the start by hand a database that cannot be reached is a mistake in its URL; a standby is
                # none
                problem = self.database.dialect.driver.problem(error)
                # a replacement waits for no tables: they were there, and its supervisor reports that
                is_away = problem.is_away if isinstance(error, DBAPIError) else patient is not True
                if not is_away or not (monotonic() < until or problem.only_reads):
                    raise
                self._grace.pulse()  # a worker that waits for its database is alive
                self._grace.stopping.wait(outage.note(error))
        return False

    def sign_of_life(self, conn: Connection) -> None:
        """Show that the worker lives; where its row is gone, enter it again."""
        if not workers.seen(conn, self._worker):
            self.register(conn)

    def register(self, conn: Connection) -> None:
        """Write the row, unless the worker has signed off. A heartbeat may find the row gone because of that.
        `sign_off` notes it before it removes the row, so it is seen here."""
        if self._signed_off:
            return  # guard: who-has-signed-off-stays-away
        state = self.state
        workers.register(
            conn,
            id=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            queues=self._options.queues,
            concurrency=self._options.concurrency,
            supervisor_pid=os.getppid() if self._supervision.supervised else None,
            name=self._options.name,
            state=state,
        )
        self._written_state = state

    def sign_off(self) -> None:
        """Remove the row, once, unless there is no time left to wait for the database."""
        if self._signed_off or not self._grace.time_left():
            return
        self._signed_off = True
        # guard: a-stop-needs-no-database
        with passing_over("could not sign off"), self.database.begin() as conn:
            workers.leave(conn, self._worker)
