"""One SQLite file under contention: eight worker processes claim and settle, and producers enqueue.

An application reads before it writes in deferred transactions, a reader stays, and kill -9 comes in the
middle.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

import sqlq
from tests.faults import account, guard
from tests.kit import execute, let_pass, needs
from tests.kit.scenario import Scenario
from tests.programs.shop import SECRET

pytestmark = [pytest.mark.integration, needs("one_writer")]

SEED = 20_261_123


class Application(threading.Thread):
    """Deferred transactions, as everybody writes them at first: reads, thinks, enqueues."""

    def __init__(self, shop: Scenario) -> None:
        super().__init__()
        self.acknowledged: list[int] = []
        self.refusals: list[str] = []
        self.over = threading.Event()
        self._shop = shop

    def run(self) -> None:
        engine = create_engine(self._shop.url)
        sqlq.configure_sqlite(engine)
        for n in itertools.takewhile(lambda _: not self.over.is_set(), itertools.count(1_000_000)):
            try:
                with Session(engine) as session, session.begin():
                    session.execute(text("SELECT count(*) FROM orders")).scalar_one()
                    self.over.wait(0.01)
                    self._shop.app.enqueue(self._shop.new("second", n, SECRET), session=session)
                    session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
            except sqlq.EnqueueError as error:
                self.refusals.append(str(error))
            else:
                self.acknowledged.append(n)
        engine.dispose()


@contextmanager
def long_reader(file: Path) -> Iterator[None]:
    """A report that began to read and goes on: the log cannot be reset to before its snapshot meanwhile."""
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM jobs").fetchone()
        yield
        assert reader.execute("SELECT count(*) FROM jobs").fetchone() == before, "its snapshot stays"
        reader.execute("COMMIT")


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "kills"), [(2, 1), (60, 5)])
def test_many_processes_and_a_long_reader_share_one_sqlite_file(
    engine: Engine, database_url: str, tmp_path: Path, seconds: int, kills: int
) -> None:
    execute(engine, "CREATE TABLE orders (n INTEGER PRIMARY KEY)")
    guard.install(engine, owners_may_be_known_dead=True)
    chance, file = random.Random(SEED), Path(make_url(database_url).database or "")
    log = file.with_name(file.name + "-wal")
    with Scenario(tmp_path / "shop", database_url) as shop:
        application = Application(shop)
        with shop.working_at(4, "-p", "2", "-c", "2", "--lease", "60s"):
            application.start()
            shop.start(producers=4)
            with long_reader(file):
                for _ in range(kills):
                    let_pass(seconds / (kills + 1), "the contention lasts")
                    shop.kill_one(chance)  # whatever it is writing
                let_pass(seconds / (kills + 1), "the contention lasts")
                largest = log.stat().st_size
            application.over.set()
            application.join()
            shop.stop()
            shop.wait_done()
        shop.app.close()
        shop.engine.dispose()
        with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as conn:
            busy, _, _ = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert (busy, log.stat().st_size) == (0, 0), "a checkpoint after the reader empties the log"
            sound = conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        guard.check(engine)
        acknowledged = {*shop.acknowledged, *application.acknowledged}
        figures = {
            "cases": len(acknowledged),
            "lock_errors": shop.refused + shop.logs().count("locked"),
            "damaged": 0 if sound else 1,
            "lost": len(acknowledged - shop.ran().keys()),
        }
        print(f"{len(acknowledged)} jobs, log of {largest:,} bytes, {len(application.refusals)} refusals")
        account.demand("SQLite under contention", figures, seed=SEED)
        for sentence in application.refusals:
            # a stale snapshot, or a lock that was held for longer than the application waits
            assert "configure_sqlite(engine, immediate=True)" in sentence or "held the write lock" in sentence
        last = {note.job: note for note in shop.notes() if note.key == "quick"}
        before = {note.pid for note in shop.notes() if note.key == "quick" and note != last[note.job]}
        assert before <= shop.killed.keys(), "only a job that a killed process had in hand runs again"


def test_a_transaction_that_read_before_a_rival_wrote_is_refused(app: sqlq.App, engine: Engine) -> None:
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
