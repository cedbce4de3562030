"""A machine dies: the primary is gone, its standby is promoted, and a list of hosts leads everybody there."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

import sqlq
from tests.faults.account import record
from tests.kit import needs, wait_until
from tests.kit.command import Command
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.scenario import RESUME_SECONDS, Scenario, readable_log
from tests.kit.standby import Pair, pair_of_servers, standby_of

pytestmark = pytest.mark.integration


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of_servers() as pair:
        yield pair


def test_workers_go_on_when_the_primary_is_killed_and_its_standby_promoted(
    tmp_path: Path, pair: Pair
) -> None:
    primary, standby, name = pair
    standby.configure("synchronous_standby_names = '*'")
    url = standby.list_url(name)
    with Scenario(tmp_path / "work", url) as load, load.working("-p", "2", "--lease", "10s") as worker:
        load.start()
        wait_until(lambda: len(load.ran()) >= 50, timeout=30, what="the first jobs done")
        before = worker.children()
        primary.kill()
        killed = time.monotonic()
        wait_until(lambda: worker.said("does not answer"), timeout=30, what="the worker saying what it met")
        acknowledged = len(load.acknowledged)
        standby.promote()
        resumed = [load.wait_for_finish(time.monotonic())]
        outage = time.monotonic() - killed
        wait_until(lambda: len(load.acknowledged) >= acknowledged + 50, timeout=30, what="enqueues going on")
        load.demand_everything_done()
        assert worker.children() == before, "no process was started anew"
        assert load.ran_again() == 0
        assert max(resumed) < RESUME_SECONDS
        readable_log(worker, most=30)
        assert worker.stop() == 0
        print(f"an outage of {outage:.2f} s")
        cases = len(load.acknowledged)
        record("the primary is killed and its standby promoted", lost=0, cases=cases, resume_seconds=resumed)


def test_a_worker_leaves_a_primary_that_was_demoted(tmp_path: Path, pair: Pair) -> None:
    """It still answers, breaks no connection, and shows no new job."""
    _, standby, name = pair
    url = standby.list_url(name)
    with Scenario(tmp_path / "work", url) as load, load.working() as worker:
        load.enqueue_next()
        wait_until(load.ran, timeout=30, what="the first job done")
        standby.catch_up()
        standby.configure("default_transaction_read_only = on")
        standby.promote()
        with closing(sqlq.App(url)) as app:
            app.enqueue(load.new("quick", 2))
        began = time.monotonic()
        wait_until(lambda: len(load.ran()) == 2, timeout=10, what="the job of the new primary")
        record("a demoted primary is left", resume_seconds=[time.monotonic() - began])
        assert worker.stop() == 0
        assert "Traceback" not in worker.log.read_text()


def test_a_waiter_leaves_a_primary_that_was_demoted(pair: Pair) -> None:
    _, standby, name = pair
    with closing(sqlq.App(standby.list_url(name))) as app, ThreadPoolExecutor(1) as pool:
        job = app.enqueue(app.task(name="t")(lambda: None).new().set(delay="1h"))
        waiting = app._connected.results.waiter
        waiter = pool.submit(app.wait_all, [job], "30s")
        wait_until(lambda: any(watch.seen for watch in list(waiting._watches)), what="a poll")
        standby.catch_up()
        standby.configure("default_transaction_read_only = on")
        standby.promote()
        with closing(sqlq.App(standby.list_url(name))) as other:
            newer = other.enqueue(other.task(name="t")(lambda: None).new())
            other.jobs.cancel([job.id, newer.id])
        # of which the old one knows nothing
        assert [each.id for each in app.wait_all([newer], "30s").ended] == [newer.id]
        assert [each.id for each in waiter.result(30).ended] == [job.id]


def test_a_waiter_does_not_trust_an_old_primary_that_wakes(pair: Pair) -> None:
    """The old primary was frozen, and wakes after another was promoted.

    Until it is demoted it takes itself for the primary, and knows nothing of newer jobs.
    """
    primary, standby, name = pair
    standby.configure("synchronous_standby_names = '*'")
    standby.catch_up()
    standby.promote()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with (
        closing(sqlq.App(standby.url(name))) as other,
        closing(sqlq.App(standby.list_url(name))) as app,
        psycopg.connect(primary.url(name).replace("+psycopg", ""), autocommit=True) as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        job = other.enqueue(other.task(name="t")(lambda: None).new())
        other.jobs.cancel([job.id])
        waiter = pool.submit(app.wait_all, [job], "60s")
        wait_until(lambda: waiter.done() or conn.execute(waits).fetchone() != (0,), what="a waiting COMMIT")
        standby.configure("default_transaction_read_only = on")
        assert [each.id for each in waiter.result(60).ended] == [job.id]


@needs("postgresql")
def test_apps_and_engines_of_callers_follow_a_list_of_hosts(
    restartable_postgresql: OwnPostgreSQL, database_url: str
) -> None:
    name = make_url(database_url).database or ""
    with standby_of(restartable_postgresql) as standby:
        url = standby.list_url(name, first=True)
        engine = create_engine(url, poolclass=NullPool)
        for_async = create_async_engine(url.replace("+psycopg", "+asyncpg"), poolclass=NullPool)
        with warnings.catch_warnings(), closing(sqlq.App(url)) as app:
            warnings.simplefilter("error")
            task = app.task(name="t")(lambda: 7)
            with psycopg.connect(restartable_postgresql.url(name).replace("+psycopg", "")) as theirs:
                app.enqueue(task.new(), session=theirs)
            with engine.begin() as conn:
                app.enqueue(task.new(), session=conn)

            async def awaited() -> None:
                async with for_async.begin() as conn:
                    await app.aenqueue(task.new(), session=conn)
                await for_async.dispose()

            asyncio.run(awaited())
            with app.worker():
                assert app.result(app.enqueue(task.new()), "30s") == 7
            for given in (engine, for_async):
                with closing(sqlq.App(engine=given)) as beside:
                    assert len(beside.jobs.list()) == 4


@needs("postgresql")
def test_each_command_takes_a_list_of_hosts_and_names_its_faults(
    tmp_path: Path, restartable_postgresql: OwnPostgreSQL, database_url: str
) -> None:
    name = make_url(database_url).database or ""
    with standby_of(restartable_postgresql) as standby:
        both = standby.list_url(name, first=True)
        command = Command(tmp_path, SQLQ_DATABASE_URL=both)
        for line in (
            *("migrate", "status", "jobs", "doctor --sizes", "metrics", "queues pause mail"),
            *("-a shop:app enqueue shop.where", "-a shop:app work --drain"),
        ):
            command.ok(*line.split())
        assert f":{standby.port}" not in command("doctor").out.splitlines()[0].partition("at ")[2]
        standbys = both.replace(f"host=127.0.0.1:{restartable_postgresql.port}&", "")
        wrong = both.replace(f"127.0.0.1:{restartable_postgresql.port}", "nowhere.invalid")
        for url in (standbys, wrong):
            for words in (
                *(["status"], ["migrate"]),
                *(["-a", "shop:app", *rest] for rest in (["enqueue", "shop.where"], ["work", "--drain"])),
            ):
                said = Command(tmp_path, SQLQ_DATABASE_URL=url)(*words).sentence()
                assert "read-only" in said
                assert "primary" in said
                assert ("nowhere.invalid" in said) is (url == wrong)
        alone = Command(tmp_path, SQLQ_DATABASE_URL=standby.url(name))
        assert alone("status").code == alone("migrate").code == 0, "there is nothing to write"
        said = alone("-a", "shop:app", "enqueue", "shop.where").sentence()
        assert f"127.0.0.1:{standby.port}" in said
        assert said.endswith("in a read-only transaction; use the primary server")
        with alone.working():
            wait_until(lambda: "the database takes no writes" in alone.log(), what="the worker saying why")
        with standby_of(restartable_postgresql, "other") as other:
            url = standbys.replace("&target", f"&host=127.0.0.1:{other.port}&target")
            said = Command(tmp_path, SQLQ_DATABASE_URL=url)("status").sentence()
            assert [f"{each.port}: session is read-only" in said for each in (standby, other)] == [True] * 2
        unknown = "postgresql://postgres@/x?host=nowhere.invalid&host=nobody.invalid"
        said = Command(tmp_path, SQLQ_DATABASE_URL=unknown)("status").sentence()
        assert "check the host in the URL" in said
