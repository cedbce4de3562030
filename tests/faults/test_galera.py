"""Three nodes of Galera: row locks are those of one node, and the COMMIT shows who was first.

So a claim can be lost at its COMMIT, and a job never is. Workers are real processes, each at a node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import OperationalError, PendingRollbackError
from sqlalchemy.orm import Session

import sqlq
from sqlq.store.limits import admit
from tests.faults import account
from tests.faults.galera import Node, cluster, library
from tests.faults.scorecard import record
from tests.kit import wait_until
from tests.kit.databases import migrate
from tests.kit.processes import WorkerProcess
from tests.kit.scenario import RESUME_SECONDS, Scenario, readable_log

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(
        library() is None, reason="NOT TESTED: there is no Galera, which Debian's package galera-4 has"
    ),
]


@pytest.fixture(scope="module")
def galera() -> Iterator[Sequence[Node]]:
    with cluster() as nodes:
        yield nodes


@pytest.fixture
def urls(galera: Sequence[Node]) -> Iterator[list[str]]:
    """The URLs of one database with sqlq's tables, at each node."""
    first, *others = galera
    url = first.create_database()
    migrate(url)
    name = make_url(url).database
    made = f"SELECT 1 FROM information_schema.tables WHERE table_schema = '{name}' AND table_name = 'orders'"
    first.administer(f"CREATE TABLE {name}.orders (id integer PRIMARY KEY)")
    wait_until(lambda: all(node.administer(made) for node in others), what="the tables at each node")
    yield [node.url(str(name)) for node in galera]
    first.drop_database(url)


def lost_transactions(nodes: Sequence[Node]) -> int:
    """How many transactions the nodes have undone for another node's."""
    return sum(
        int(node.status(name)) for node in nodes for name in ("local_cert_failures", "local_bf_aborts")
    )


@pytest.mark.parametrize("pinned", [False, True], ids=["one-queue-for-all", "a-queue-for-each"])
def test_workers_at_all_nodes_run_each_job_once(
    galera: Sequence[Node], urls: list[str], tmp_path: Path, pinned: bool
) -> None:
    queues, number = [f"queue{i if pinned else ''}" for i in range(3)], 3_000
    before = lost_transactions(galera)
    with Scenario(tmp_path / "work", urls[0]) as load, ExitStack() as stack:
        workers = [
            stack.enter_context(load.working("-q", queue, url=url))
            for url, queue in zip(urls, queues, strict=True)
        ]
        began = time.monotonic()
        for start in range(0, number, 300):
            batch = range(start, start + 300)
            jobs = [load.new("quick", n).set(queue=queues[n % 3]) for n in batch]
            made = load.app.enqueue_many(jobs)
            load.acknowledged |= {n: job.id for n, job in zip(batch, made, strict=True)}
        load.demand_everything_done()
        seconds = time.monotonic() - began
        assert [worker.stop() for worker in workers] == [0, 0, 0]
        lines = sum(readable_log(worker, most=20) for worker in workers)
        figures = {
            "lost_transactions": lost_transactions(galera) - before,
            "jobs_a_second": round(number / seconds),
            "log_lines": lines,
        }
        print(figures)
        record(f"workers at three nodes, {'pinned' if pinned else 'competing'}", cases=number, **figures)
        assert load.ran_again() == 0


def test_a_transaction_that_lost_to_another_node_is_gone_as_a_whole(urls: list[str]) -> None:
    first, second = (create_engine(url) for url in urls[:2])
    with closing(sqlq.App(urls[0])) as app, Session(first) as winner, Session(second) as loser:
        send = app.task(name="shop.send")(lambda n: None)
        for session, n in ((winner, 1), (loser, 2)):
            session.execute(text("INSERT INTO orders VALUES (7)"))
            app.enqueue(send.new(n), session=session)
        winner.commit()
        with pytest.raises(OperationalError, match=r"1213.*try restarting transaction"):
            loser.commit()
        loser.rollback()
        assert [job.payload["args"] for job in app.jobs.list()] == [[1]]

        loser.execute(text("INSERT INTO orders VALUES (8)"))
        winner.execute(text("INSERT INTO orders VALUES (8)"))
        winner.commit()
        with second.connect() as watch:
            wait_until(lambda: committed(watch) == [7, 8], what="the order at the other node")
        with pytest.raises(sqlq.EnqueueError, match="MariaDB has undone the whole transaction"):
            app.enqueue(send.new(3), session=loser)
        with pytest.raises(PendingRollbackError):
            loser.commit()
    first.dispose()
    second.dispose()


def committed(conn: Connection) -> list[int]:
    conn.rollback()
    return list(conn.scalars(text("SELECT id FROM orders ORDER BY id")))


def test_a_unique_key_holds_for_all_nodes(urls: list[str]) -> None:
    engines = [create_engine(url) for url in urls]
    apps = [sqlq.App(url) for url in urls]
    keyed = [app.task(name="t")(lambda n: None).new(n).set(unique_key="k") for n, app in enumerate(apps)]
    with Session(engines[0]) as first, Session(engines[1]) as second:
        for app, job, session in zip(apps, keyed, (first, second), strict=False):
            assert app.enqueue(job, session=session).created
        first.commit()
        with pytest.raises(OperationalError, match="1213"):
            second.commit()
    made: list[sqlq.Job] = []

    def enqueue(app: sqlq.App, key: str) -> None:
        made.append(app.enqueue(app.tasks["t"].new(1).set(unique_key=key)))

    threads = [threading.Thread(target=enqueue, args=(app, f"k{n}")) for n in range(20) for app in apps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(job.created for job in made) == 20
    for engine in engines:
        engine.dispose()
    for app in apps:
        app.close()


def test_a_limit_holds_for_all_nodes(urls: list[str]) -> None:
    """Each of two admissions sees another job at the head of the line."""
    with closing(sqlq.App(urls[0])) as first, closing(sqlq.App(urls[1])) as second:
        limit = sqlq.Limit("one", running=1)
        made = [app.task(name="t", limit=limit)(lambda: None) for app in (first, second)]
        first.enqueue(made[0].new())
        with first.database.begin() as conn:
            keys, _ = admit.sweep_on(conn, "", 10)
        with second.database.engine.connect() as watch:
            watch = watch.execution_options(isolation_level="AUTOCOMMIT")
            limits = text("SELECT limit_key FROM sqlq_limits")
            wait_until(lambda: watch.scalars(limits).all(), what="the key at the other node")

        def admit_by_turns() -> None:
            with second.database.begin() as here:
                here.exec_driver_sql(
                    "INSERT INTO jobs (task, priority, limit_key, blocked_by, available_at, due_at) "
                    "VALUES ('t', 5, 'one', 'limit', '9998-01-01', UTC_TIMESTAMP(6))"
                )
                assert admit.look_on(here, keys, limit=0).number == 1
                with first.database.begin() as there:
                    assert admit.look_on(there, keys, limit=0).number == 1

        with pytest.raises(OperationalError, match="1213"):
            admit_by_turns()


def finished(worker: WorkerProcess, before: int) -> bool:
    return worker.log.read_text().count(") finished in ") > before


def test_a_node_that_was_killed_is_waited_for(
    galera: Sequence[Node], urls: list[str], tmp_path: Path
) -> None:
    with Scenario(tmp_path / "work", urls[0]) as load, ExitStack() as stack:
        workers = [stack.enter_context(load.working(url=url)) for url in urls[1:]]
        load.start()
        resumed = []
        for node, worker in zip(galera[1:], workers, strict=True):
            wait_until(partial(finished, worker, 0), what="the worker at work")
            node.stop("immediate")
            resumed.append(load.wait_for_finish(time.monotonic()))
            node.start()
            began, done = time.monotonic(), worker.log.read_text().count(") finished in ")
            wait_until(partial(finished, worker, done), what="the worker whose node is back")
            resumed.append(time.monotonic() - began)
        load.demand_everything_done()
        lines = sum(readable_log(worker, most=100) for worker in workers)
        assert [worker.stop() for worker in workers] == [0, 0]
        figures = {"ran_again": load.ran_again(), "refused": load.refused, "log_lines": lines}
        print(resumed, figures)
        record(
            "a node of Galera is killed",
            lost=0,
            cases=len(load.acknowledged),
            resume_seconds=resumed,
            **figures,
        )
        assert max(resumed) < RESUME_SECONDS


def test_a_schedule_fires_once_for_workers_at_all_nodes(
    galera: Sequence[Node], urls: list[str], tmp_path: Path
) -> None:
    before, fired = lost_transactions(galera), 50
    with Scenario(tmp_path / "work", urls[0], "beats") as load, ExitStack() as stack:
        workers = [stack.enter_context(load.working(url=url)) for url in urls]
        wait_until(lambda: load.count("finished_jobs") >= fired, what="the schedule's jobs")
        assert [worker.stop() for worker in workers] == [0, 0, 0]
        lines = sum(readable_log(worker, most=20) for worker in workers)
        figures = {"lost_transactions": lost_transactions(galera) - before, "log_lines": lines}
        account.demand("a schedule at three nodes", account.ticks_of(load.app), **figures)


def test_a_statement_in_autocommit_returns_its_job_last(urls: list[str]) -> None:
    """Where an INSERT has lost to another node, its node repeats it and returns the rows of both."""
    answers: list[list[int]] = []

    def insert(url: str) -> None:
        with closing(sqlq.App(url)) as app, create_engine(url).connect() as conn:
            driver: Any = conn.connection.dbapi_connection
            driver.autocommit(value=True)
            statement, parameters = app.statement(app.named("t").new())
            for _ in range(200):
                with driver.cursor() as cursor, suppress(pymysql.Error):  # it has lost again
                    cursor.execute(statement, parameters)
                    answers.append([id for (id,) in cursor.fetchall()])

    threads = [threading.Thread(target=insert, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(sqlq.App(urls[0])) as app, app.database.read() as conn:
        made = set(conn.scalars(text("SELECT id FROM jobs")))
    print(sum(len(ids) > 1 for ids in answers), len(answers))
    assert {ids[-1] for ids in answers} == made
    assert not made.intersection(id for ids in answers for id in ids[:-1])
