"""Callbacks for the commit and the rollback of a caller's transaction.

A Connection reports the rollback of a savepoint and of all. A Session reports its commit by its own events.
After its transaction has ended, its connection is back in the pool and it can be used again. A Session may be
on another fixture's Connection, as in tests that roll all back in the end. Its commit counts when it reports
it. A Connection reports only that it is about to commit. The dialect's `do_commit` shows the end of the
COMMIT itself.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, ExceptionContext, event

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session

T = TypeVar("T")
Tell = Callable[[list[T]], None]


Call: TypeAlias = Callable[[], object]


class _Callbacks(NamedTuple):
    """The calls for a commit and for a rollback, with the number of savepoints before them."""

    savepoints: int
    committed: Call
    undone: Call


def _nothing() -> None:
    pass


@dataclass
class _Open:
    """The callbacks for the commit and the rollback of an open transaction."""

    waiting: list[_Callbacks] = field(default_factory=list)
    committing: list[_Callbacks] = field(default_factory=list)
    """Those of the last transaction whose COMMIT was sent."""

    def undo_from(self, place: int) -> None:
        undone, self.waiting[place:] = self.waiting[place:], []
        for each in undone:
            each.undone()


_adding = threading.Lock()
"""Held while an engine is added."""
_listening: weakref.WeakSet[Engine] = weakref.WeakSet()
_open: weakref.WeakKeyDictionary[Connection, _Open] = weakref.WeakKeyDictionary()
"""The open transactions of callers that have callbacks."""


def at_the_end_of(conn: Connection, *, committed: Call = _nothing, undone: Call = _nothing) -> None:
    """Call `committed` when the transaction of a connection commits, and `undone` when it, or its present
    savepoint, is rolled back. Neither may refer to the connection."""
    if (opened := _open.get(conn)) is None:
        _open[conn] = opened = _Open()
        # guard: a-connection-that-is-dropped-is-rolled-back
        weakref.finalize(conn, opened.undo_from, 0).atexit = False
    opened.committing = []  # the COMMIT before has passed
    # SQLAlchemy has no public number of savepoints, and its event of a new one has no name yet. Where a
    # release renames this one, the call raises at once.
    savepoints = getattr(conn, "_Connection__savepoint_seq")  # noqa: B009 - by its name, which Python mangles
    opened.waiting.append(_Callbacks(savepoints, committed, undone))
    with _adding:
        if conn.engine not in _listening:
            _listening.add(conn.engine)
            for name, listener in _LISTENERS.items():
                event.listen(conn.engine, name, listener)


def _commits(conn: Connection, *args: Any) -> None:
    opened = _open.get(conn, _Open())
    opened.waiting, opened.committing = [], opened.waiting
    for each in opened.committing:
        each.committed()


def _fails(context: ExceptionContext) -> None:
    """Undo what a COMMIT has failed to write. SQLAlchemy reports no rollback then."""
    # a statement that fails follows a COMMIT that has passed
    if context.connection is not None and context.statement is None:
        opened = _open.get(context.connection, _Open())
        failed, opened.committing = opened.committing, []
        for each in failed:
            each.undone()  # guard: a-failed-commit-is-a-rollback


def _commit_has_passed(conn: Connection, *args: Any) -> None:
    _open.get(conn, _Open()).committing = []


def _rolls_back(conn: Connection, *args: Any) -> None:
    _commit_has_passed(conn)
    _open.get(conn, _Open()).undo_from(0)  # guard: no-word-of-what-is-rolled-back


def _rolls_back_to(conn: Connection, name: str, *args: Any) -> None:
    opened = _open.get(conn, _Open())
    outside = int(name.rpartition("_")[2])
    place = bisect_left(opened.waiting, outside, key=itemgetter(0))
    opened.undo_from(place)  # guard: no-word-of-savepoints-undone


_LISTENERS: Mapping[str, Callable[..., None]] = {
    "commit": _commits,
    "commit_twophase": _commits,
    "rollback": _rolls_back,
    "rollback_twophase": _rolls_back,
    "rollback_savepoint": _rolls_back_to,
    "handle_error": _fails,
    "prepare_twophase": _commit_has_passed,
}


class Commits(Generic[T]):
    """Keeps items until their transaction has committed, or they have been rolled back, and reports which.
    Close it after use."""

    def __init__(self, committed: Tell[T], undone: Tell[T]) -> None:
        self._committed = committed
        self._undone = undone
        self._sessions: weakref.WeakKeyDictionary[Session, _OfSession[T]] = weakref.WeakKeyDictionary()
        self._sent: _Sent[T] = _Sent()
        self._lock = threading.Lock()
        """Held while an owner is added."""
        self._changed: list[tuple[Any, str, Any]] = []
        """The changed dialects: each with the method's name, and the dialect's own attribute before, if
        any."""

    def add(self, owner: Session | Connection, conn: Connection, item: T) -> None:
        """Keep an item until the transaction that a Session or Connection is in has ended. `conn` is the
        connection of both."""
        if isinstance(owner, Connection):
            self._wait_for(conn.engine.dialect)
            send, undo = partial(self._send, item), partial(self._undone, [item])
            at_the_end_of(conn, committed=send, undone=undo)
            return
        with self._lock:
            if owner not in self._sessions:
                self._sessions[owner] = _OfSession(owner, self._committed, self._undone)
        session = self._sessions[owner]
        session.items.append(item)
        at_the_end_of(conn, undone=partial(session.undo, item))  # guard: savepoints-take-their-jobs-along

    def _send(self, item: T) -> None:
        self._sent.items = [*self._sent.items, item]

    def _wait_for(self, dialect: Any) -> None:
        """Have a dialect report the end of each COMMIT, which this thread sends next."""
        with self._lock:
            if all(changed is not dialect for changed, _, _ in self._changed):
                for name in ("do_commit", "do_commit_twophase"):
                    self._changed.append((dialect, name, vars(dialect).get(name)))
                    setattr(dialect, name, partial(self._commit, getattr(dialect, name)))

    def _commit(self, commit: Callable[..., None], *args: Any, **options: Any) -> None:
        items, self._sent.items = [*self._sent.items], []
        commit(*args, **options)
        if items:
            self._committed(items)

    def close(self) -> None:
        """Forget the waiting items, and remove all event listeners."""
        for owner, session in list(self._sessions.items()):
            for name in session.events:
                event.remove(owner, name, getattr(session, name))
        for dialect, name, before in self._changed:
            if before is None:
                delattr(dialect, name)
            else:
                setattr(dialect, name, before)


class _Sent(threading.local, Generic[T]):
    """The items whose COMMIT this thread is about to send."""

    items: Sequence[T] = ()


class _OfSession(Generic[T]):
    """The items that wait for the transaction of a Session; it has a method for each of its events."""

    events = ("after_commit", "after_transaction_end")

    def __init__(self, owner: Session, committed: Tell[T], undone: Tell[T]) -> None:
        self._tell_committed = committed
        self._tell_undone = undone
        self.items: list[T] = []
        self._is_committed = False
        for name in self.events:
            event.listen(owner, name, getattr(self, name))

    def undo(self, item: T) -> None:
        """Report that an item was rolled back, as with the savepoint in which it was added."""
        if item in self.items:
            self.items.remove(item)
            self._tell_undone([item])

    def after_commit(self, session: Session) -> None:
        self._is_committed = session.get_nested_transaction() is None

    def after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:  # else it is a savepoint, or part of a flush
            tell = self._tell_committed if self._is_committed else self._tell_undone
            ended, self.items, self._is_committed = self.items, [], False
            tell(ended)


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
