"""Whatever happens to transactions, workers and the database: what was committed is done, and what was not is
not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

import sqlq
from sqlq.database.database import Database
from tests.faults.scorecard import record
from tests.kit import execute, needs, wait_until
from tests.kit.mariadb import OwnMariaDB
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.processes import Project, worker_process

pytestmark = pytest.mark.integration

MODULE = '''
import os, sqlq
app = sqlq.App()

@app.task
def note(n):
    """Leaves a line for each time it ran."""
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{n}\\n".encode())
    os.close(fd)

@app.task(max_attempts=3, backoff="0s")
def hang(n):
    note(n)
    if not os.path.exists("go"):
        import threading
        threading.Event().wait(60)
'''


class Work(Project):
    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url, MODULE, "work")
        self.note = self.app.task(name="work.note")(lambda n: None)
        self.hang = self.app.task(name="work.hang", max_attempts=3)(lambda n: None)

    def ran(self) -> list[int]:
        return [int(n) for (n,) in self.lines()]


@pytest.fixture
def work(tmp_path: Path, database_url: str) -> Iterator[Work]:
    with Work(tmp_path / "work", database_url) as work:
        yield work


@pytest.fixture
def shop_engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    execute(engine, "CREATE TABLE orders (n INTEGER PRIMARY KEY)")
    yield engine
    engine.dispose()


def test_a_thousand_transactions_leave_exactly_the_committed_jobs_done(
    work: Work, shop_engine: Engine
) -> None:
    seed = 20_261_121
    chance = random.Random(seed)
    committed: set[int] = set()
    with worker_process(work.folder, "work:app", work.url):
        for n in range(1_000):
            how = chance.choice(
                [
                    "commit",
                    "rollback",
                    "savepoint rolled back",
                    "savepoint released",
                    "savepoint released, rolled back",
                ]
            )
            with Session(shop_engine) as session:
                session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
                job = work.note.new(n).set(delay=timedelta(milliseconds=chance.choice([0, 0, 0, 5, 50, 500])))
                if "savepoint" in how:
                    savepoint = session.begin_nested()
                    work.app.enqueue(job, session=session)
                    savepoint.rollback() if "savepoint rolled back" in how else savepoint.commit()
                else:
                    work.app.enqueue(job, session=session)
                if how.endswith(("rollback", ", rolled back")):
                    session.rollback()
                else:
                    session.commit()
                    if how != "savepoint rolled back":
                        committed.add(n)
        work.wait_done()
    ran = set(work.ran())
    with shop_engine.connect() as conn:
        early = conn.scalar(text("SELECT count(*) FROM finished_jobs WHERE reserved_at < available_at"))
        waited = conn.scalar(text("SELECT count(*) FROM finished_jobs WHERE available_at > created_at"))
    lost, never_committed = len(committed - ran), len(ran - committed)
    record(
        "G1, G2: a thousand transactions",
        cases=1_000,
        seed=seed,
        lost=lost,
        never_committed=never_committed,
        early=early,
    )
    assert early == 0
    assert waited > 100
    assert 300 < len(committed) < 800
    assert sorted(work.ran()) == sorted(committed), f"seed {seed}"


def test_a_worker_killed_in_the_middle_of_a_job_loses_nothing(work: Work) -> None:
    jobs = work.app.enqueue_many(
        [work.hang.new(n) for n in range(5)] + [work.note.new(n) for n in range(5, 50)]
    )
    with worker_process(work.folder, "work:app", work.url, "--lease", "3s", "-c", "10") as first:
        wait_until(lambda: set(range(5)) <= set(work.ran()), what="the jobs that hang running")
        first.kill()
    (work.folder / "go").touch()
    with worker_process(work.folder, "work:app", work.url):
        work.wait_done()
    assert set(work.ran()) == set(range(50))
    for job in jobs[:5]:
        done = work.app.jobs.get(job.id)
        assert (done.state, done.attempts) == ("finished", 2)
        assert [e["reason"] for e in done.errors] == ["worker_lost"]


def test_two_workers_run_each_job_once(work: Work) -> None:
    work.app.enqueue_many([work.note.new(n) for n in range(2_000)])
    with (
        worker_process(work.folder, "work:app", work.url) as one,
        worker_process(work.folder, "work:app", work.url) as two,
    ):
        work.wait_done()
        assert (one.stop(), two.stop()) == (0, 0)
    assert sorted(work.ran()) == list(range(2_000))


def test_a_terminated_worker_releases_its_unfinished_job(work: Work) -> None:
    job = work.app.enqueue(work.hang.new(1))
    with worker_process(work.folder, "work:app", work.url, "--grace", "0s") as worker:
        wait_until(lambda: work.ran() == [1], what="the job running")
        assert worker.stop() == 0
    row = work.app.jobs.get(job.id)
    assert (row.state, row.attempts, row.releases) == ("available", 0, 1)


@needs("server")
def test_a_worker_outlives_a_restart_of_its_database(
    work: Work, restartable_server: OwnPostgreSQL | OwnMariaDB
) -> None:
    def enqueue(n: int) -> Any:
        return work.app.enqueue(work.note.new(n))

    def has_run(n: int) -> bool:
        return n in work.ran()

    with worker_process(work.folder, "work:app", work.url) as worker:
        enqueue(0)
        wait_until(lambda: work.ran() == [0], what="the first job done")
        for n in range(1, 4):
            restartable_server.restart(mode="immediate")
            wait_until(
                partial(succeeds, partial(enqueue, n)), timeout=30, what="the database answering the producer"
            )
            wait_until(partial(has_run, n), timeout=30, what="a job after the restart done")
        assert worker.stop() == 0
        log = worker.log.read_text()
    assert work.live() == 0
    assert "Traceback" not in log
    assert log.count("does not answer") <= 6, log


def succeeds(call: Callable[[], Any]) -> bool:
    """Whether a call goes through; a producer's pooled connection may have died with the server."""
    try:
        call()
    except DBAPIError:
        return False
    return True


def test_settles_survive_a_lost_reply_to_commit(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMMIT is carried out, but its reply is lost: the settler must find out, not settle twice, and not give
    up."""
    finished: list[int] = []
    lost_replies: list[str] = []
    single_statements = Database.single_statements

    @app.task(name="t", backoff="0s", max_attempts=9)
    def odd_at_first(n: int) -> None:
        if n % 2 == 0 and sqlq.current_job().attempt == 1:
            raise ValueError(n)
        finished.append(n)

    @contextmanager
    def losing_replies(database: Database) -> Iterator[Connection]:
        with single_statements(database) as conn:
            yield conn
        if threading.current_thread().name == "sqlq-settle" and len(lost_replies) < 2:
            lost_replies.append("COMMIT")
            raise OperationalError(
                "COMMIT", {}, Exception("server closed the connection"), connection_invalidated=True
            )

    monkeypatch.setattr(Database, "single_statements", losing_replies)
    done = app.enqueue_many([odd_at_first.new(n) for n in range(10)])
    app.worker(drain=True).run()
    assert lost_replies  # the second one only where what ran again meanwhile is not in the first batch
    assert sorted(finished) == list(range(10))
    assert {str(app.jobs.get(job.id).state) for job in done} == {"finished"}
    assert [app.jobs.get(job.id).attempts for job in done] == [2, 1] * 5
