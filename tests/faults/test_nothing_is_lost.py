"""Whatever happens to transactions, workers and the database: what was committed is done, and what was not is
not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import sqlq
from tests.faults import account
from tests.kit import execute, needs
from tests.kit.processes import run_program
from tests.kit.scenario import Scenario

pytestmark = pytest.mark.integration

SAVEPOINTS = ("savepoint rolled back", "savepoint released", "savepoint released, rolled back")
WAYS = ("commit", "rollback", *SAVEPOINTS)
"""How a transaction ends."""


@pytest.fixture
def work(tmp_path: Path, database_url: str) -> Iterator[Scenario]:
    with Scenario(tmp_path / "work", database_url) as work:
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
    work: Scenario, shop_engine: Engine
) -> None:
    seed = 20_261_121
    chance = random.Random(seed)
    committed: set[int] = set()
    with work.working():
        for n in range(1_000):
            how = chance.choice(WAYS)
            with Session(shop_engine) as session:
                session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
                delay = timedelta(milliseconds=chance.choice([0, 0, 0, 5, 50, 500]))
                job = work.new("quick", n).set(delay=delay)
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
    ran = work.ran().keys()
    with shop_engine.connect() as conn:
        early = conn.scalar(text("SELECT count(*) FROM finished_jobs WHERE reserved_at < available_at"))
        waited = conn.scalar(text("SELECT count(*) FROM finished_jobs WHERE available_at > created_at"))
    lost, never_committed = len(committed - ran), len(ran - committed)
    figures = {"cases": 1_000, "lost": lost, "never_committed": never_committed, "early": early}
    account.demand("G1, G2: a thousand transactions", figures, seed=seed)
    assert waited > 100
    assert 300 < len(committed) < 800
    assert sorted(work.ran().elements()) == sorted(committed), f"seed {seed}"


CHILDREN = 4
EACH = 50
SERVER = """
import os, sys
import sqlq
from sqlalchemy import event
from sqlq.database import pool
pool.TAKEN_SECONDS = 60  # so that what rests is not given back before the fork, however slow the machine
url, children, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
app = sqlq.App(url)
task = app.task(name="t")(lambda who, n: None)
with app.database.read():
    app.enqueue(task.new("before the fork", 0))
pool = app.database.engine.pool
assert (pool.checkedin(), pool.checkedout()) == (1, 1)  # at rest for the next job
connected = []
event.listen(app.database.engine, "connect", lambda *_: connected.append(os.getpid()))
pids = []
for child in range(children):
    pid = os.fork()
    if pid == 0:
        for n in range(each):
            app.enqueue(task.new(child, n))
            if connected != [os.getpid()]:
                os._exit(3)  # it would be luck if nothing went wrong
        app.close()
        os._exit(0)
    pids.append(pid)
for n in range(each):
    app.enqueue(task.new("parent", n))
ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
app.enqueue(task.new("after the children", 0))
app.close()
sys.exit(any(ended))
"""


def test_a_forking_server_shares_no_connection(app: sqlq.App, database_url: str) -> None:
    """A web server forks after its App has connected."""
    numbers = (str(CHILDREN), str(EACH))
    done = run_program("-W", "ignore::DeprecationWarning", "-c", SERVER, database_url, *numbers)
    assert (done.returncode, done.stderr) == (0, "")
    expected = {(who, n) for who in (*range(CHILDREN), "parent") for n in range(EACH)}
    expected |= {("before the fork", 0), ("after the children", 0)}
    there = [tuple(job.payload["args"]) for job in app.jobs.list(limit=10_000)]
    account.record("G2: enqueueing beside forks", cases=len(expected), lost=len(expected - set(there)))
    assert len(there) == len(expected)
    assert set(there) == expected


FORKS = {
    "closes_first": (["parent", "child", "child again"], ""),
    "reads_meanwhile": (["parent", "child"], ""),
    "keeps_open": (["parent"], "this process was forked while {file} was open"),
}
"""The jobs that each program leaves, and what it prints."""


@pytest.mark.parametrize("program", FORKS)
@needs("file")
def test_a_fork_loses_nothing_while_a_file_is_open(app: sqlq.App, database_url: str, program: str) -> None:
    jobs, output = FORKS[program]
    words = ("-W", "ignore::DeprecationWarning", "-m", "tests.programs.forking", program, database_url)
    done = run_program(*words)
    expected = (0, output.format(file=app.database.engine.url.database), "")
    assert (done.returncode, done.stdout.partition(", and SQLite")[0], done.stderr) == expected
    assert [job.payload["args"] for job in reversed(app.jobs.list())] == [[job] for job in jobs]
