"""An end for every wait: no answer of PostgreSQL is waited for longer than its patience allows.

TCP alone cannot promise that. Keepalives and `tcp_user_timeout` find a host that is gone, but behind a proxy
or firewall that goes on acknowledging packets and passes none on, a connection looks healthy for ever. A
`statement_timeout` does not help either: the server may never have heard of the statement, or have answered
it long ago.

So the wait itself has the end. psycopg waits in steps of a tenth of a second; the bound looks at the clock
between two steps, in the thread that waits, and closes the connection when the time is over. Nothing is
interrupted and no other thread touches the connection. What the server made of the statement is as open as
after any broken connection: whatever was not committed, it rolls back, and a COMMIT without its reply is in
doubt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

CALM_SECONDS = 60.0
"""After so long without a wait given up, the next one begins with the shortest patience again."""


class Patience:
    """How long a thread waits for one answer while it is in a `with` block of this patience; outside, without
    end.

    Each wait that was given up doubles it, so that a database that is only slow is answered in the end; for
    this thread, since each loop has statements of its own. When connecting fails too it is the network, and
    no reason for patience.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, longest
        self._thread = threading.local()

    def __enter__(self) -> None:
        self._thread.depth = getattr(self._thread, "depth", 0) + 1

    def __exit__(self, *exc: object) -> None:
        self._thread.depth -= 1

    def seconds(self) -> float:
        """Return how long to wait for an answer asked for now."""
        if not getattr(self._thread, "depth", 0):
            return float("inf")
        if time.monotonic() - getattr(self._thread, "gave_up_at", float("-inf")) > CALM_SECONDS:
            self._thread.now = self._shortest
        now: float = self._thread.now
        return now

    def gave_up(self) -> None:
        """Note that a wait of this thread came to its end."""
        self._thread.now = min(self.seconds() * 2, self._longest)
        self._thread.gave_up_at = time.monotonic()

    def start_over(self) -> None:
        """Note that this thread could not even connect."""
        self._thread.gave_up_at = float("-inf")


_ends = threading.local()


@contextmanager
def waits_while(left: Callable[[], float]) -> Iterator[None]:
    """Within this, an answer for which this thread waits is given up when `left` says that no seconds are
    left."""
    _ends.left = left
    try:
        yield
    finally:
        del _ends.left


def is_over() -> bool:
    """Say whether this thread may wait no longer."""
    return hasattr(_ends, "left") and _ends.left() <= 0


def bound(driver: Any, patience: Patience) -> None:
    """Bound all waits of a psycopg connection. Another driver's connection stays as it is, with TCP's own
    ends."""
    if not callable(getattr(driver, "wait", None)):
        return
    wait = driver.wait

    def wait_at_most(steps: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        answer: T = wait(_at_most(patience, steps, driver), *args, **options)
        return answer

    driver.wait = wait_at_most


def _at_most(patience: Patience, steps: Generator[Any, Any, T], driver: Any) -> Generator[Any, Any, T]:
    """Pass on the steps of a wait: what psycopg is to wait for, and what became ready (nothing, every tenth
    of a second)."""
    seconds = patience.seconds()
    until = time.monotonic() + seconds
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            wanted = steps.send(ready)
            # guard: a-stop-ends-the-wait-for-an-answer
            if time.monotonic() >= until or (not ready and is_over()):
                break
    except StopIteration as end:
        answer: T = end.value
        return answer
    from psycopg import OperationalError

    patience.gave_up()
    steps.close()
    driver.close()
    raise OperationalError(f"no answer within {seconds:g} s")
