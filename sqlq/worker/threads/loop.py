"""Threads of a worker. Each takes turns, when they are due or when it is woken.

While the database is away they wait with jitter, and log it now and then instead of each time."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy.exc import DBAPIError

from sqlq.config.durations import readable
from sqlq.database.database import Database
from sqlq.database.dialects import missing_grant, problems_of, refusal
from sqlq.errors import MissingFileError, SchemaVersionError, SqlqError
from sqlq.worker.threads.log import log

AWAY = (DBAPIError, MissingFileError)  # guard: a-file-that-is-gone-is-an-outage
"""The loops of a worker wait these out: the database does not answer, or its file was moved."""

MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.1, 1.5
"""The longest wait, and a connection attempt that is given up, leave a worker back at work within five
seconds."""
LOG_EVERY_SECONDS = 60.0
OFTEN = 3
"""After this number of failures in a row, by no outage, a loop does not try the same again."""
ODD_SECONDS = 1.0
TAKES_NO_WRITES = "takes no writes"


class _SharedOutage:
    """The state that all loops of this process share that use the same database."""

    since: float | None = None
    number = 0
    """How many outages are over."""
    fault: str | None = None

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.logged_at: dict[str, float] = {}
        """When each kind of trouble was last logged."""


_outages: WeakValueDictionary[Any, _SharedOutage] = WeakValueDictionary()
"""By the place of the database, as long as a loop uses it."""


def begins(thread: threading.Thread) -> bool:
    """Start a thread and return whether it has begun. The system may have none left; the caller makes another
    one the next time."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:  # guard: without-a-thread-the-rest-goes-on
        log.debug("the thread %s cannot be started now: %s", thread.name, error)
        return False
    return True


@contextmanager
def passing_over(text: str) -> Iterator[None]:
    """Log an error of the block, after which the worker goes on. The loops log those of the database, so here
    they are for debugging. Any other is a mistake, and needs its traceback."""
    try:
        yield
    except Exception as error:
        is_away = isinstance(error, AWAY)  # guard: a-mistake-is-no-outage
        log.log(logging.DEBUG if is_away else logging.ERROR, "%s: %s", text, error, exc_info=not is_away)


class Outage:
    """The trouble that one loop of a worker has with its database. All loops meet the same outage at the same
    time, so they log it once together."""

    _failures = _odd = _outage_number = 0

    def __init__(
        self, activity: str, database: Database | None = None, *, quiet: bool = False, is_vital: bool = False
    ) -> None:
        """With `quiet` this loop does not log an outage, since other loops meet and log the same one. It logs
        refusals of the database, which it meets alone. Without a loop that `is_vital` no worker goes on."""
        url = database and database.engine.url
        key = url and (url.host, url.port, url.database, str(url.query))
        # guard: each-database-has-its-own-outages
        self._shared = _outages.setdefault(key, _SharedOutage())
        self._activity = activity
        self._quiet = quiet
        self._is_vital = is_vital

    def note(self, error: BaseException) -> float:
        """Note a failure; return how many seconds to wait before trying again.

        After a broken connection the first other try follows soon, and nothing is logged. Pooled
        connections break now and then: a ping before each use would cost each claim and settle a round trip.
        The same holds after an outage: a loop may still have a connection from that time, to a standby for
        example."""
        with self._shared.lock:
            if self._outage_number != self._shared.number:  # guard: outage-is-logged-once
                self._failures, self._outage_number = 0, self._shared.number
        self._failures += 1
        # without the attribute it is a driver's own error: LISTEN's connection broke
        is_broken = getattr(error, "connection_invalidated", True)
        if self._failures == 1 and (is_broken or any(problem.rolled_back for problem in problems_of(error))):
            return MIN_WAIT_SECONDS * random.uniform(0.0, 1.0)
        with self._shared.lock:
            if any(problem.refused for problem in problems_of(error)):
                if self._may_log(self._activity):  # guard: refusals-are-logged
                    grant = missing_grant(error, kind="worker")
                    log.error(
                        "the database refuses what %s needs: %s%s; trying again once it is mended",
                        self._activity,
                        refusal(error),
                        f"; {grant}" if grant else "",
                        event="database_refuses",
                    )
            elif not self._quiet:
                self._shared.since = self._shared.since or monotonic()
                takes_no_writes = any(problem.takes_no_writes for problem in problems_of(error))
                kind = TAKES_NO_WRITES if takes_no_writes else "does not answer"
                kind = "does not have its tables" if isinstance(error, SchemaVersionError) else kind
                if self._may_log(kind):
                    log.warning(
                        "the database %s (while %s: %s); trying again until it does",
                        kind,
                        self._activity,
                        refusal(error),
                        event="database_away",
                    )
        seconds = min(MAX_WAIT_SECONDS, MIN_WAIT_SECONDS * float(2 ** min(self._failures - 1, 10)))
        return seconds * random.uniform(0.5, 1.0)

    def wait_after(self, error: Exception, away: tuple[type[Exception], ...] = AWAY) -> float:
        """Note any error; return how many seconds to wait before trying again."""
        if isinstance(error, away):  # guard: poller-errors-are-logged
            return self.note(error)
        self._odd += not isinstance(error, SqlqError)
        with self._shared.lock:
            if self._may_log(f"{self._activity}: {type(error).__name__}"):
                log.error("%s failed; trying again", self._activity, exc_info=error)
        if self._is_vital and self._odd >= OFTEN:  # guard: a-fault-ends-the-worker
            self.give_up(error)
        return ODD_SECONDS

    def give_up(self, error: Exception) -> None:
        """Have the workers of this process end: they cannot go on, by no fault of the database."""
        self._shared.fault = (
            f"{self._activity} fails again and again, by no fault of the database: "
            f"{type(error).__name__}: {error}"
        )

    def fault(self) -> str | None:
        """Take the reason why the workers of this process cannot go on."""
        fault, self._shared.fault = self._shared.fault, None
        return fault

    def _may_log(self, kind: str) -> bool:
        """Whether it was last logged long ago. Notes that it is logged now."""
        now = monotonic()
        if now - self._shared.logged_at.get(kind, -LOG_EVERY_SECONDS) < LOG_EVERY_SECONDS:
            return False
        self._shared.logged_at[kind] = now
        return True

    def over(self, *, wrote: bool = True) -> None:
        """Note that the database answered. If it was not `wrote` to, it may be a standby, or its disk
        full."""
        self._odd = 0
        if self._failures == 0:
            return
        with self._shared.lock:
            if not wrote and TAKES_NO_WRITES in self._shared.logged_at:  # guard: standby-is-an-outage
                return
            self._failures = 0
            if self._shared.since is not None:
                away_ms = (monotonic() - self._shared.since) * 1000
                self._shared.since = None
                self._shared.number += 1
                self._shared.logged_at.clear()
                log.warning("the database is back after %s", readable(away_ms), event="database_back")


STOP_SECONDS = 5.0
IDLE_SECONDS = 3600.0
"""The wait of a loop that has nothing to do until it is woken."""


class Loop:
    """A part of a worker with a thread, which begins when it is needed. An exception of a turn is logged, and
    never ends the thread."""

    _away: tuple[type[Exception], ...] = AWAY
    """The errors of a database that does not answer."""
    first_wait = 0.0
    """In how many seconds the first turn is due."""

    _thread: threading.Thread | None = None
    _finishing = False

    def __init__(self, name: str, outage: Outage) -> None:
        self._name = name
        self._outage = outage
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin the thread now. Raises `RuntimeError` where it cannot start."""
        if not self.begin():
            raise RuntimeError(f"the thread {self._name} cannot be started")

    def begin(self) -> bool:
        """Begin the thread, unless it has begun. Return False where it cannot start now; the next call tries
        again."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                if not begins(thread):
                    return False
                self._thread = thread
            return True

    def wake(self) -> None:
        """Have the next turn begin now; any thread may call this."""
        self._woken.set()

    def finish(self, time_left: Callable[[], float]) -> bool:
        """Let the thread do what is left, and end. Return whether it has, before `time_left` returned 0
        seconds."""
        self._finishing = True
        self.wake()
        thread = self._thread
        while thread is not None and thread.is_alive() and (seconds := time_left()) > 0:
            thread.join(min(seconds, 0.1))
        return thread is None or not thread.is_alive()

    def end(self) -> None:
        """Begin no other turn."""
        self._closed.set()
        self.wake()

    def close(self, seconds: float = STOP_SECONDS) -> None:
        """End the thread, whatever is left, and wait for its last turn, at most that time."""
        self.end()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        wait = self.first_wait
        while not self._is_over():
            self._woken.wait(wait)
            self._woken.clear()
            if self._is_over():
                return
            try:
                wait = self._turn()
            except Exception as error:
                wait = self._failed(error)

    def _is_over(self) -> bool:
        return self._closed.is_set() or (self._finishing and self.is_idle)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do before the end."""
        return True

    def _turn(self) -> float:
        """Do what is to be done now; return in how many seconds the next turn is due."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> float:
        """Note that a turn has failed; return in how many seconds to try again."""
        return self._outage.wait_after(error, self._away)
