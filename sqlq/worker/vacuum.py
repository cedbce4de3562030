"""A warning that names who keeps PostgreSQL from removing dead rows: each claim steps over those of the jobs
before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from sqlq.clock import readable
from sqlq.settings import RESCUE_MS
from sqlq.store import health
from sqlq.store.database import Database
from sqlq.worker.chores import jittered

log = logging.getLogger("sqlq.worker")

BUSY_JOBS = 1_000
"""A worker looks after so many jobs: where few pass, few rows die."""
OLD_SECONDS = 10.0
DEAD_ROWS = 20_000
SAY_EVERY_SECONDS = 60.0


class Vacuum:
    """Warns when dead rows pile up behind an old transaction, in a worker that is busy."""

    doing = "looking at dead rows"

    def __init__(self, database: Database, ended: Callable[[], int]) -> None:
        """`ended` returns how many jobs the worker has ended so far."""
        self._database = database
        self._jobs_ended = ended
        self._postgresql = database.engine.dialect.name == "postgresql"
        self._ended = 0
        self._said_at = float("-inf")

    def run(self) -> float:
        """Look, if enough jobs have ended since the last time, and warn at most once a minute."""
        self._look(self._jobs_ended())
        return jittered(RESCUE_MS / 1000)

    def _look(self, ended: int) -> None:
        if (
            not self._postgresql
            or ended - self._ended < BUSY_JOBS
            or time.monotonic() - self._said_at < SAY_EVERY_SECONDS
        ):
            return
        self._ended = ended
        try:
            with self._database.read() as conn:
                rows = health.dead_rows(conn)
                old = (
                    health.old_transactions(conn, older_than_s=OLD_SECONDS)
                    if rows and rows.dead > DEAD_ROWS
                    else []
                )
        except DBAPIError as error:
            if self._database.dialect.is_away(error):
                raise
            log.debug("this role may not see who holds vacuum back: %s", error.orig)
            return
        if rows and old:
            self._said_at = time.monotonic()
            log.warning(
                "vacuum cannot remove the %s dead rows of jobs, which slows every claim: pid %d (%s, %s) "
                "has had a transaction open for %s",
                *(
                    f"{rows.dead:,}",
                    old[0].pid,
                    old[0].program or "no application_name",
                    old[0].state,
                    readable(old[0].seconds * 1000),
                ),
                extra={"event": "vacuum_held_back"},
            )
