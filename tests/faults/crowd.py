"""The processes of the crowd around one SQLite file; see test_sqlite_contention.

`python -m tests.faults.crowd ROLE URL FOLDER NUMBER SEED`: works until its standard input ends, then leaves
and prints one line of JSON. In the folder the file `acknowledged-NUMBER` takes the number of each job whose
enqueue has returned.
"""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import sqlq
from tests.kit.processes import Note, play

TURN_SECONDS = 0.02


class LockErrors(logging.Handler):
    """Counts sqlq's log lines about locks: its own transactions should never meet one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "locked" in record.getMessage():
            self.seen.append(record.getMessage())


def enqueue_and_work(
    url: str, folder: Path, number: int, chance: random.Random, over: threading.Event
) -> dict[str, Any]:
    """A web server and a worker in one: enqueues, claims, settles."""
    acknowledged, ran = Note(folder / f"acknowledged-{number}"), Note(folder / f"ran-{number}")
    errors = LockErrors()
    logging.getLogger("sqlq").addHandler(errors)
    app = sqlq.App(url)

    @app.task(name="crowd", max_attempts=20, backoff="0s")
    def crowd(n: int) -> None:
        if n % 10 == 0 and sqlq.current_job().attempt == 1:
            raise ValueError(n)
        ran(n)

    worker = app.worker(lease="60s", concurrency=2)
    thread = threading.Thread(target=worker.run)
    thread.start()
    n = number * 1_000_000
    while not over.wait(TURN_SECONDS * chance.random()):
        batch = range(n, n + chance.choice([1, 1, 1, 5]))
        try:
            app.enqueue_many([crowd.new(each) for each in batch])
        except OperationalError as error:
            errors.seen.append(f"enqueue: {error.orig}")
            continue
        for each in batch:
            acknowledged(each)
        n = batch.stop
    worker.stop()
    thread.join()
    app.close()
    return {"role": "worker", "lock_errors": errors.seen}


def read_then_write(
    url: str, folder: Path, number: int, chance: random.Random, over: threading.Event
) -> dict[str, Any]:
    """An application in deferred transactions, as everybody writes them at first: reads, thinks, enqueues."""
    acknowledged = Note(folder / f"acknowledged-{number}")
    engine = create_engine(url)
    sqlq.configure_sqlite(engine)
    app = sqlq.App(url)
    task = app.task(name="crowd", max_attempts=20, backoff="0s")(lambda n: None)
    n, refusals, others = number * 1_000_000, [], []
    while not over.is_set():
        try:
            with Session(engine) as session, session.begin():
                session.execute(text("SELECT count(*) FROM orders")).scalar_one()
                over.wait(TURN_SECONDS * chance.random())
                app.enqueue(task.new(n), session=session)
                session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
        except sqlq.EnqueueError as error:
            refusals.append(str(error))
        except Exception as error:
            others.append(repr(error))
        else:
            acknowledged(n)
        n += 1
    app.close()
    engine.dispose()
    return {
        "role": "application",
        "refusals": len(refusals),
        "sentences": sorted(set(refusals)),
        "others": others,
    }


ROLES = {"worker": enqueue_and_work, "application": read_then_write}


if __name__ == "__main__":
    play(ROLES)
