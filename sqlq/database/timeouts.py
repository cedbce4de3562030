"""A timeout for every wait: no thread waits for an answer of a server longer than its timeout.

TCP alone cannot promise that. Keepalives and `tcp_user_timeout` find a host that is gone. But a proxy or
firewall may go on acknowledging packets and pass none on; then a connection looks healthy for ever. A
`statement_timeout` does not help either: the server may never have received the statement, or have answered
it long ago.

So the wait itself has a timeout, in steps of a tenth of a second. Between two steps, in the waiting thread,
the bound checks the clock, and closes the connection when the time is over. It interrupts nothing, and no
other thread touches the connection. The outcome of the statement is as open as after any broken connection.
The server rolls back an uncommitted transaction, and a COMMIT without its reply is in doubt.
"""

from __future__ import annotations

import io
import select
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar, cast

from sqlalchemy.exc import OperationalError

from sqlq.config.constants import ANSWER_SECONDS

T = TypeVar("T")

TURN_SECONDS = 0.1
CALM_SECONDS = 60.0
"""After this long without a timeout, the next wait begins with the shortest timeout again."""


@dataclass(frozen=True, slots=True)
class Use:
    """A profile of connections: their timeouts and other options."""

    answer_seconds: float
    max_answer_seconds: float
    connect_seconds: int
    pre_ping: bool = False
    """Whether to check a pooled connection before each use. Loops do without, since they retry anyway."""
    plan_once: bool = False
    """Whether prepared statements are planned once, and by indexes alone."""
    read_ms: int | None = None
    """The timeout of a statement that only reads."""
    pool_size: int = 5
    """The number of idle connections from a URL that stay open."""


ANY = Use(ANSWER_SECONDS, ANSWER_SECONDS, connect_seconds=10, pre_ping=True)
LOOPS = Use(4.0, 64.0, connect_seconds=3)
"""For a worker's loops, which try again. With the waits between tries they go on within five seconds after a
network that swallowed packets works again."""
SUPERVISOR = replace(LOOPS, pool_size=1)
CLAIMS = replace(LOOPS, plan_once=True)
LOOKS = Use(5.0, 5.0, connect_seconds=3, pre_ping=True, read_ms=2_000)
"""For pages that people look at."""
LISTENING = Use(5.0, 5.0, connect_seconds=3, plan_once=True)


class AnswerTimeout:
    """The timeout of a thread for one answer, inside a `with` block; outside it waits without end.

    It doubles after each timeout, so that a slow database is not cut off for ever. Each thread has its own,
    since each loop has its own statements. When connecting fails too, the network is the cause, and the
    timeout starts over.
    """

    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self._min_seconds, self.max_seconds = min_seconds, max_seconds
        self._thread = threading.local()

    def __enter__(self) -> None:
        self._thread.depth = getattr(self._thread, "depth", 0) + 1

    def __exit__(self, *exc: object) -> None:
        self._thread.depth -= 1

    def seconds(self) -> float:
        """Return the timeout for an answer that the thread begins to wait for now."""
        if not getattr(self._thread, "depth", 0):
            return inf
        if time.monotonic() - getattr(self._thread, "gave_up_at", -inf) > CALM_SECONDS:
            self._thread.now = self._min_seconds
        return cast("float", self._thread.now)

    def gave_up(self) -> None:
        """Double the timeout, after a wait of this thread has timed out."""
        self._thread.now = min(self.seconds() * 2, self.max_seconds)
        self._thread.gave_up_at = time.monotonic()

    def start_over(self) -> None:
        """Start over with the shortest timeout, since this thread could not even connect."""
        self._thread.gave_up_at = -inf


class Answers(threading.local):
    """Counts the answers of databases to this thread, so that a thread without queries does not conclude that
    its database answers."""

    times = 0
    """The number of sqlq's own transactions that succeeded."""
    writing = 0
    """The number of them that may have written."""

    def answered(self, *, reads: bool = False) -> None:
        self.times += 1
        self.writing += not reads


answers = Answers()


_ends = threading.local()


@contextmanager
def waits_while(left: Callable[[], float]) -> Iterator[None]:
    """In this block, stop waiting for an answer in this thread when `left` returns no seconds."""
    _ends.left = left
    try:
        yield
    finally:
        del _ends.left


def is_over() -> bool:
    """Whether this thread may wait no longer."""
    return hasattr(_ends, "left") and _ends.left() <= 0


@contextmanager
def turn(lock: threading.RLock) -> Iterator[None]:
    """Hold the lock of this process for the writers of one file during the block."""
    # each writer before may wait for the file's lock for as long as SQLite does
    while not lock.acquire(timeout=TURN_SECONDS):
        if is_over():  # guard: stop-ends-the-wait-for-the-file
            locked = sqlite3.OperationalError("database is locked")
            locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("BEGIN IMMEDIATE", None, locked)
    try:
        yield
    finally:
        lock.release()


FORK_SECONDS = 10.0
"""How long a fork waits for transactions of other threads. SQLite waits as long for a lock."""


class Gate:
    """Lets threads use SQLite files, or one thread fork. No file is open at the fork, see `sqlite.driver`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: Counter[int] = Counter()
        """The threads inside, and within how many blocks each of them is."""
        self._forks = False

    def enter(self) -> None:
        """Wait for the end of a fork, unless the thread is inside already: the fork waits for that."""
        thread = threading.get_ident()
        with self._changed:
            while self._forks and not self._users[thread]:  # guard: users-let-a-fork-through
                self._changed.wait()
            self._users[thread] += 1

    def leave(self) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._users[thread] -= 1
            if not self._users[thread]:
                del self._users[thread]
                self._changed.notify_all()

    def begin_fork(self) -> None:
        """Wait until no other thread is inside, and hold the lock."""
        self._changed.acquire()
        self._forks = True
        this = {threading.get_ident()}
        # guard: fork-waits-for-transactions
        self._changed.wait_for(lambda: self._users.keys() <= this, FORK_SECONDS)

    def end_fork(self) -> None:
        """Let the threads in again, in the parent or, where this thread is the only one, in the child."""
        self._forks = False
        self._changed.notify_all()
        self._changed.release()


gate = Gate()


class FileUse(AnswerTimeout):
    """The block in which a thread uses a file."""

    def __enter__(self) -> None:
        gate.enter()
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        gate.leave()


def bound(driver: Any, timeout: AnswerTimeout) -> None:
    """Bound all waits of a connection of psycopg or PyMySQL. Another driver's connection keeps only TCP's own
    timeouts."""
    if hasattr(driver, "_rfile"):
        driver._rfile = io.BufferedReader(_Bounded(driver._sock, timeout))  # noqa: SLF001 - no other way in
        driver._read_timeout = driver._write_timeout = timeout.max_seconds  # noqa: SLF001 - as above
    if not callable(getattr(driver, "wait", None)):
        return
    wait = driver.wait

    def wait_bounded(steps: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        return cast("T", wait(_bounded_steps(timeout, steps, driver), *args, **options))

    driver.wait = wait_bounded


class _Bounded(io.RawIOBase):
    """Reads the socket of a PyMySQL connection, which has no step between two turns of a wait."""

    def __init__(self, sock: Any, timeout: AnswerTimeout) -> None:
        self._sock, self._timeout = sock, timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._timeout.seconds()
        until = time.monotonic() + seconds
        looker = select.poll()
        looker.register(self._sock.fileno(), select.POLLIN)
        has_some = getattr(self._sock, "pending", None)  # with TLS
        while not (has_some and has_some()) and not looker.poll(TURN_SECONDS * 1000):
            # guard: every-wait-of-pymysql-has-an-end
            if time.monotonic() >= until or is_over():
                self._timeout.gave_up()
                raise TimeoutError(f"no answer within {seconds:g} s")
        return int(self._sock.recv_into(buffer))


def _bounded_steps(
    timeout: AnswerTimeout, steps: Generator[Any, Any, T], driver: Any
) -> Generator[Any, Any, T]:
    """Pass on the steps of a wait: the event that psycopg waits for, and the one that came (none, every tenth
    of a second)."""
    seconds = timeout.seconds()
    until = time.monotonic() + seconds
    try:
        event = next(steps)
        while True:
            ready = yield event
            event = steps.send(ready)
            # guard: stop-ends-the-wait-for-an-answer
            if time.monotonic() >= until or (not ready and is_over()):
                break
    except StopIteration as end:
        return cast("T", end.value)
    from psycopg import OperationalError

    timeout.gave_up()
    steps.close()
    driver.close()
    raise OperationalError(f"no answer within {seconds:g} s")
