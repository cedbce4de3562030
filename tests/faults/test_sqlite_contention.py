"""One SQLite file under contention: eight processes enqueue, claim and settle.

An application reads before it writes in deferred transactions, a reader stays, and kill -9 comes in the
middle.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

import sqlq
from tests.faults import guard
from tests.faults.scorecard import record
from tests.kit import needs, wait_until
from tests.kit.processes import ROOT

pytestmark = [pytest.mark.integration, needs("one_writer")]

WORKERS = 8
SEED = 20_261_123


class Crowd:
    """The processes around one file."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.file = Path(make_url(url).database or "")
        self.alive: list[subprocess.Popen[str]] = []
        self._numbers = iter(range(1, 1_000))

    def start(self, role: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.crowd", role, self.url, str(next(self._numbers)), str(SEED)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.alive.append(process)

    def ready(self) -> None:
        for process in self.alive:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def kill(self, chance: random.Random) -> None:
        """End one of the workers as the OOM killer would, whatever it is writing."""
        process = self.alive.pop(chance.randrange(WORKERS - 1))
        process.kill()
        process.communicate()

    def end(self) -> list[dict[str, Any]]:
        """Stop all of them, and return their reports."""
        said = []
        for process in self.alive:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        for process in self.alive:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            said.append(json.loads(out.splitlines()[-1]))
        self.alive = []
        return said

    def noted(self, what: str) -> list[int]:
        return [int(line) for file in self.file.parent.glob(f"{what}-*") for line in file.read_text().split()]

    def wal_size(self) -> int:
        return self.file.with_name(self.file.name + "-wal").stat().st_size

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.file, isolation_level=None, timeout=10)


@pytest.fixture
def crowd(database_url: str, engine: Engine) -> Iterator[Crowd]:
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE orders (n INTEGER PRIMARY KEY)"))
    guard.install(engine)
    crowd = Crowd(database_url)
    yield crowd
    for process in crowd.alive:
        process.kill()
        process.communicate()


@contextmanager
def long_reader(crowd: Crowd) -> Iterator[None]:
    """A report that began to read and goes on: the log cannot be reset to before its snapshot meanwhile."""
    with closing(crowd.connect()) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM jobs").fetchone()
        yield
        assert reader.execute("SELECT count(*) FROM jobs").fetchone() == before, "its snapshot stays"
        reader.execute("COMMIT")


def contend(crowd: Crowd, app: sqlq.App, seconds: float, kills: int) -> None:
    chance = random.Random(SEED)
    over = threading.Event()
    for _ in range(WORKERS):
        crowd.start("worker")
    crowd.start("application")
    crowd.ready()
    with long_reader(crowd):
        for _ in range(kills):
            over.wait(seconds / (kills + 1))
            crowd.kill(chance)
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


def leftovers(crowd: Crowd, app: sqlq.App) -> set[int]:
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
def test_many_processes_share_one_sqlite_file(crowd: Crowd, app: sqlq.App) -> None:
    contend(crowd, app, seconds=2, kills=1)


@pytest.mark.slow
def test_many_processes_and_a_long_reader_share_one_sqlite_file(crowd: Crowd, app: sqlq.App) -> None:
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
