"""Several worker processes at one server, and producers at the isolation level that it gives them. Nobody
meets a deadlock, and each job runs once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlq
from sqlq.database.mariadb.driver import LOCK_WAIT_SECONDS
from sqlq.model.outcome import ErrorText, Failed, Finished, Outcome, Retried
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.worker.settle.settle import Settler
from sqlq.worker.threads.loop import OFTEN
from tests.faults import account
from tests.kit import claim, execute, let_pass, locked, needs, settle, wait_until, working
from tests.kit.processes import ROOT
from tests.programs.notes import notes

pytestmark = pytest.mark.integration

WORKERS = PRODUCERS = 4
SEED = 20_261_125
KEYS = 200
"""How many unique keys the producers share."""
DEADLOCKS = {
    "postgresql": "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
    "mariadb": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'INNODB_DEADLOCKS'",
}
"""How many there have been."""


class Producer(threading.Thread):
    """Enqueues in transactions of an application, at the server's own isolation level."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.acknowledged: list[int] = []
        self.errors: list[str] = []
        self.over = threading.Event()
        self._url, self._number = url, number

    def run(self) -> None:
        chance, n = random.Random(f"{SEED} {self._number}"), self._number * 1_000_000
        engine, app = create_engine(self._url), sqlq.App(self._url)
        task = app.task(name="storm", max_attempts=50, backoff="0s")(lambda n: None)
        while not self.over.wait(0.002):
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
                self.errors.append(f"{how}: {error.orig}")
                continue
            self.acknowledged += [each for each, job in zip(batch, made, strict=True) if job.created]
        app.close()
        engine.dispose()


def started(url: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.programs.storm", url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)


@needs("row_locks")
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_workers_and_producers_meet_no_deadlock(
    app: sqlq.App, engine: Engine, database_url: str, tmp_path: Path, seconds: int
) -> None:
    deadlocks = DEADLOCKS[engine.dialect.name]
    before = int(execute(engine, deadlocks))
    workers = [started(database_url, tmp_path) for _ in range(WORKERS)]
    producers = [Producer(database_url, number) for number in range(PRODUCERS)]
    try:
        for producer in producers:
            producer.start()
        wait_until(lambda: len(notes(tmp_path)) > 100, what="the first jobs done")
        let_pass(seconds, "the storm lasts")
        for producer in producers:
            producer.over.set()
            producer.join()
        wait_until(lambda: execute(engine, "SELECT count(*) FROM jobs") == 0, timeout=120, what="all done")
        reports = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    finally:
        for producer in producers:
            producer.over.set()
        for worker in workers:
            worker.kill()
            worker.communicate()
    met = int(execute(engine, deadlocks)) - before
    ran = Counter(each.n for each in notes(tmp_path))
    acknowledged = [n for producer in producers for n in producer.acknowledged]
    refused = [error for producer in producers for error in producer.errors]
    failed = {error: times for report in reports for error, times in report.items()}
    print(f"{len(acknowledged)} jobs, {met} deadlocks, of producers {refused[:5]}, of workers {failed}")
    figures = {
        "cases": len(acknowledged),
        "lost": len(set(acknowledged) - ran.keys()),
        "lock_errors": len(refused) + sum(failed.values()),
    }
    account.demand("workers and producers meet no deadlock", figures)
    assert not [n for n, times in ran.items() if times > 1]
    assert met <= seconds // 10


A_KEY = (
    "SELECT live_key FROM jobs FORCE INDEX (jobs_live_key) WHERE live_key = 'key' AND queue = 'default' "
    "LOCK IN SHARE MODE"
)
"""Locks the unique key alone, as an INSERT that has met it: its job is not locked."""


@needs("mariadb")
def test_an_outcome_whose_key_is_locked_delays_no_other(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t")(lambda: None)
    keyed = app.enqueue(task.new().set(unique_key="key"))
    others = app.enqueue_many([task.new() for _ in range(20)])
    with locked(engine, A_KEY):
        began = time.monotonic()
        with working(app, grace="1s"):
            wait_until(lambda: len(app.jobs.list(state="finished")) == len(others), what="the others done")
            assert time.monotonic() - began < LOCK_WAIT_SECONDS
            assert app.jobs.get(keyed.id).state == "running"


@needs("mariadb")
def test_an_outcome_whose_key_stays_locked_is_logged_once(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app.enqueue(app.task(name="t")(lambda: None).new().set(unique_key="key"))
    write, tries = Settler._write_apart, threading.Semaphore(0)

    def noted(settler: Settler, *given: Any, among: int) -> None:
        tries.release()
        write(settler, *given, among=among)

    monkeypatch.setattr(Settler, "_write_apart", noted)
    with locked(engine, A_KEY), working(app, grace="1s"):
        for _ in range(3):
            assert tries.acquire(timeout=60)
    assert sum("writing it in parts" in message for message in caplog.messages) == 1


def has_finished(app: sqlq.App, number: int) -> bool:
    return len(app.jobs.list(state="finished")) == number


@needs("mariadb")
def test_outcomes_that_pass_at_their_second_try_are_written_in_batches(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, refused = settling.settle, 0

    def settle_late(conn: Any, settlements: Any, **options: Any) -> Any:
        nonlocal refused
        if refused > len(app.jobs.list(state="finished")):  # this one has been refused
            return write(conn, settlements, **options)
        refused += 1
        with locked(engine, A_KEY):
            return write(conn, settlements, **options)

    monkeypatch.setattr(settling, "settle", settle_late)
    task = app.task(name="t")(lambda: None)
    with working(app):
        for n in range(2 * OFTEN):
            app.enqueue(task.new().set(unique_key="key"))
            wait_until(partial(has_finished, app, n + 1), what="its end")
    assert refused == 2 * OFTEN
    assert "writing it in parts" not in caplog.text


@needs("mariadb")
def test_a_settle_does_not_wait_for_a_locked_unique_key(app: sqlq.App, engine: Engine) -> None:
    app.enqueue(app.task(name="t")(lambda: None).new().set(unique_key="key"))
    (job,) = claim(app)
    with locked(engine, A_KEY):
        began = time.monotonic()
        with pytest.raises(DBAPIError, match="1205"):
            settle(app, job, Finished())
        assert time.monotonic() - began < 2
    assert settle(app, job, Finished()) == {job.id}


ERROR = ErrorText("E", "no")


@needs("mariadb")
@pytest.mark.parametrize("outcome", [Finished(), Retried(0, ERROR), Failed("error", ERROR)])
def test_a_settle_waits_for_no_other_row_of_a_small_table(
    app: sqlq.App, engine: Engine, outcome: Outcome
) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue_many([task.new() for _ in range(30)])
    first, *others = claim(app, limit=20)
    with locked(engine, f"SELECT 1 FROM jobs WHERE id = {others[-1].id} FOR UPDATE"):
        for job in (first, *others[:-1]):
            assert settle(app, job, outcome) == {job.id}
        assert settle(app, others[-1], outcome) == set()


@needs("mariadb")
def test_a_renewal_waits_for_no_other_row_of_a_small_table(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t")(lambda: None)
    # fewer rows than the ids of a search, so a scan is cheap
    app.enqueue_many([task.new() for _ in range(3)])
    jobs = claim(app)
    mine = [(job.id, job.lease_token) for job in jobs if job is not jobs[1]]
    theirs = f"SELECT 1 FROM jobs WHERE id = {jobs[1].id} FOR UPDATE"
    with locked(engine, theirs), app.database.begin() as conn:
        assert lease.extend(conn, mine, lease_ms=30_000).keys() == set(mine)
