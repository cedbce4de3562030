"""Callbacks for the commit and the rollback of a caller's transaction.

A Session reports both by its own events. After its transaction has ended, its connection is back in the pool
and it can be used again. A Session may be on another fixture's Connection, as in tests that roll all back in
the end. Its commit counts when it reports it. A Connection reports only that it is about to commit. The
dialect's `do_commit` shows the end of the COMMIT itself.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, ExceptionContext, event

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session

T = TypeVar("T")
Tell = Callable[[list[T]], None]


Call: TypeAlias = Callable[[], object]


def _nothing() -> None:
    pass


@dataclass
class _Open:
    """The callbacks for the commit and the rollback of an open transaction."""

    waiting: list[tuple[int, Call, Call]] = field(default_factory=list)
    """Each with the number of savepoints before it."""
    committing: list[tuple[int, Call, Call]] = field(default_factory=list)
    """Those of the last transaction whose COMMIT was sent."""

    def undo_from(self, place: int) -> None:
        undone, self.waiting[place:] = self.waiting[place:], []
        for _, _, undo in undone:
            undo()


def _savepoints_of(conn: Connection) -> int:
    # SQLAlchemy numbers a connection's savepoints, and its event of a new one has no name yet
    return int(getattr(conn, "_Connection__savepoint_seq"))  # noqa: B009


def _since(numbers: list[int], name: str) -> int:
    """Return the place of the first of these that is inside a savepoint, perhaps in an inner one."""
    return bisect_left(numbers, int(name.rpartition("_")[2]))


class _Transactions:
    """The open transactions of callers that have callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while an engine is added."""
        self._listening: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._open: weakref.WeakKeyDictionary[Connection, _Open] = weakref.WeakKeyDictionary()

    def add(self, conn: Connection, committed: Call, undone: Call) -> None:
        if (opened := self._open.get(conn)) is None:
            self._open[conn] = opened = _Open()
            # guard: a-connection-that-is-dropped-is-rolled-back
            weakref.finalize(conn, opened.undo_from, 0).atexit = False
        opened.committing = []  # the COMMIT before has passed
        opened.waiting.append((_savepoints_of(conn), committed, undone))
        with self._lock:
            if conn.engine in self._listening:
                return
            self._listening.add(conn.engine)
            for name in ("commit", "commit_twophase"):
                event.listen(conn.engine, name, self._commits)
            for name in ("rollback", "rollback_twophase"):
                event.listen(conn.engine, name, self._rolls_back)
            event.listen(conn.engine, "rollback_savepoint", self._rolls_back_to)
            event.listen(conn.engine, "handle_error", self._fails)
            event.listen(conn.engine, "prepare_twophase", self._commit_has_passed)

    def _commits(self, conn: Connection, *args: Any) -> None:
        opened = self._open.get(conn, _Open())
        opened.waiting, opened.committing = [], opened.waiting
        for _, commit, _ in opened.committing:
            commit()

    def _fails(self, context: ExceptionContext) -> None:
        """Undo what a COMMIT has failed to write. SQLAlchemy reports no rollback then."""
        # a statement that fails follows a COMMIT that has passed
        if context.connection is not None and context.statement is None:
            opened = self._open.get(context.connection, _Open())
            failed, opened.committing = opened.committing, []
            for _, _, undo in failed:
                undo()  # guard: a-failed-commit-is-a-rollback

    def _commit_has_passed(self, conn: Connection, *args: Any) -> None:
        self._open.get(conn, _Open()).committing = []

    def _rolls_back(self, conn: Connection, *args: Any) -> None:
        self._commit_has_passed(conn)
        self._open.get(conn, _Open()).undo_from(0)  # guard: no-word-of-what-is-rolled-back

    def _rolls_back_to(self, conn: Connection, name: str, *args: Any) -> None:
        opened = self._open.get(conn, _Open())
        # guard: no-word-of-savepoints-undone
        opened.undo_from(_since([number for number, _, _ in opened.waiting], name))


_TRANSACTIONS = _Transactions()


def at_the_end_of(conn: Connection, *, committed: Call = _nothing, undone: Call = _nothing) -> None:
    """Call `committed` when the transaction of a connection commits, and `undone` when it, or its present
    savepoint, is rolled back. Neither may refer to the connection."""
    _TRANSACTIONS.add(conn, committed, undone)


class Commits(Generic[T]):
    """Keeps items until their transaction has committed, or they have been rolled back, and reports which.
    Close it after use."""

    def __init__(self, committed: Tell[T], undone: Tell[T]) -> None:
        self._committed = committed
        self._undone = undone
        self._watched: weakref.WeakKeyDictionary[Any, _Watched[T]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        """Held while this iterates over owners or adds one."""
        self._changed: list[tuple[Any, str, Any]] = []
        """The changed dialects: each with the method's name, and the dialect's own attribute before, if
        any."""

    def add(self, owner: Session | Connection, item: T) -> None:
        """Keep an item until the transaction that a Session or Connection is in has ended."""
        with self._lock:
            if owner not in self._watched:
                self._watched[owner] = self._watch(owner)
            self._watched[owner].add(item, owner)

    def _watch(self, owner: Session | Connection) -> _Watched[T]:
        if not isinstance(owner, Connection):
            return _OfSession(owner, self._committed, self._undone)
        if all(dialect is not owner.dialect for dialect, _, _ in self._changed):
            for name in ("do_commit", "do_commit_twophase"):
                self._wait_for(owner.dialect, name)
        return _OfConnection(owner, self._committed, self._undone)

    def _wait_for(self, dialect: Any, name: str) -> None:
        self._changed.append((dialect, name, vars(dialect).get(name)))
        commit = getattr(dialect, name)

        def do_commit(connection: Any, *args: Any, **options: Any) -> None:
            with self._lock:
                watched = [each for each in self._watched.values() if each.committing is connection]
            for each in watched:
                each.committing = None
            try:
                commit(connection, *args, **options)
            except BaseException:
                for each in watched:  # SQLAlchemy reports no rollback then
                    each.undo_from(0)  # guard: a-commit-that-fails-runs-nothing
                raise
            for each in watched:
                each.commit_all()

        setattr(dialect, name, do_commit)

    def close(self) -> None:
        """Forget the waiting items, and remove all event listeners."""
        for owner, watched in list(self._watched.items()):
            for name in watched.events:
                event.remove(owner, name, getattr(watched, name))
        for dialect, name, before in self._changed:
            if before is None:
                delattr(dialect, name)
            else:
                setattr(dialect, name, before)


class _Watched(Generic[T]):
    """The items that wait for the transaction of one owner; it has a method for each of its events."""

    events: tuple[str, ...]
    committing: Any = None
    """The connection whose COMMIT is about to be sent, as the dialect receives it."""

    def __init__(self, owner: Any, committed: Tell[T], undone: Tell[T]) -> None:
        self._tell_committed = committed
        self._tell_undone = undone
        self.items: list[T] = []
        for name in self.events:
            event.listen(owner, name, getattr(self, name))

    def add(self, item: T, owner: Any) -> None:
        self.items.append(item)

    def commit_all(self) -> None:
        items, self.items = self.items, []
        self._tell_committed(items)

    def undo_from(self, place: int) -> None:
        """Undo the items of a savepoint and of savepoints inside it; from 0 all."""
        undone, self.items[place:] = self.items[place:], []
        self._tell_undone(undone)


class _OfSession(_Watched[T]):
    events = ("after_transaction_create", "after_commit", "after_transaction_end")

    def __init__(self, owner: Session, committed: Tell[T], undone: Tell[T]) -> None:
        self._began_at: weakref.WeakKeyDictionary[SessionTransaction, int] = weakref.WeakKeyDictionary()
        """The number of items at the start of each savepoint; one that is older than all items is missing."""
        self._last_committed: SessionTransaction | None = None
        super().__init__(owner, committed, undone)

    def after_transaction_create(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.nested:
            self._began_at[transaction] = len(self.items)

    def after_commit(self, session: Session) -> None:
        self._last_committed = session.get_nested_transaction() or session.get_transaction()

    def after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        committed, self._last_committed = transaction is self._last_committed, None
        if transaction.nested:
            place = self._began_at.pop(transaction, 0)
            if not committed:  # guard: savepoints-take-their-jobs-along
                self.undo_from(place)
        elif transaction.parent is None:  # else it is part of a flush
            self._began_at.clear()
            if committed:
                self.commit_all()
            else:
                self.undo_from(0)


class _OfConnection(_Watched[T]):
    events = ("rollback_savepoint", "commit", "rollback", "commit_twophase", "rollback_twophase")

    def __init__(self, owner: Connection, committed: Tell[T], undone: Tell[T]) -> None:
        self._numbers: list[int] = []
        """The number of savepoints before each item."""
        super().__init__(owner, committed, undone)

    def add(self, item: T, owner: Connection) -> None:
        self._numbers.append(_savepoints_of(owner))
        super().add(item, owner)

    def rollback_savepoint(self, conn: Connection, name: str, context: Any) -> None:
        place = _since(self._numbers, name)
        del self._numbers[place:]
        self.undo_from(place)

    def commit(self, conn: Connection) -> None:
        self._numbers.clear()
        self.committing = conn.connection

    def commit_twophase(self, conn: Connection, xid: Any, is_prepared: bool) -> None:
        self._numbers.clear()
        self.committing = conn

    def rollback(self, conn: Connection) -> None:
        self._numbers.clear()
        self.committing = None
        self.undo_from(0)

    def rollback_twophase(self, conn: Connection, xid: Any, is_prepared: bool) -> None:
        self.rollback(conn)


@contextmanager
def session_of_its_own(scope: scoped_session[Any] | None) -> Iterator[None]:
    """Give the handler a session of its own in the caller's scoped_session, as it has in a worker's thread.

    The caller's own may still be inside its `with session.begin()`, and keeps its loaded objects.
    """
    if scope is None:
        yield
        return
    callers = scope.registry()
    scope.registry.clear()
    try:
        yield
    finally:
        scope.remove()
        scope.registry.set(callers)
