"""`sqlq doctor`: examines the database and the queue in it. Reports for each check whether all is well, and
what to do.

Each check runs on its own. If the role may not read something, or the server does not answer in time, the
check reports that, and the others go on. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.finding import Answer, Checks, Finding, Verdict, check, ok, to_do
from sqlq.admin.doctor.postgresql import ServerChecks
from sqlq.admin.doctor.queue import QueueChecks
from sqlq.admin.doctor.sqlite import DAMAGED, FileChecks
from sqlq.config.durations import readable
from sqlq.config.urls import masked
from sqlq.database.database import Database
from sqlq.database.postgresql import health
from sqlq.errors import SqlqError
from sqlq.schema import version
from sqlq.store.health.health import reading


class Doctor(Checks):
    """Examines one database."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        super().__init__(database)
        self._deep = deep

    def examine(self) -> list[Finding]:
        """Return what was found, in the order in which it matters. Raises whatever keeps from connecting at
        all."""
        found = [Finding("connection", *self._connection())]
        is_server = self._database.dialect.vacuums
        server, queue = ServerChecks(self._database), QueueChecks(self._database)
        if is_server:
            found += self._each(server.primary, server.durability, server.connections, server.autovacuum)
            found += self._each(server.schemas, server.transactions, server.prepared, server.slots)
            found += self._each(server.listen)
        else:
            file = FileChecks(self._database, deep=self._deep)
            found += self._each(file.file, file.journal, file.synchronous, file.integrity)
        found += self._each(self.migrations)
        if found[-1].verdict is not Verdict.OK:
            return found
        if is_server:
            found += self._each(server.dead_rows)
        found += self._each(queue.indexes, queue.workers, queue.stuck, queue.starts, queue.queues)
        found += self._each(queue.paused, queue.leases, queue.cancels, queue.tasks, queue.schedules)
        return found + self._each(queue.limits, queue.flows, queue.seals, queue.failed)

    def _each(self, *checks: Callable[[], Iterator[Answer]]) -> list[Finding]:
        found: list[Finding] = []
        for each in checks:
            about = each.__name__.replace("_", " ")
            try:
                found += [Finding(about, *answer) for answer in each()]
            except (SQLAlchemyError, SqlqError) as error:
                found.append(Finding(about, *self._unanswered(error)))
        return found

    def _unanswered(self, error: Exception) -> Answer:
        said = health.refusal(error)
        if "malformed" in said:
            return to_do(f"the file is damaged: {said}", DAMAGED)
        grant = health.missing_grant(error, self._database.engine.url, "reader")
        return check(f"could not look: {said}", grant)

    def _connection(self) -> Answer:
        began = time.monotonic()
        self._database.require_version()
        with reading(self._database) as conn:
            number = ".".join(map(str, conn.dialect.server_version_info or ()))
        took = readable((time.monotonic() - began) * 1000)
        name = self._database.dialect.title
        return ok(f"{masked(self._database.engine.url)}, {name} {number}, connected in {took}")

    def migrations(self) -> Iterator[Answer]:
        schema = self._database.schema
        with reading(self._database) as conn:
            told = version.find(conn, schema)
            # older ones may lack what the next revision adds
            differs = version.difference(conn, schema) if told is not None and told.usable else None
        found = None if told is None else told.revision
        if differs is not None:
            yield to_do(differs, None)
        elif found == version.HEAD:
            yield ok(f"the tables are at revision {found}, the one needed")
        else:
            yield to_do(version.complaint(self._database.engine, schema, found), None)
