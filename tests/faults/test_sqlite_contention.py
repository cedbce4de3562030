"""One SQLite file under contention: eight processes enqueue, claim and settle.

An application reads before it writes in deferred transactions, a reader stays, and kill -9 comes in the
middle.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url, text

import sqlq
from tests.faults import guard
from tests.faults.scorecard import record
from tests.kit import execute, needs, wait_until
from tests.kit.processes import Crowd

pytestmark = [pytest.mark.integration, needs("one_writer")]

WORKERS = 8
SEED = 20_261_123


class FileCrowd(Crowd):
    """The processes around one file."""

    def __init__(self, url: str) -> None:
        self.url, self.file = url, Path(make_url(url).database or "")
        super().__init__("tests.faults.crowd", self.file.parent)

    def wal_size(self) -> int:
        return self.file.with_name(self.file.name + "-wal").stat().st_size

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.file, isolation_level=None, timeout=10)


@pytest.fixture
def crowd(database_url: str, engine: Engine) -> Iterator[FileCrowd]:
    execute(engine, "CREATE TABLE orders (n INTEGER PRIMARY KEY)")
    guard.install(engine)
    crowd = FileCrowd(database_url)
    yield crowd
    crowd.kill()


@contextmanager
def long_reader(crowd: FileCrowd) -> Iterator[None]:
    """A report that began to read and goes on: the log cannot be reset to before its snapshot meanwhile."""
    with closing(crowd.connect()) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM jobs").fetchone()
        yield
        assert reader.execute("SELECT count(*) FROM jobs").fetchone() == before, "its snapshot stays"
        reader.execute("COMMIT")


def contend(crowd: FileCrowd, app: sqlq.App, seconds: float, kills: int) -> None:
    chance = random.Random(SEED)
    over = threading.Event()
    for _ in range(WORKERS):
        crowd.start("worker", crowd.url, SEED)
    crowd.start("application", crowd.url, SEED)
    crowd.ready()
    with long_reader(crowd):
        for _ in range(kills):
            over.wait(seconds / (kills + 1))
            crowd.kill(chance.randrange(WORKERS - 1))  # whatever it is writing
        over.wait(seconds / (kills + 1))
        largest = crowd.wal_size()
        said = crowd.end()
    with closing(crowd.connect()) as conn:
        busy, _, _ = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert (busy, crowd.wal_size()) == (0, 0), (
            "the log is back to nothing at the next checkpoint after the reader has gone"
        )
        sound = conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    locked = [error for each in said for error in each.get("lock_errors", [])]
    (application,) = [each for each in said if each["role"] == "application"]
    lost = leftovers(crowd, app)
    record(
        "SQLite under contention",
        cases=len(crowd.noted("acknowledged")),
        seed=SEED,
        seconds=seconds,
        kills=kills,
        lock_errors=len(locked),
        damaged=0 if sound else 1,
        lost=len(lost),
        refusals=application["refusals"],
    )
    print(
        f"{len(crowd.noted('acknowledged'))} jobs, log of {largest:,} bytes, {application['refusals']} "
        "refusals in the application"
    )
    assert sound
    assert not locked
    assert application["others"] == []
    for sentence in application["sentences"]:
        # a stale snapshot, or a lock that was held for longer than the application waits
        assert "configure_sqlite(engine, immediate=True)" in sentence or "held the write lock" in sentence
    assert not lost


def leftovers(crowd: FileCrowd, app: sqlq.App) -> set[int]:
    """Let a fresh worker do what is left; return the jobs that were acknowledged, and did not run."""
    in_hand = {job.payload["args"][0] for job in app.jobs.list(state="running", limit=1_000)}
    ran: list[int] = []
    app.task(name="crowd", max_attempts=20, backoff="0s")(ran.append)
    guard.advance(app.database.engine, 120_000)
    worker = app.worker(concurrency=10)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        live = text("SELECT count(*) FROM jobs")
        with app.database.engine.connect() as conn:

            def all_done() -> bool:
                done: bool = conn.execute(live).scalar_one() == 0
                conn.rollback()
                return done

            wait_until(all_done, timeout=120, what="the rest done")
    finally:
        worker.stop()
        thread.join()
    guard.check(app.database.engine)
    everything = crowd.noted("ran") + ran
    twice = {n for n, times in Counter(everything).items() if times > 1}
    assert twice <= in_hand, "only a job that a killed worker had in hand runs again"
    return set(crowd.noted("acknowledged")) - set(everything)


@pytest.mark.slow
def test_many_processes_share_one_sqlite_file(crowd: FileCrowd, app: sqlq.App) -> None:
    contend(crowd, app, seconds=2, kills=1)


@pytest.mark.slow
def test_many_processes_and_a_long_reader_share_one_sqlite_file(crowd: FileCrowd, app: sqlq.App) -> None:
    contend(crowd, app, seconds=60, kills=5)


def test_a_transaction_that_read_before_a_rival_wrote_is_refused_in_one_sentence(
    app: sqlq.App, engine: Engine
) -> None:
    """Deterministically what the crowd meets by chance; and begun with the write lock it is not refused."""
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    sqlq.configure_sqlite(engine)
    with engine.connect() as conn:
        conn.execute(text("SELECT count(*) FROM jobs")).scalar_one()
        app.enqueue(task.new())
        with pytest.raises(sqlq.EnqueueError, match=r"configure_sqlite\(engine, immediate=True\)"):
            app.enqueue(task.new(), session=conn)
        conn.rollback()
        app.enqueue(task.new(), session=conn)
        conn.commit()
    assert len(app.jobs.list()) == 3
