"""A caller's connection as its driver has it: what each driver's class in this folder does."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import URL
from sqlalchemy.util import await_only

from sqlq.database.values import RawRows

T = TypeVar("T")


class Answer(NamedTuple):
    """The rows of a statement, and the names of their columns; both empty for one that returns none."""

    names: Sequence[str]
    rows: RawRows


NOTHING = Answer((), ())


class Server(NamedTuple):
    """The facts about a database that a statement for it depends on."""

    url: URL
    version: tuple[int, ...]
    default_schema: str | None


class DriverConnection:
    """A caller's connection, as its driver has it."""

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

    @property
    def errors(self) -> Any:
        """The exception class, or classes, of the driver."""
        return sys.modules[self.module].Error

    def run(self, statement: str, parameters: Any) -> Answer:
        """Run a statement, written as the driver takes it, and return all of its rows as tuples."""
        raise NotImplementedError

    def say(self, command: str) -> None:
        """Run a command, which returns no rows."""
        self.run(command, ())

    def identity(self) -> Hashable | None:
        """Return a key of the database and the caller's rights in it, without a query; None where there is no
        such key."""
        raise NotImplementedError

    def look(self) -> Server:
        """Query the database for these facts, in statements that cannot fail."""
        raise NotImplementedError

    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        raise NotImplementedError

    def has_begun(self) -> bool:
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


def wait(awaitable: Awaitable[T]) -> T:
    return await_only(awaitable)


def answer(description: Any, rows: RawRows) -> Answer:
    return Answer([column[0] for column in description], rows)


def texts(description: Any, rows: Any) -> Answer:
    """Return rows with texts as str, even if the caller's driver returns bytes."""
    if description is None:
        return NOTHING
    return answer(
        description,
        [tuple(each.decode() if isinstance(each, bytes) else each for each in row) for row in rows],
    )
