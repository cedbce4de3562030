"""Connections of PyMySQL and mysqlclient."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import URL

from sqlq.database.caller.driver import Answer, DriverConnection, Server, texts
from sqlq.errors import UnsupportedDatabaseError

_PLACE = "SELECT VERSION(), DATABASE(), USER(), @@hostname, @@port"


class PyMySQL(DriverConnection):
    """A connection of PyMySQL."""

    database = "mariadb"
    driver = module = "pymysql"

    def run(self, statement: str, parameters: Any) -> Answer:
        with self.connection.cursor(self._plain()) as cursor:
            cursor.execute(statement, parameters or None)
            return texts(cursor.description, cursor.fetchall())

    def _plain(self) -> Any:
        """Return the class of plain cursors: those of the caller's may return rows as dicts."""
        return sys.modules[f"{self.module}.cursors"].Cursor

    def identity(self) -> Hashable | None:
        return self.look()

    def look(self) -> Server:
        if self.connection not in _SEEN:
            _SEEN[self.connection] = self._look()
        return _SEEN[self.connection]

    def _look(self) -> Server:
        ((version, name, user, host, port),) = self.run(_PLACE, ()).rows
        if "MariaDB" not in version:
            raise UnsupportedDatabaseError(
                f"sqlq runs on MariaDB, not on MySQL, and this connection leads to MySQL {version}"
            )
        url = URL.create(
            f"mariadb+{self.driver}",
            user.rpartition("@")[0],
            host=getattr(self.connection, "host", host),
            port=getattr(self.connection, "port", port),
            database=name,
        )
        return Server(url, tuple(map(int, version.partition("-")[0].split("."))), name)

    def in_transaction(self) -> bool:
        # drivers keep the status of an earlier answer
        return bool(self.run("SELECT @@in_transaction", ()).rows[0][0])

    def commits_at_once(self) -> bool:
        return bool(self.connection.get_autocommit()) and not self.in_transaction()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.connection.begin()
        try:
            yield
            self.connection.commit()
        except BaseException:
            with suppress(self.errors):  # it may be cut off
                self.connection.rollback()
            raise

    def cut_off(self) -> None:
        self.connection._force_close()  # noqa: SLF001 - after close() a `with` block of the caller's raises


class MySQLClient(PyMySQL):
    """A connection of mysqlclient."""

    driver, module = "mysqldb", "MySQLdb"

    def cut_off(self) -> None:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as its:  # as above
            its.shutdown(socket.SHUT_RDWR)


_SEEN: WeakKeyDictionary[Any, Server] = WeakKeyDictionary()
"""The place of each connection, as it was at first: a later USE sends no job elsewhere."""
