"""Waiting for jobs to end: one thread, and one connection, for all that a process waits for in a database.

    waiters ──ids──► Waiting ──one statement for all──► tables
       ▲                │ ▲
       └──what is seen──┘ └── "these have ended" (PostgreSQL: a notification, SQLite: data_version)

Only the tables show that a job has ended. A worker knows which jobs somebody waits for, and sends a
notification once it has written the end of one. The notification makes the next look come sooner. Without any
the thread looks at short, growing intervals, and at least once a second.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy.exc import DBAPIError

from sqlq.config.constants import ASK_SECONDS
from sqlq.database.database import Database
from sqlq.database.notifications import Hearing
from sqlq.errors import SqlqError
from sqlq.store.jobs import results
from sqlq.store.jobs.results import Seen

log = logging.getLogger("sqlq")

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.02, 1.0
"""The time between the first two looks at a new job, and the longest between two looks. Each wait is three
times as long as the one before."""
SHORTEST_GLANCE_SECONDS, LONGEST_GLANCE_SECONDS = 0.000_5, 0.002
"""How often SQLite's data_version is looked at, which takes some microseconds: at first, and when nothing
has happened for a while."""
LOOKS_SHARE = 4
"""Where each commit of others causes a look, looks take at most one part in LOOKS_SHARE of the time."""
IDLE_SECONDS = 30.0
"""How long the thread and its connection stay when nobody waits."""
CLOSE_SECONDS = 2.0
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0


class Gone(NamedTuple):
    """The message about a job that is in no table."""

    id: int


Told: TypeAlias = "Seen | Gone | Exception"
"""A message to a waiter: how a job has ended, or why the wait for it is over."""


class Watch:
    """The jobs of one waiter, and the state in which each of them was seen last."""

    def __init__(self, ids: Iterable[int], tell: Callable[[Told], None], *, whole: bool) -> None:
        """`tell` is called in another thread, once for each job that has ended. `whole` is whether the waiter
        wants more than their states."""
        self.waits_for = set(ids)
        self.whole = whole
        self.tell = tell
        self.seen: dict[int, Seen] = {}


class Waiting:
    """Looks for all waiters of a process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hearing = Hearing()
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watches: dict[int, set[Watch]] = {}
        """By the ids of jobs."""
        self._new: set[int] = set()
        self._thread: threading.Thread | None = None
        self._ring: socket.socket | None = None
        self._called = threading.Event()
        self._closing = False
        self.is_away = False
        """Whether the database did not answer the last query."""

    def watch(self, watch: Watch) -> None:
        """Begin to look for the jobs of a watch; returns at once."""
        if self._pid != os.getpid():  # a forked child inherits the object, but no thread
            self._start_anew()
        with self._lock:
            if self._thread is None:  # the lock keeps it from looking before the ids are there
                self._begin()
            else:
                self._call()
            for id in watch.waits_for:
                self._watches.setdefault(id, set()).add(watch)
            self._new |= watch.waits_for

    def stop(self, watch: Watch) -> None:
        """Look no more for the jobs that a watch still waits for."""
        with self._lock:
            for id in watch.waits_for:
                self._drop(id, watch)

    def close(self) -> None:
        """End the thread; the waiters that are left get a `SqlqError`."""
        if self._pid != os.getpid():
            return
        with self._lock:
            thread, self._closing = self._thread, True
            self._call()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _begin(self) -> None:
        """Start the thread. Where none is to be had, the next caller tries again."""
        bell, ring = socket.socketpair()
        bell.settimeout(0)
        ring.settimeout(0)
        self._closing = False
        thread = threading.Thread(target=self._run, args=(bell, ring), name="sqlq-results", daemon=True)
        try:
            thread.start()  # guard: waiters-begin-again
        except RuntimeError:
            bell.close()
            ring.close()
            raise
        self._thread, self._ring = thread, ring

    def _call(self) -> None:
        """Have the thread look up now."""
        self._called.set()
        if self._ring is not None:
            with suppress(OSError):  # it has been called often enough, or has just ended
                self._ring.send(b".")

    def _drop(self, id: int, watch: Watch) -> None:
        watches = self._watches.get(id)
        if watches is not None:
            watches.discard(watch)
            if not watches:
                del self._watches[id]
                self._new.discard(id)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self, bell: socket.socket, ring: socket.socket) -> None:
        pause = SHORTEST_PAUSE_SECONDS
        was_up = False
        while True:
            try:
                if not was_up:
                    self._database.require_tables()
                was_up = True
                with self._source(bell) as source:
                    self.is_away = False
                    pause = SHORTEST_PAUSE_SECONDS
                    self._look_out(source)
            except Exception as error:
                if not (was_up and self._may_mend(error)):  # guard: waiters-hear-of-what-does-not-mend
                    self._fail(error)
                else:
                    self.is_away = True
                    log.debug("waiting for jobs: the database is away: %s", error)
                    bell.settimeout(pause * random.uniform(0.5, 1.0))
                    with suppress(OSError):
                        bell.recv(1)
                    bell.settimeout(0)
                    pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            with self._lock:
                closing = self._closing
                if not self._watches or closing:
                    self._thread = None
                    self._ring = None
                    break
        if closing:
            self._fail(SqlqError("the App was closed while this waited for a job: the job goes on"))
        bell.close()
        ring.close()

    def _may_mend(self, error: Exception) -> bool:
        """Whether waiting is the remedy. The reader of notifications raises the driver's own errors."""
        dialect = self._database.dialect
        if isinstance(error, DBAPIError):
            return (trouble := dialect.trouble(error)).passes or trouble.is_useless
        return isinstance(error, self._database.engine.dialect.loaded_dbapi.Error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            watches = {watch for each in self._watches.values() for watch in each}
            self._watches.clear()
            self._new.clear()
        for watch in watches:
            watch.tell(error)

    @contextmanager
    def _source(self, bell: socket.socket) -> Iterator[_Source]:
        with ExitStack() as open_:
            if self._database.dialect.sees_commits:
                yield _Glances(self._database, bell, self._called, open_)
            else:
                yield _Listens(self._database, bell, self._hearing, open_)

    def _look_out(self, source: _Source) -> None:
        """Look until nobody has waited for a while; raises when the connection breaks or does not answer."""
        with self._lock:
            self._new |= self._watches.keys()
        interval = FIRST_LOOK_SECONDS
        look_at, ask_at = time.monotonic() + interval, time.monotonic() + ASK_SECONDS
        idle_since: float | None = None
        heard: Iterable[int] | None = ()
        while not self._closing:
            with self._lock:
                new, self._new = self._new, set()
                known = list(self._watches)
            moment = time.monotonic()
            if not known:
                idle_since = idle_since or moment
                if moment >= idle_since + IDLE_SECONDS:
                    return
            else:
                idle_since = None
            if known and moment >= ask_at:
                source.refuse_standby()  # guard: waiters-leave-a-demoted-primary
                source.ask(known)  # guard: who-waits-asks-again
                ask_at = moment + ASK_SECONDS
            elif new:
                source.ask(new)  # guard: workers-are-asked
            if new:
                interval = FIRST_LOOK_SECONDS
                look_at = min(look_at, moment + interval)
            if moment >= look_at:  # guard: waiters-are-not-told-alone
                wanted: Iterable[int] = known
                interval = min(interval * 3, LONGEST_LOOK_SECONDS)
                look_at = moment + interval
            else:
                wanted = known if heard is None else {*new, *heard}
            self._look(source, wanted)
            idle_until = moment if idle_since is None else idle_since + IDLE_SECONDS
            until = min(look_at, ask_at) if known else idle_until  # guard: asks-do-not-wait-for-looks
            heard = source.wait(until)

    def _look(self, source: _Source, ids: Iterable[int]) -> None:
        with self._lock:
            wanted = {
                id: any(watch.whole for watch in watches)
                for id in ids
                if (watches := self._watches.get(id)) is not None
            }
        if not wanted:
            return
        found = source.look(wanted)
        if found.keys() != wanted.keys():
            source.refuse_standby()  # guard: a-job-is-missed-by-a-primary-alone
        told: list[tuple[Watch, Told]] = []
        with self._lock:
            for id, is_whole in wanted.items():
                seen = found.get(id)
                for watch in list(self._watches.get(id, ())):
                    if seen is None:
                        self._drop(id, watch)
                        told.append((watch, Gone(id)))
                    elif not seen.is_over:
                        watch.seen[id] = seen
                    elif is_whole or not watch.whole:  # a watch that was added meanwhile may want more
                        self._drop(id, watch)
                        told.append((watch, seen))
        for watch, what in told:
            watch.tell(what)


class _Source:
    """The place where the states of jobs are read."""

    def ask(self, ids: Iterable[int]) -> None:
        """Have workers know for which jobs somebody waits."""

    def refuse_standby(self) -> None:
        """Raise where the server takes no writes any more, since what it shows may be out of date."""

    def look(self, wanted: dict[int, bool]) -> dict[int, Seen]:
        raise NotImplementedError

    def wait(self, until: float) -> Iterable[int] | None:
        """Wait until something may have happened, the bell rings, or the time `until` has come. Return the
        jobs that have ended, as far as is known, or None for any."""
        raise NotImplementedError


def _rang(bell: socket.socket) -> bool:
    """Whether the bell has rung since the last time."""
    rang = False
    with suppress(BlockingIOError):
        while bell.recv(4096):
            rang = True
    return rang


class _Listens(_Source):
    """On a connection that LISTENs, where the way to the database carries that; elsewhere polling alone is
    used."""

    def __init__(self, database: Database, bell: socket.socket, hearing: Hearing, open_: ExitStack) -> None:
        self._bell = bell
        self._hearing = hearing
        self._refuse_standby = database.dialect.refuse_standby
        listening = database.for_listening()
        looking = database.for_looking(listening)
        for opened in {listening, looking} - {database}:
            open_.enter_context(opened)
        open_.enter_context(listening.patience)
        open_.enter_context(looking.patience)
        self._ear = open_.enter_context(listening.connect(isolation_level="AUTOCOMMIT"))
        open_.callback(self._ear.invalidate)  # a listening connection must not return to the pool
        self._eye = self._ear
        if looking is not listening:
            self._eye = open_.enter_context(looking.connect(isolation_level="AUTOCOMMIT"))
        driver: Any = self._ear.connection.driver_connection
        self._has_asked, self._took = False, 0.0
        self._selector = open_.enter_context(selectors.DefaultSelector())
        self._selector.register(bell, selectors.EVENT_READ)
        named = database.address is not None and database.address.listen_url is not None
        self._hears = callable(getattr(driver, "notifies", None)) and (named or _leads_to_one_server(driver))
        if self._hears:
            self._hearing.begin(driver)
            results.listen(self._ear)
            self._selector.register(driver.fileno(), selectors.EVENT_READ)
        looks: Any = self._eye.connection.driver_connection
        # None through a pooler, where the next statement may come to a session that knows of none
        if getattr(looks, "prepare_threshold", None) is not None:
            looks.prepare_threshold = 0  # each look is the same statement, and to plan it takes the longest

    def ask(self, ids: Iterable[int]) -> None:
        if self._hears:
            self._has_asked = True
            results.ask(self._ear, ids)

    def refuse_standby(self) -> None:
        if self._hears:
            self._refuse_standby(self._eye)

    def look(self, wanted: dict[int, bool]) -> dict[int, Seen]:
        self._has_asked = True
        began = time.monotonic()
        found = results.look(self._eye, wanted)
        self._took = time.monotonic() - began
        return found

    def wait(self, until: float) -> Iterable[int] | None:
        # the selector does not see notifications that came together with an answer
        self._selector.select(0.0 if self._has_asked else max(0.0, until - time.monotonic()))
        self._has_asked = False
        _rang(self._bell)
        if not self._hears:
            return ()
        ids = self._hearing.read(all_of_it=True).ids  # else it would come with the answer of the next look
        if ids is None:
            time.sleep(min((LOOKS_SHARE - 1) * self._took, LONGEST_LOOK_SECONDS))
        return ids


class _Glances(_Source):
    """Polls SQLite's data_version, which shows, without reading a page, that something was committed."""

    def __init__(
        self, database: Database, bell: socket.socket, called: threading.Event, open_: ExitStack
    ) -> None:
        self._database = database
        self._bell = bell
        self._called = called
        name = database.engine.url.database or ""
        self._connection = sqlite3.connect(name, isolation_level=None, uri=name.startswith("file:"))
        open_.callback(self._connection.close)
        self._version = self._data_version()
        self._glance = SHORTEST_GLANCE_SECONDS
        self._rests_until = 0.0

    def look(self, wanted: dict[int, bool]) -> dict[int, Seen]:
        began = time.monotonic()
        self._version = self._data_version()  # before the look: a commit meanwhile is then seen anew
        found = results.look_alone(self._database, wanted)
        ended = time.monotonic()
        self._rests_until = ended + (LOOKS_SHARE - 1) * (ended - began)
        return found

    def wait(self, until: float) -> Iterable[int] | None:
        while (left := until - time.monotonic()) > 0:
            rest = max(self._glance, self._rests_until - time.monotonic())
            if self._called.wait(min(rest, left)):  # a selector waits for whole milliseconds
                self._called.clear()
                _rang(self._bell)
                return ()
            if self._data_version() != self._version:
                self._glance = SHORTEST_GLANCE_SECONDS
                return None
            self._glance = min(self._glance * 1.02, LONGEST_GLANCE_SECONDS)
        return ()

    def _data_version(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])


def _leads_to_one_server(driver: Any) -> bool:
    from sqlq.database.postgresql.dialect import leads_to_one_server

    return leads_to_one_server(driver)
