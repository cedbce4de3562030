"""What is to be done when a caller's transaction on a Connection of SQLAlchemy ends, as its events tell."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, event


class Waits(Protocol):
    """What waits for the end of a transaction, or of a savepoint in it."""

    def committed(self) -> None: ...
    def undone(self) -> None: ...


@dataclass
class _Open:
    """What waits for a transaction that is open, and how much there was when each of its open savepoints was
    set; without those set before the first."""

    waiting: list[Waits] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)

    def undo_from(self, place: int) -> None:
        undone, self.waiting[place:] = self.waiting[place:], []
        for each in undone:
            each.undone()


class Transactions:
    """The transactions that something waits for."""

    def __init__(self) -> None:
        self._listening: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._open: weakref.WeakKeyDictionary[Connection, _Open] = weakref.WeakKeyDictionary()

    def add(self, conn: Connection, waits: Waits) -> None:
        """Have this told when the transaction of a connection, or the savepoint in which it is now, ends."""
        if (opened := self._open.get(conn)) is None:
            self._open[conn] = opened = _Open()
            # one that is dropped, and not closed, is rolled back by its pool, which tells nobody
            weakref.finalize(conn, opened.undo_from, 0).atexit = False
        opened.waiting.append(waits)
        if conn.engine not in self._listening:
            self._listening.add(conn.engine)
            for name in ("commit", "commit_twophase"):
                event.listen(conn.engine, name, self._commits)
            for name in ("rollback", "rollback_twophase"):
                event.listen(conn.engine, name, self._rolls_back)
            event.listen(conn.engine, "savepoint", self._saves)
            event.listen(conn.engine, "release_savepoint", self._releases)
            event.listen(conn.engine, "rollback_savepoint", self._rolls_back_to)

    def waiting(self, conn: Connection) -> list[Waits]:
        """Return what waits for the transaction of a connection."""
        opened = self._open.get(conn)
        return [] if opened is None else opened.waiting

    def _commits(self, conn: Connection, *args: Any) -> None:
        if (opened := self._open.get(conn)) is not None:
            waiting, opened.waiting, opened.savepoints = opened.waiting, [], []
            for each in waiting:
                each.committed()

    def _rolls_back(self, conn: Connection, *args: Any) -> None:
        if (opened := self._open.get(conn)) is not None:
            opened.savepoints.clear()
            opened.undo_from(0)  # guard: no-word-of-what-is-rolled-back

    # Savepoints have no names yet when SQLAlchemy tells of them; the newest ends first.

    def _saves(self, conn: Connection, *args: Any) -> None:
        if (opened := self._open.get(conn)) is not None:
            opened.savepoints.append(len(opened.waiting))

    def _releases(self, conn: Connection, *args: Any) -> int:
        opened = self._open.get(conn)
        return opened.savepoints.pop() if opened is not None and opened.savepoints else 0

    def _rolls_back_to(self, conn: Connection, *args: Any) -> None:
        before = self._releases(conn)
        if (opened := self._open.get(conn)) is not None:
            opened.undo_from(before)  # guard: no-word-of-savepoints-undone
