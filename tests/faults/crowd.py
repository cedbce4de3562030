"""The processes of the crowd around one SQLite file; see test_sqlite_contention.

`python -m tests.faults.crowd ROLE URL NUMBER SEED`: works until its standard input ends, then leaves and
prints one line of JSON. The file `acknowledged-NUMBER` beside the database takes the number of each job whose
enqueue has returned.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import sqlq

TURN_SECONDS = 0.02


class LockErrors(logging.Handler):
    """Counts sqlq's log lines about locks: its own transactions should never meet one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "locked" in record.getMessage():
            self.seen.append(record.getMessage())


class Note:
    """Appends a number to a file, whole or not at all, and before it returns."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, number: int) -> None:
        os.write(self._file, f"{number}\n".encode())


def enqueue_and_work(url: str, number: int, chance: random.Random, over: threading.Event) -> dict[str, Any]:
    """A web server and a worker in one: enqueues, claims, settles."""
    folder = Path(make_url(url).database or "").parent
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


def read_then_write(url: str, number: int, chance: random.Random, over: threading.Event) -> dict[str, Any]:
    """An application in deferred transactions, as everybody writes them at first: reads, thinks, enqueues."""
    folder = Path(make_url(url).database or "").parent
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


def main(role: str, url: str, number: str, seed: str) -> None:
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    print(json.dumps(ROLES[role](url, int(number), random.Random(f"{seed} {number}"), over)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
