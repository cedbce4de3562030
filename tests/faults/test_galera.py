"""Three nodes of Galera: row locks are those of one node, and the COMMIT shows who was first.

So a claim can be lost at its COMMIT, and a job never is. Workers are real processes, each at a node. The
nodes are of the tests' own MariaDB, with the library of Debian's package galera-4.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
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
from tests.kit import wait_until
from tests.kit.databases import migrate
from tests.kit.mariadb import OwnMariaDB
from tests.kit.postgresql import free_port
from tests.kit.processes import WorkerProcess
from tests.kit.scenario import RESUME_SECONDS, Scenario, readable_log


def library() -> Path | None:
    """Return the path of Galera's library; None where it is not installed."""
    return next(iter(sorted(Path("/usr").glob("l*/**/libgalera_smm.so"))), None)


class Node(OwnMariaDB):
    """A server that takes part in a cluster."""

    def __init__(self, *others: Node) -> None:
        provider = library()
        assert provider is not None
        self.channel, transfer = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._others = list(others)
        for other in others:
            other._others.append(self)
        options = f"gmcast.listen_addr=tcp://{self.channel};ist.recv_addr={transfer};gcache.size=128M"
        super().__init__(
            "--wsrep-on=ON",
            f"--wsrep-provider={provider}",
            f"--wsrep-provider-options={options}",
            f"--wsrep-node-address={self.channel}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-sst-receive-address=127.0.0.1:{free_port()}",
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
            account="nobody",  # as which a daemon of rsync's writes that root has started
        )

    def start(self, *settings: str) -> None:
        """Start the node where it stopped. The first one makes the cluster."""
        channels = ",".join(other.channel for other in self._others)
        address = f"--wsrep-cluster-address=gcomm://{channels}"
        super().start(address, *self._place(address), *settings)

    def _place(self, address: str) -> list[str]:
        """Return the option that names the last transaction that the node has, after its first start."""
        if not (self.directory / "data" / "grastate.dat").exists():
            return []
        recovery = subprocess.run(
            [*self._command, address, "--wsrep-recover"], capture_output=True, text=True, check=False
        )
        found = re.search(r"Recovered position: *(\S+)", recovery.stdout + recovery.stderr)
        assert found, recovery.stderr
        return [f"--wsrep-start-position={found[1]}"]

    def status(self, name: str) -> str:
        """Return a status variable of Galera's."""
        ((_, value),) = self.administer(f"SHOW STATUS LIKE 'wsrep_{name}'")
        return str(value)

    def _answers(self) -> bool:
        try:
            return self.status("ready") == "ON"
        except pymysql.Error:
            return False


@contextmanager
def cluster(number: int = 3) -> Iterator[Sequence[Node]]:
    """Run so many nodes of one cluster."""
    nodes: list[Node] = []
    try:
        for _ in range(number):
            nodes.append(Node(*nodes))
        yield nodes
    finally:
        for node in nodes:
            node.close()


pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="NOT TESTED: no Galera; Debian's package galera-4 has it"),
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


@pytest.mark.parametrize("pinned", [False, True], ids=["one-queue-for-all", "a-queue-for-each"])
def test_workers_at_all_nodes_run_each_job_once(urls: list[str], tmp_path: Path, pinned: bool) -> None:
    queues, number = [f"queue{i if pinned else ''}" for i in range(3)], 3_000
    with Scenario(tmp_path / "work", urls[0]) as load, ExitStack() as stack:
        workers = [
            stack.enter_context(load.working("-q", queue, url=url))
            for url, queue in zip(urls, queues, strict=True)
        ]
        for start in range(0, number, 300):
            batch = range(start, start + 300)
            jobs = [load.new("quick", n).set(queue=queues[n % 3]) for n in batch]
            made = load.app.enqueue_many(jobs)
            load.acknowledged |= {n: job.id for n, job in zip(batch, made, strict=True)}
        load.demand_everything_done()
        assert [worker.stop() for worker in workers] == [0, 0, 0]
        for worker in workers:
            readable_log(worker, most=20)
        account.record(f"workers at three nodes, {'pinned' if pinned else 'competing'}", cases=number)
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

    def enqueue(given: tuple[sqlq.App, str]) -> sqlq.Job:
        app, key = given
        return app.enqueue(app.tasks["t"].new(1).set(unique_key=key))

    with ThreadPoolExecutor(60) as pool:
        made = [*pool.map(enqueue, ((app, f"k{n}") for n in range(20) for app in apps))]
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


def test_a_killed_node_is_waited_for(galera: Sequence[Node], urls: list[str], tmp_path: Path) -> None:
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
        for worker in workers:
            readable_log(worker, most=100)
            assert worker.stop() == 0
        account.record("a node of Galera is killed", cases=len(load.acknowledged), resume_seconds=resumed)
        assert max(resumed) < RESUME_SECONDS


def test_a_schedule_fires_once_for_workers_at_all_nodes(urls: list[str], tmp_path: Path) -> None:
    with Scenario(tmp_path / "work", urls[0], "beats") as load, ExitStack() as stack:
        workers = [stack.enter_context(load.working(url=url)) for url in urls]
        wait_until(lambda: load.count("finished_jobs") >= 50, what="the schedule's jobs")
        for worker in workers:
            assert worker.stop() == 0
            readable_log(worker, most=80)  # with a line for each tick
        account.demand("a schedule at three nodes", account.ticks_of(load.app))


def test_a_statement_in_autocommit_returns_its_job_last(urls: list[str]) -> None:
    """Where an INSERT has lost to another node, its node repeats it and returns the rows of both."""

    def insert(url: str) -> list[list[int]]:
        answers: list[list[int]] = []
        with closing(sqlq.App(url)) as app, create_engine(url).connect() as conn:
            driver: Any = conn.connection.dbapi_connection
            driver.autocommit(value=True)
            statement, parameters = app.statement(app.named("t").new())
            for _ in range(200):
                with driver.cursor() as cursor, suppress(pymysql.Error):  # it has lost again
                    cursor.execute(statement, parameters)
                    answers.append([id for (id,) in cursor.fetchall()])
        return answers

    with ThreadPoolExecutor() as pool:
        answers = [ids for each in pool.map(insert, urls) for ids in each]
    with closing(sqlq.App(urls[0])) as app, app.database.read() as conn:
        made = set(conn.scalars(text("SELECT id FROM jobs")))
    assert {ids[-1] for ids in answers} == made
    assert not made.intersection(id for ids in answers for id in ids[:-1])
