"""The databases into which an App's jobs go: its own, and those of callers' connections."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlq.config.urls import in_memory, is_same_place, masked
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
        own = self._database.engine
        is_in_a_test = self._database.address is not None and self._database.address.is_test
        if is_in_a_test and not in_memory(conn.engine.url) and not self._is_the_tests(conn):
            # guard: test-jobs-stay-in-the-test
            raise EnqueueError(
                f"a test database is open, {masked(own.url)}, but this session is connected to "
                f"{masked(conn.engine.url)}: give the code under test an engine on app.url, or open that "
                "other database with sqlq.testing.on_database"
            )
        self._database.require_version_of(conn)
        schema = self._database.schema_for(conn)
        try:
            version.require(conn, schema)
        except SchemaVersionError as error:
            if is_same_place(own.url, conn.engine.url):
                raise
            raise SchemaVersionError(
                f"session is connected to {masked(conn.engine.url)}, but this App's workers look into "
                f"{masked(own.url)}: give a session of that database ({error})"
            ) from None
        self[conn.engine] = schema
        return schema

    def _is_the_tests(self, conn: Connection) -> bool:
        """Whether a caller's connection leads to the test's database, by whatever name, host or proxy; in
        doubt it does."""
        own, theirs = self._database.engine.url, conn.engine.url
        if own.get_backend_name() != theirs.get_backend_name():
            return False
        if self._database.dialect.in_a_file:
            return os.path.realpath(own.database or "") == os.path.realpath(theirs.database or "")
        query = self._database.dialect.driver.server
        try:
            with self._database.read() as mine:
                return tuple(mine.exec_driver_sql(query).one()) == tuple(conn.exec_driver_sql(query).one())
        except (DBAPIError, SqlqError):
            return True
