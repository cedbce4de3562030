"""A worker's own row: entered before it claims anything, touched as long as it lives, and gone when it
has left in good order."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sqlq.schema import version
from sqlq.settings import VERSION
from sqlq.store import cluster, control
from sqlq.store.database import Database
from sqlq.store.postgresql import is_read_only
from sqlq.worker.control import Control
from sqlq.worker.grace import Grace
from sqlq.worker.options import WorkerOptions
from sqlq.worker.outage import Outage

log = logging.getLogger("sqlq.worker")


class Entry:
    """The row of one worker."""

    def __init__(
        self,
        database: Database,
        worker: str,
        options: WorkerOptions,
        grace: Grace,
        schema: version.Watch,
        *,
        control: Callable[[], Control],
        supervised: bool,
    ) -> None:
        self._database = database
        self._worker = worker
        self._options = options
        self._grace = grace
        self._control = control
        self._schema = schema
        self._supervised = supervised
        self._signed_off = False

    def enter(self, *, patient: bool) -> bool:
        """Enter the worker into the database; return False when it was stopped before it could be."""
        outage = Outage("starting", self._database)
        while not self._grace.stopping.is_set():
            try:
                with self._database.begin() as conn:
                    self._schema.look(conn, self._database.schema)
                    self.register(conn)
                    wanted = control.read(conn, self._worker)
                self._control().heed(wanted)
                outage.over()
                return True
            except DBAPIError as error:
                # at the start by hand a database that cannot be reached is a mistake in its URL; a standby is
                # none
                if not self._database.dialect.is_away(error) or not (patient or is_read_only(error)):
                    raise
                self._grace.pulse()  # who waits for its database is alive
                self._grace.stopping.wait(outage.met(error))
        return False

    def sign_of_life(self, conn: Connection) -> None:
        """Show that the worker lives; where its row is gone, enter it again."""
        if not cluster.seen(conn, self._worker):
            self.register(conn)

    def register(self, conn: Connection) -> None:
        """Write the row, unless the worker has signed off: who finds it gone because of that sees it here,
        since it was noted before."""
        if self._signed_off:
            return  # guard: who-has-signed-off-stays-away
        operators = self._control()
        cluster.register(
            conn,
            id=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            queues=self._options.queues,
            concurrency=self._options.concurrency,
            supervisor_pid=os.getppid() if self._supervised else None,
            name=self._options.name,
            state=operators.state,
        )
        operators.entered(operators.state)

    def sign_off(self) -> None:
        """Remove the row, once, unless there is no time left to wait for the database."""
        if self._signed_off or not self._grace.patience():
            return
        self._signed_off = True
        try:
            with self._database.begin() as conn:
                cluster.leave(conn, self._worker)
        except Exception as error:  # guard: a-stop-needs-no-database
            log.debug("could not sign off: %s", error)
