"""A worker in the storm on a server: `python -m tests.programs.storm URL`.

It claims, settles and retries; it renews all leases every few milliseconds, looks for expired ones, and
prunes. It leaves when its standard input ends, and prints the errors that it met as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.store.jobs import operate, settle
from tests.programs.notes import note

FAILS_ONCE_IN = 5


def main(url: str) -> None:
    app = sqlq.App(url, retention="1s")
    errors: Counter[str] = Counter()
    is_at_work, over = threading.Event(), threading.Event()

    @app.task(name="storm", max_attempts=50, backoff="0s")
    def storm(n: int) -> None:
        is_at_work.set()
        if random.random() * FAILS_ONCE_IN < 1:
            raise ValueError(n)
        note("storm", n)

    def rescue() -> None:
        with app.database.begin() as conn:
            settle.rescue(conn)

    def clear() -> None:
        with app.database.begin() as conn:
            operate.prune(conn, older_than_ms=200, limit=100)

    def repeat(call: Callable[[], object], seconds: float) -> None:
        is_at_work.wait(30)
        while not over.wait(seconds):
            try:
                call()
            except DBAPIError as error:
                errors[str(error.orig)[:60]] += 1

    worker = app.worker(lease="60s", concurrency=4)
    worker.start()
    loops = ((worker._leases.beat, 0.003), (rescue, 0.02), (clear, 0.02))
    threads = [threading.Thread(target=repeat, args=loop) for loop in loops]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    worker.stop()
    worker.join("60s")
    app.close()
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])
