"""The databases into which an App's jobs go: its own, and those of callers' connections."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlq.config.urls import in_memory, is_same_place, masked
from sqlq.database import dialects
from sqlq.database.caller.driver import Place
from sqlq.database.database import Database
from sqlq.errors import EnqueueError, SchemaVersionError, SqlqError
from sqlq.schema import version


class Schemas(WeakKeyDictionary[Engine | Place, str | None]):
    """The schemas of the jobs' tables, by engine. Each database is checked once, at its first job."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    def require(self, conn: Connection) -> str | None:
        """Return the schema for jobs on this connection. Raises an error where its tables are not there, or
        a test's jobs would leave the test."""
        ours = conn.engine is self._database.engine or self._is_ours(conn)
        if not ours and self._is_in_a_test and not in_memory(conn.engine.url):
            # guard: test-jobs-stay-in-the-test
            raise EnqueueError(
                f"a test database is open, {masked(self._database.engine.url)}, but this session is "
                f"connected to {masked(conn.engine.url)}: give the code under test an engine on app.url, or "
                "open that other database with sqlq.testing.on_database"
            )
        self._database.require_version_of(conn)
        schema = self._database.schema_for(conn)
        try:
            version.require(conn, schema)
        except SchemaVersionError as error:
            if ours:
                raise
            raise SchemaVersionError(
                f"session is connected to {masked(conn.engine.url)}, but this App's workers look into "
                f"{masked(self._database.engine.url)}: give a session of that database ({error})"
            ) from None
        if not ours:
            warnings.warn(
                f"jobs are being enqueued into {masked(conn.engine.url)}, but this App's workers look into "
                f"{masked(self._database.engine.url)}: they will not see them",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )
        self[conn.engine] = schema
        return schema

    @property
    def _is_in_a_test(self) -> bool:
        return self._database.address is not None and self._database.address.is_test

    def _is_ours(self, conn: Connection) -> bool:
        """Whether a caller's connection leads to the App's own database, by whatever name, host or proxy; in
        doubt it does.

        The own database is not connected to for that, since it may not answer; a test's is.
        """
        own, theirs = self._database.engine.url, conn.engine.url
        if own.get_backend_name() != theirs.get_backend_name():
            return False
        if dialects.dialect_at(own).in_a_file:
            if in_memory(own) and in_memory(theirs):
                return True
            return os.path.realpath(own.database or "") == os.path.realpath(theirs.database or "")
        if is_same_place(own, theirs):
            return True
        dialect = self._database.dialect
        if not self._is_in_a_test:
            name = conn.exec_driver_sql(dialect.driver.server).scalar()
            return not own.database or own.database in (theirs.database, name)
        try:
            with self._database.read() as mine:
                one, other = (each.exec_driver_sql(dialect.driver.server).one() for each in (mine, conn))
                return tuple(one) == tuple(other)
        except (DBAPIError, SqlqError):
            return True


def _callers_level() -> int:
    """Return the `stacklevel` with which a warning of the calling function names the caller of sqlq."""
    level = 1
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what warnings themselves go by
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sqlq."):
        level, frame = level + 1, frame.f_back
    return level
