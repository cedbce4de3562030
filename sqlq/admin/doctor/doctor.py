"""`sqlq doctor`: examines the database and the queue in it. Reports for each check whether all is well, and
what to do.

Each check runs on its own. If the role may not read something, or the server does not answer in time, the
check reports that, and the others go on. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.finding import Answer, Checks, Finding, PlaceChecks, Verdict, check, ok, to_do
from sqlq.admin.doctor.queue import QueueChecks
from sqlq.admin.doctor.sqlite import DAMAGED, FileChecks
from sqlq.config.durations import span
from sqlq.config.urls import masked, read_url
from sqlq.database.database import Database
from sqlq.database.dialects import missing_grant, refusal
from sqlq.errors import SqlqError
from sqlq.schema import version
from sqlq.store.health.health import reading


class Doctor(Checks):
    """Examines one database."""

    def examine(self) -> list[Finding]:
        """Return what was found, in the order in which it matters. Raises whatever keeps from connecting at
        all."""
        found = [Finding("connection", *self._connection())]
        place = self._place()
        queue = QueueChecks(self._database)
        found += self._each(*place.in_general())
        found += self._each(self.replica, self.migrations)
        if found[-1].verdict is not Verdict.OK:
            return found
        found += self._each(*place.of_tables())
        found += self._each(queue.indexes, queue.workers, queue.stuck, queue.starts, queue.queues)
        found += self._each(queue.paused, queue.leases, queue.cancels, queue.tasks, queue.schedules)
        return found + self._each(queue.limits, queue.flows, queue.seals, queue.failed)

    def of_place(self, checks: Collection[str]) -> list[Finding]:
        """Return what these checks of the server or file find, without those where all is well."""
        place = self._place()
        every = (*place.in_general(), *place.of_tables())
        return self._amiss(each for each in every if each.__name__ in checks)

    def of_queue(self, checks: Collection[str]) -> list[Finding]:
        """Return what these checks of the queue find, without those where all is well."""
        queue = QueueChecks(self._database)
        return self._amiss(getattr(queue, name) for name in checks)

    def _place(self) -> PlaceChecks:
        """Return the checks of this kind of database. Those of the others are not imported."""
        match self._database.dialect.name:
            case "postgresql":
                from sqlq.admin.doctor.postgresql import PostgreSQLChecks

                return PostgreSQLChecks(self._database)
            case "mariadb":
                from sqlq.admin.doctor.mariadb import MariaDBChecks

                return MariaDBChecks(self._database)
            case _:
                return FileChecks(self._database, deep=self._deep)

    def _amiss(self, checks: Iterable[Callable[[], Iterator[Answer]]]) -> list[Finding]:
        return [each for each in self._each(*checks) if each.verdict is not Verdict.OK]

    def _each(self, *checks: Callable[[], Iterator[Answer]]) -> list[Finding]:
        found: list[Finding] = []
        for each in checks:
            about = each.__name__.replace("_", " ")
            try:
                found += [Finding(about, *answer) for answer in each()]
            except (SQLAlchemyError, SqlqError) as error:
                found.append(Finding(about, *self.unanswered(error)))
        return found

    def unanswered(self, error: Exception) -> Answer:
        """Return the answer in place of a look that the database refused."""
        said = refusal(error)
        if "malformed" in said:
            return to_do(f"the file is damaged: {said}", DAMAGED)
        grant = missing_grant(error, self._database.engine.url, "reader")
        return check(f"could not look: {said}", grant)

    def _connection(self) -> Answer:
        began = time.monotonic()
        self._database.require_version()
        with reading(self._database) as conn:
            number = ".".join(map(str, conn.dialect.server_version_info or ()))
        took = span(time.monotonic() - began)
        name = self._database.dialect.title
        return ok(f"{masked(self._database.engine.url)}, {name} {number}, connected in {took}")

    def replica(self) -> Iterator[Answer]:
        url = read_url(of=self._database.engine.url)
        if url is None:
            return
        with Database.open(url, self._database.requested_schema) as other, reading(other) as conn:
            seconds = other.dialect.burden(conn).behind_seconds
        behind = "" if seconds is None else f", {span(seconds)} behind"
        yield ok(f"looks read from {masked(url)}{behind}")

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
