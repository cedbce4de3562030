"""The processes of the storm on a server; see test_storm.

`python -m tests.faults.storm ROLE URL FOLDER NUMBER SEED`: works until its standard input ends, then leaves
and prints one line of JSON. In the folder the file `acknowledged-NUMBER` takes the number of each job whose
transaction is committed, and `ran-NUMBER` that of each job that has run.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlq
from sqlq.store.jobs import operate, settle
from tests.kit.processes import Note, play

KEYS = 200
"""How many unique keys the producers share."""
FAILS_ONCE_IN = 5


def work(url: str, folder: Path, number: int, chance: random.Random, over: threading.Event) -> dict[str, Any]:
    """Claim, settle and retry; renew all leases every few milliseconds; look for expired ones, and prune."""
    ran = Note(folder / f"ran-{number}")
    app = sqlq.App(url, retention="1s")
    errors: Counter[str] = Counter()
    is_at_work = threading.Event()

    @app.task(name="storm", max_attempts=50, backoff="0s")
    def storm(n: int) -> None:
        is_at_work.set()
        if chance.random() * FAILS_ONCE_IN < 1:
            raise ValueError(n)
        ran(n)

    worker = app.worker(lease="60s", concurrency=4)
    worker.start()

    def often(what: Callable[[], object], seconds: float) -> threading.Thread:
        def go_on() -> None:
            is_at_work.wait(30)
            while not over.wait(seconds):
                try:
                    what()
                except DBAPIError as error:
                    errors[str(error.orig)[:60]] += 1

        thread = threading.Thread(target=go_on)
        thread.start()
        return thread

    def rescue() -> None:
        with app.database.begin() as conn:
            settle.rescue(conn)

    def clear() -> None:
        with app.database.begin() as conn:
            operate.prune(conn, older_than_ms=200, limit=100)

    threads = [often(worker._leases.beat, 0.003), often(rescue, 0.02), often(clear, 0.02)]
    over.wait()
    for thread in threads:
        thread.join()
    worker.stop()
    worker.join("60s")
    app.close()
    return {"role": "worker", "errors": dict(errors)}


def produce(
    url: str, folder: Path, number: int, chance: random.Random, over: threading.Event
) -> dict[str, Any]:
    """Enqueue in transactions of an application, at the server's own isolation level."""
    acknowledged = Note(folder / f"acknowledged-{number}")
    engine = create_engine(url)
    app = sqlq.App(url)
    task = app.task(name="storm", max_attempts=50, backoff="0s")(lambda n: None)
    n, errors = number * 1_000_000, []
    while not over.wait(0.002):
        how = chance.choice(["plain", "plain", "unique", "batch", "mixed"])
        batch = range(n, n + (chance.randrange(2, 20) if how in ("batch", "mixed") else 1))
        n = batch.stop
        jobs = [
            task.new(each).set(unique_key=f"key {chance.randrange(KEYS)}")
            if how == "unique" or (how == "mixed" and chance.random() < 0.3)
            else task.new(each).set(priority=chance.choice([0, 0, 0, 5]))
            for each in batch
        ]
        try:
            with Session(engine) as session, session.begin():
                session.execute(text("SELECT count(*) FROM sqlq_workers")).scalar_one()
                made = app.enqueue_many(jobs, session=session)
        except DBAPIError as error:
            errors.append(f"{how}: {error.orig}")
            continue
        for each, job in zip(batch, made, strict=True):
            if job.created:
                acknowledged(each)
    app.close()
    engine.dispose()
    return {"role": "producer", "errors": errors}


ROLES = {"worker": work, "producer": produce}


if __name__ == "__main__":
    play(ROLES)
