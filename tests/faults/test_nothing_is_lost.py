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
from tests.faults.scorecard import record
from tests.kit import execute, wait_until
from tests.kit.scenario import Scenario

pytestmark = pytest.mark.integration


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
                job = work.new("quick", n).set(
                    delay=timedelta(milliseconds=chance.choice([0, 0, 0, 5, 50, 500]))
                )
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
    assert sorted(work.ran().elements()) == sorted(committed), f"seed {seed}"


def test_a_worker_killed_in_the_middle_of_a_job_loses_nothing(work: Scenario) -> None:
    jobs = work.app.enqueue_many(
        [work.new("hang", n) for n in range(5)] + [work.new("quick", n) for n in range(5, 50)]
    )
    with work.working("--lease", "3s", "-c", "10") as first:
        wait_until(lambda: set(range(5)) <= work.ran().keys(), what="the jobs that hang running")
        first.kill()
    (work.folder / "go").touch()
    with work.working():
        work.wait_done()
    assert work.ran().keys() == set(range(50))
    for job in jobs[:5]:
        done = work.app.jobs.get(job.id)
        assert (done.state, done.attempts) == ("finished", 2)
        assert [e["reason"] for e in done.errors] == ["worker_lost"]


def test_two_workers_run_each_job_once(work: Scenario) -> None:
    work.app.enqueue_many([work.new("quick", n) for n in range(2_000)])
    with (
        work.working() as one,
        work.working() as two,
    ):
        work.wait_done()
        assert (one.stop(), two.stop()) == (0, 0)
    assert sorted(work.ran().elements()) == list(range(2_000))
