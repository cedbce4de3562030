"""Callbacks for the commit and the rollback of a caller's transaction.

SQLAlchemy reports that a Connection is about to commit, and the rollback of a savepoint or of all. The
dialect's `do_commit` then shows whether the COMMIT has passed. A Session reports its commit by its own
events. After its transaction has ended, its connection is back in the pool and it can be used again. A
Session may be on another fixture's Connection, as in tests that roll all back in the end. Its commit counts
when it reports it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, Engine, event

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session

Call = Callable[[], object]


class _Callbacks(NamedTuple):
    """The calls for a commit and for a rollback, with the number of savepoints before them."""

    savepoints: int
    committed: Call
    rolled_back: Call


def nothing() -> None:
    """Do nothing."""


def _undo_from(waiting: list[_Callbacks], position: int) -> None:
    rolled_back, waiting[position:] = waiting[position:], []
    for each in rolled_back:
        each.rolled_back()


_adding = threading.Lock()
"""Held while an engine or a session is added."""
_listening: weakref.WeakSet[Engine] = weakref.WeakSet()
_open: weakref.WeakKeyDictionary[Connection, list[_Callbacks]] = weakref.WeakKeyDictionary()
"""The callbacks that wait for the end of the open transaction of each caller's connection."""


def at_the_end_of(conn: Connection, *, committed: Call = nothing, rolled_back: Call = nothing) -> None:
    """Call `committed` when the transaction of a connection has committed. Call `rolled_back` when it, or its
    present savepoint, is rolled back, or the COMMIT fails. Neither may refer to the connection. The same
    calls several times in a row count once."""
    if (waiting := _open.get(conn)) is None:
        waiting = _opened(conn)
    # SQLAlchemy has no public number of savepoints, and its event of a new one has no name yet. Where a
    # release renames this one, the call raises at once.
    savepoints = getattr(conn, "_Connection__savepoint_seq")  # noqa: B009 - by its name, which Python mangles
    callbacks = _Callbacks(savepoints, committed, rolled_back)
    if waiting[-1:] != [callbacks]:
        waiting.append(callbacks)


def _opened(conn: Connection) -> list[_Callbacks]:
    """Listen to the engine of a connection that has no callbacks yet."""
    waiting = _open.setdefault(conn, [])
    # guard: a-connection-that-is-dropped-is-rolled-back
    weakref.finalize(conn, _undo_from, waiting, 0).atexit = False
    with _adding:
        if conn.engine not in _listening:
            _listening.add(conn.engine)
            for name, listener in _LISTENERS.items():
                event.listen(conn.engine, name, listener)
        dialect: Any = conn.engine.dialect  # which engines with options of their own share
        for name in ("do_commit", "do_commit_twophase"):
            commit = getattr(dialect, name)
            if getattr(commit, "func", None) is not _commit:
                setattr(dialect, name, partial(_commit, commit))
    return waiting


_sent = threading.local()
"""It has the callbacks of the transaction whose COMMIT this thread is about to send."""


def _commits(conn: Connection, *args: Any) -> None:
    # also where there is none: another listener may have raised before the last COMMIT
    _sent.waiting = _open.get(conn, [])  # guard: a-commit-has-its-own-callbacks


def _commit(commit: Callable[..., None], *args: Any, **options: Any) -> None:
    waiting: list[_Callbacks] = vars(_sent).pop("waiting", [])
    callbacks, waiting[:] = waiting[:], []
    try:
        commit(*args, **options)
    except BaseException:
        for each in callbacks:
            each.rolled_back()  # guard: a-failed-commit-is-a-rollback
        raise
    for each in callbacks:
        each.committed()


def _rolls_back(conn: Connection, *args: Any) -> None:
    _undo_from(_open.get(conn, []), 0)  # guard: rollback-drops-events


def _rolls_back_to(conn: Connection, name: str, *args: Any) -> None:
    waiting, outside = _open.get(conn, []), int(name.rpartition("_")[2])
    # guard: savepoint-rollback-drops-events
    _undo_from(waiting, bisect_left(waiting, outside, key=itemgetter(0)))


_LISTENERS: Mapping[str, Callable[..., None]] = {
    "commit": _commits,
    "commit_twophase": _commits,
    "rollback": _rolls_back,
    "rollback_twophase": _rolls_back,
    "rollback_savepoint": _rolls_back_to,
}


def when_over(session: Any, conn: Connection, committed: Call, rolled_back: Call) -> None:
    """Do as `at_the_end_of`, for calls that use the session again: a Session's transaction has ended then."""
    if session is conn:
        at_the_end_of(conn, committed=committed, rolled_back=rolled_back)
        return
    with _adding:
        if (waiting := _sessions.get(session)) is None:
            _sessions[session] = waiting = _OfSession(session)
    callbacks = _Callbacks(0, committed, rolled_back)
    waiting.callbacks.append(callbacks)
    # guard: savepoints-take-their-jobs-along
    at_the_end_of(conn, rolled_back=partial(waiting.undo, callbacks))


class _OfSession:
    """The callbacks that wait for the end of a Session's transaction."""

    def __init__(self, session: Session) -> None:
        self.callbacks: list[_Callbacks] = []
        self._is_committed = False
        event.listen(session, "after_commit", self._commits)
        event.listen(session, "after_transaction_end", self._ends)

    def undo(self, callbacks: _Callbacks) -> None:
        """Call one back that was rolled back, as with the savepoint in which it was added."""
        if callbacks in self.callbacks:
            self.callbacks.remove(callbacks)
            callbacks.rolled_back()

    def _commits(self, session: Session) -> None:
        self._is_committed = session.get_nested_transaction() is None

    def _ends(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:  # else it is a savepoint, or part of a flush
            is_committed, self._is_committed = self._is_committed, False
            ended, self.callbacks = self.callbacks, []
            for each in ended:
                each.committed() if is_committed else each.rolled_back()


_sessions: weakref.WeakKeyDictionary[Session, _OfSession] = weakref.WeakKeyDictionary()


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
