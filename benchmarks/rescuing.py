"""One worker's service of rescuing, in a process of its own: `python -m benchmarks.rescuing URL`.

Prints when its first look began, how many turns found something, and the longest of its transactions, as
JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

import sqlq
from sqlq.config.constants import LEASE_MS
from sqlq.store.jobs.settle import Rescued
from sqlq.worker.maintain.maintenance import ServiceLoop
from sqlq.worker.maintain.services import Rescue
from sqlq.worker.report.reporter import Reporter

QUIET_SECONDS = 10.0
"""After so long without a job rescued it is over: longer than the rhythm of the service."""


@contextmanager
def _timed(engine: Any) -> Iterator[list[float]]:
    """Yield the seconds that each transaction takes, from its lock to its connection's return."""
    seconds: list[float] = []
    began: list[float] = []

    @event.listens_for(engine, "begin")
    def _begun(conn: Any) -> None:
        began[:] = [time.monotonic()]

    @event.listens_for(engine, "checkin")
    def _returned(*_: Any) -> None:
        if began:
            seconds.append(time.monotonic() - began.pop())

    yield seconds


def main(url: str) -> None:
    """Rescue jobs until none is left, and print how many, how long and the waits."""
    logging.basicConfig(level=logging.INFO)  # what a worker writes of each job is a part of its time
    app = sqlq.App(url)
    database = app.database.for_loops
    database.require_tables()
    teller, turns, changed = Reporter(), 0, threading.Event()

    def tell(rescued: Iterable[Rescued], why: str) -> None:
        nonlocal turns
        if teller.rescued(rescued, why):
            turns += 1
            changed.set()

    with _timed(database.engine) as seconds:
        rescue = Rescue(database, LEASE_MS, tell)
        loop = ServiceLoop([rescue])
        first_at = time.time()
        loop.start()
        while changed.wait(QUIET_SECONDS):
            changed.clear()
        loop.close(QUIET_SECONDS)
    print(json.dumps({"first_at": first_at, "turns": turns, "longest": max(seconds)}), flush=True)
    app.close()


if __name__ == "__main__":
    main(sys.argv[1])
