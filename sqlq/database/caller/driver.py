"""A caller's connection as its driver has it, with the part of SQLAlchemy's Connection that the store uses.

A statement of the store is compiled for the driver, and runs on the driver's own connection. SQLAlchemy never
holds that connection. Its pool would reset it, and its transaction would begin or roll back against the
caller. So this sends only commands for savepoints, and for a transaction of the job's own. The latter is for
a caller without a transaction whose driver commits each statement by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import URL, Dialect, TypeDecorator
from sqlalchemy.engine import IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.util import greenlet_spawn, immutabledict

from sqlq.database.schemas import compiled_for
from sqlq.database.values import RawRows
from sqlq.schema.qualify import qualified
from sqlq.schema.tables import TOKEN_SCHEMA

T = TypeVar("T")


class Answer(NamedTuple):
    """The rows of a statement, and the names of their columns; both empty for one that returns none."""

    names: Sequence[str]
    rows: RawRows


NOTHING = Answer((), ())


class Endpoint:
    """A database that callers' connections lead to, in the role of SQLAlchemy's Engine."""

    def __init__(self, url: URL, version: tuple[int, ...], default_schema: str | None) -> None:
        self.url = url
        dialect: Any = url.get_dialect()()
        dialect.server_version_info = version
        dialect.default_schema_name = default_schema
        self.dialect: Dialect = qualified(dialect)


_ENDPOINTS: dict[Hashable, Endpoint] = {}
MAX_ENDPOINTS = 1_000
"""The most of them that are remembered, as of the tenants that one process serves."""


class DriverConnection:
    """A caller's connection, as its driver has it. It runs statements written with SQLAlchemy."""

    database: str
    """The kind of database, by SQLAlchemy's name for it."""
    driver: str
    """SQLAlchemy's name of the driver, whose parameters a statement is written with."""
    module: str
    """The name of the driver's module."""
    is_async = False
    is_each_threads_own = False
    """Whether the object has a connection of its own for each thread."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._savepoints = 0
        self._is_own = False
        """Whether the transaction is one that this began."""
        self._execution_options: immutabledict[str, Any] = immutabledict()

    # -- what each driver does -------------------------------------------------------------------------------

    @property
    def errors(self) -> Any:
        """The exception class, or classes, of the driver."""
        return sys.modules[self.module].Error

    def run(self, statement: str, parameters: Any) -> Answer:
        """Run a statement, written as the driver takes it, and return all of its rows as tuples."""
        raise NotImplementedError

    def send(self, command: str) -> None:
        """Run a command, which returns no rows."""
        self.run(command, ())

    def identity(self) -> Hashable | None:
        """Return a key of the database and the caller's rights in it, without a query; None where there is no
        such key."""
        raise NotImplementedError

    def look(self) -> Endpoint:
        """Query the database for the facts about it, in statements that cannot fail."""
        raise NotImplementedError

    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        raise NotImplementedError

    def has_started(self) -> bool:
        """Whether a transaction is open that the caller, or a statement of theirs, began."""
        return self.in_transaction()

    def commits_at_once(self) -> bool:
        """Whether a statement outside any transaction is a transaction by itself, because the driver begins
        none."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a transaction that the caller will end, where the driver begins one before a write. The
        driver may not recognise sqlq's statement as a write."""

    def transaction(self) -> Any:
        """Return a context manager of a transaction, asynchronous where the connection is. It commits at the
        end of the block, and rolls back if that raises."""
        return self.connection.transaction()

    def on_commit(self, callback: Callable[[], object]) -> bool:
        """Call `callback` after the commit of the open transaction; False where the driver reports no
        commits."""
        return False

    def refuse_broken(self) -> None:
        """Raise the library's own error if its transaction can only be rolled back."""

    def cut_off(self) -> None:
        """Have every further statement on the connection fail, its commit too, where the database has undone
        the transaction and would begin another."""
        raise NotImplementedError

    # -- for those who write ---------------------------------------------------------------------------------

    @cached_property
    def engine(self) -> Endpoint:
        """The database it leads to, queried at most once for each place and user."""
        known = self.identity()
        if known in _ENDPOINTS:
            return _ENDPOINTS[known]
        endpoint = self.look()
        if known is not None and endpoint.dialect.default_schema_name is not None:
            if len(_ENDPOINTS) >= MAX_ENDPOINTS:
                _ENDPOINTS.clear()
            _ENDPOINTS[known] = endpoint
        return endpoint

    @cached_property
    def dialect(self) -> Dialect:
        return self.engine.dialect

    def write(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Do `work` in the open transaction, or in the one that the driver begins for it. If the driver
        begins none, this begins one of its own. Return the result of `work`, and whether it is committed."""
        if not self.commits_at_once():
            return work(), False
        self.send("BEGIN IMMEDIATE" if self.database == "sqlite" else "BEGIN")
        self._is_own = True
        try:
            done = work()
            self.send("COMMIT")
        except BaseException:
            with suppress(Exception):  # the connection may be lost, and its transaction with it
                self.send("ROLLBACK")
            raise
        return done, True

    def invalidate(self) -> None:
        """Have the connection refuse to go on, if its transaction was the caller's."""
        if not self._is_own:
            self.cut_off()

    async def run_sync(self, work: Callable[[Any], T]) -> T:
        """Run synchronous work on an asynchronous driver's connection, awaited on the caller's loop."""
        return await greenlet_spawn(work, self)

    # -- as a Connection -------------------------------------------------------------------------------------

    def get_execution_options(self) -> immutabledict[str, Any]:
        return self._execution_options

    def execute(
        self,
        statement: Any,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> Result[Any]:
        schema = self._execution_options.get("schema_translate_map", {}).get(TOKEN_SCHEMA)
        if parameters is None or isinstance(parameters, Mapping):
            parameters = [parameters or {}]
        names: Sequence[str] = ()
        rows: list[Any] = []
        for values in parameters:
            written = _compiled(statement, self.dialect, schema, tuple(values))
            answer = self.run(*written.filled(values))
            names = answer.names or names
            rows += written.read(answer.rows) if written.readers else answer.rows
        return _result(Answer(names, rows))

    def exec_driver_sql(self, statement: str, parameters: Any = ()) -> Result[Any]:
        return _result(self.run(statement, parameters))

    def scalar(self, statement: Any, parameters: Mapping[str, Any] | None = None) -> Any:
        return self.execute(statement, parameters).scalar()

    def scalars(self, statement: Any, parameters: Mapping[str, Any] | None = None) -> Any:
        return self.execute(statement, parameters).scalars()

    @contextmanager
    def begin_nested(self) -> Iterator[Savepoint]:
        self._savepoints += 1
        savepoint = Savepoint(self, f"sqlq_{self._savepoints}")
        self.send(f"SAVEPOINT {savepoint.name}")
        try:
            yield savepoint
        except BaseException:
            with suppress(Exception):  # as above
                savepoint.rollback()
            raise
        if savepoint.is_open:
            self.send(f"RELEASE SAVEPOINT {savepoint.name}")


@dataclass
class Savepoint:
    """A savepoint; the end of its block releases it, unless it was rolled back before."""

    _driver: DriverConnection
    name: str
    is_open: bool = True

    def rollback(self) -> None:
        if self.is_open:
            self.is_open = False
            self._driver.send(f"ROLLBACK TO SAVEPOINT {self.name}")
            self._driver.send(f"RELEASE SAVEPOINT {self.name}")


class _Written(NamedTuple):
    """A statement compiled for a driver, with the conversion of each parameter for the driver."""

    compiled: Any
    turns: Mapping[str, Any]
    readers: Mapping[int, Callable[[Any], Any]]
    """Conversions of what the driver returns, by column: those of sqlq's own types."""

    def read(self, rows: RawRows) -> RawRows:
        """Return rows with their values as SQLAlchemy returns them."""
        read = [list(row) for row in rows]
        for row in read:
            for position, reader in self.readers.items():
                row[position] = reader(row[position])
        return read

    def filled(self, parameters: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the statement and its parameters, by name or in order, whichever the driver takes."""
        state = self.compiled.construct_expanded_state(parameters)
        values = dict(state.parameters)
        for name, turn in {**self.turns, **state.processors}.items():
            values[name] = turn(values[name])
        order = state.positiontup
        return state.statement, values if order is None else tuple(values[name] for name in order)


@lru_cache(500)
def _compiled(statement: Any, dialect: Any, schema: str | None, keys: tuple[str, ...]) -> _Written:
    compiled = compiled_for(statement, dialect, schema, keys)
    turns = {
        name: turn
        for bound, name in compiled.bind_names.items()
        if not bound.expanding and (turn := bound.type.dialect_impl(dialect).bind_processor(dialect))
    }
    readers = {
        position: partial(column.type.process_result_value, dialect=dialect)
        for position, column in enumerate(getattr(statement, "exported_columns", ()))
        if isinstance(column.type, TypeDecorator)
    }
    return _Written(compiled, turns, readers)


def _result(answer: Answer) -> Result[Any]:
    return IteratorResult(SimpleResultMetaData(answer.names), iter([tuple(row) for row in answer.rows]))


def answer(description: Any, rows: Any) -> Answer:
    """Return rows with texts as str, even if the caller's driver returns bytes."""
    if description is None:
        return NOTHING
    texts = [tuple(each.decode() if isinstance(each, bytes) else each for each in row) for row in rows]
    return Answer([column[0] for column in description], texts)
