"""The database blinks: restarts, lost connections, a network that swallows packets, a standby. Workers go on
by themselves.

Workers are real processes. Where the network is at fault they reach the server through a proxy. The producer
connects directly, so that its jobs are known while the worker is cut off.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.store.workers import look
from tests.faults import account, guard
from tests.kit import claim, let_pass, needs, wait_until
from tests.kit.mariadb import MariaDB, OwnMariaDB
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.processes import ROOT, WorkerProcess
from tests.kit.proxy import Pipe, Proxy, made
from tests.kit.scenario import RESUME_SECONDS, Scenario, readable_log
from tests.kit.standby import standby_of

pytestmark = pytest.mark.integration


@pytest.fixture
def load(tmp_path: Path, database_url: str) -> Iterator[Scenario]:
    with Scenario(tmp_path / "work", database_url) as load:
        yield load


@contextmanager
def working(load: Scenario, url: str, *options: str) -> Iterator[WorkerProcess]:
    """A worker that has shown that it works, while the producer goes on."""
    with load.working("--lease", "5s", *options, url=url) as worker:
        load.start()
        wait_until(lambda: len(load.ran()) >= 5, timeout=30, what="the first jobs done")
        yield worker
        assert worker.process.poll() is None, "the worker is gone:\n" + worker.log.read_text()[-5000:]
        assert worker.stop() == 0


def end(load: Scenario, worker: WorkerProcess, guarantee: str, resumed: list[float], *, faults: int) -> None:
    load.demand_everything_done()
    readable_log(worker, most=20 + 10 * faults)
    assert max(resumed) < RESUME_SECONDS
    figures = {"lost": 0, "cases": len(load.acknowledged), **damaged_tables(load)}
    account.demand(guarantee, figures, resume_seconds=resumed)


def damaged_tables(load: Scenario) -> dict[str, int]:
    """Return how many tables are damaged, for the scorecard; nothing where that is not known."""
    if load.engine.dialect.name != "mariadb":
        return {}
    with load.engine.connect() as conn:
        checked = conn.execute(text("CHECK TABLE jobs, finished_jobs, failed_jobs EXTENDED")).all()
    assert len(checked) == 3
    return {"damaged": sum(table.Msg_text != "OK" for table in checked)}


# -- outages that pass ---------------------------------------------------------------------------------------

Outage = Callable[[Scenario, Proxy], Iterator[None]]
"""Yields after each fault, once it is over."""
BACKENDS = {
    "postgresql": (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        "SELECT pg_terminate_backend(:pid)",
    ),
    "mariadb": (
        "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
        "KILL CONNECTION :pid",
    ),
}


def killed_backends(seconds: int, load: Scenario, proxy: Proxy) -> Iterator[None]:
    chance, killed = random.Random(20_261_121), 0
    backends, kill = BACKENDS[load.engine.dialect.name]
    with load.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        for _ in range(seconds * 10):
            if pids := list(conn.scalars(text(backends))):
                with suppress(DBAPIError):  # it has ended by itself
                    conn.execute(text(kill), {"pid": chance.choice(pids)})
                killed += 1
            let_pass(0.1, "the fault lasts")
    yield
    assert killed > seconds * 3


def await_runs(load: Scenario, number: int) -> None:
    enough = len(load.ran()) + number
    wait_until(lambda: len(load.ran()) >= enough, timeout=30, what="work going on")


def resets(load: Scenario, proxy: Proxy) -> Iterator[None]:
    for _ in range(5):
        await_runs(load, 30)
        assert proxy.drop(made) >= 2
        yield


def swallowed(seconds: Sequence[int], *directions: str) -> Outage:
    def outage(load: Scenario, proxy: Proxy) -> Iterator[None]:
        for each in seconds:
            proxy.deaf(*directions)
            let_pass(each, "the fault lasts")
            proxy.hear()
            yield

    return outage


def lost_claims(load: Scenario, proxy: Proxy) -> Iterator[None]:
    """Jobs that were claimed without the worker's knowledge come back when the lease runs out."""
    proxy.lose("reply", "commit", "reply", only=lambda link: b"SET reserved_at" in link.asked)
    wait_until(lambda: proxy.losses == 0, timeout=30, what="all of them lost")
    yield
    load.stop()


PACKETS = "the network swallows packets"
OUTAGES = [
    ("backends are killed ten times a second", 2, partial(killed_backends, 2)),
    ("connections are reset", 5, resets),
    (f"{PACKETS} both ways", 1, swallowed([2])),
]
LONG_OUTAGES = [
    ("backends are killed ten times a second", 15, partial(killed_backends, 15)),
    (f"{PACKETS} to server", 1, swallowed([2], "to server")),
    (f"{PACKETS} to client", 1, swallowed([2], "to client")),
    (f"{PACKETS} for long and again", 3, swallowed([12, 6, 3])),
    ("COMMITs of claims, or the replies to them, are lost", 6, lost_claims),
]


@needs("server")
@pytest.mark.parametrize(
    ("guarantee", "faults", "outage"),
    [*OUTAGES, *(pytest.param(*row, marks=pytest.mark.slow) for row in LONG_OUTAGES)],
)
def test_workers_survive_an_outage(
    load: Scenario, proxy: Proxy, guarantee: str, faults: int, outage: Outage
) -> None:
    with working(load, proxy.url(load.url)) as worker:
        resumed = [load.wait_for_finish(time.monotonic()) for _ in outage(load, proxy)]
        end(load, worker, guarantee, resumed, faults=faults)
        if outage is resets:
            # a new connection is to be had at once; on a busy machine it may meet the next reset
            assert worker.log.read_text().count("does not answer") < len(resumed)
        if outage is lost_claims:
            assert load.ran_again() == 0


@needs("server")
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_survive_crashes_of_the_server(
    load: Scenario, restartable_server: OwnPostgreSQL | OwnMariaDB, times: int
) -> None:
    resumed = []
    with working(load, load.url) as worker:
        for _ in range(times):
            restartable_server.restart(mode="immediate")
            resumed.append(load.wait_for_finish(time.monotonic()))
            enough = len(load.acknowledged) + 100
            more = partial(lambda wanted: len(load.acknowledged) >= wanted, enough)
            wait_until(more, timeout=60, what="the load going on")
        end(load, worker, "the server crashes under load", resumed, faults=times)


# -- connections that die ------------------------------------------------------------------------------------


@needs("listen")
def test_workers_survive_a_dead_listening_connection(load: Scenario, proxy: Proxy) -> None:
    with working(load, proxy.url(load.url)) as worker:
        (first,) = wait_until(lambda: proxy.links(listens), what="the worker listening")
        wait_until(lambda: b"sqlq_" in first.answered, what="a hint arriving")
        proxy.deaf(only=lambda link: link is first)
        (second,) = wait_until(
            lambda: [link for link in proxy.links(listens) if link is not first],
            timeout=30,
            what="another connection",
        )
        wait_until(lambda: b"sqlq_" in second.answered, what="a hint arriving again")
        resumed = [load.wait_for_finish(time.monotonic())]
        end(load, worker, "the connection that listens dies in silence", resumed, faults=1)


def listens(link: Pipe) -> bool:
    return link.listens


def settles(link: Pipe) -> bool:
    return b"finished_jobs" in link.asked


@needs("server")
def test_settles_survive_the_loss_of_commits_and_of_replies_to_them(load: Scenario, proxy: Proxy) -> None:
    """The lease is long: a settle that was lost would show as a job that is still running, or as one that ran
    again."""
    with load.working(url=proxy.url(load.url)) as worker:
        load.start()
        wait_until(lambda: len(load.ran()) >= 5, timeout=30, what="the first jobs done")
        proxy.lose("reply", "commit", "reply", "reply", "commit", only=settles)
        wait_until(lambda: proxy.losses == 0, timeout=30, what="all of them lost")
        resumed = [load.wait_for_finish(time.monotonic())]
        load.stop()
        wait_until(lambda: load.count("jobs") == 0, timeout=20, what="all settled before leases run out")
        end(load, worker, "COMMITs of settles, or the replies to them, are lost", resumed, faults=5)
        assert "lost" not in worker.log.read_text()
        assert load.ran_again() == 0
        assert worker.stop() == 0


@needs("server")
def test_an_enqueue_replaces_a_dead_connection(tmp_path: Path, database_url: str, proxy: Proxy) -> None:
    with Scenario(tmp_path / "work", proxy.url(database_url)) as load:
        for _ in range(5):
            load.enqueue_next()
            proxy.drop()
        assert (load.refused, len(load.acknowledged), load.count("jobs")) == (0, 5, 5)


@needs("server")
def test_an_enqueue_whose_commit_is_in_doubt_is_not_repeated(
    tmp_path: Path, database_url: str, proxy: Proxy
) -> None:
    with Scenario(tmp_path / "work", proxy.url(database_url)) as load:
        load.enqueue_next()
        proxy.lose("reply", "commit")
        load.enqueue_next()  # committed, and the caller gets an error, for nobody can know
        load.enqueue_next()  # not committed
        assert (load.refused, len(load.acknowledged), load.count("jobs")) == (2, 1, 2)


# -- a standby -----------------------------------------------------------------------------------------------


@needs("sessions")
def test_workers_wait_for_the_promotion_of_a_standby(
    tmp_path: Path, proxy: Proxy, restartable_postgresql: OwnPostgreSQL, load: Scenario
) -> None:
    with standby_of(restartable_postgresql) as standby, working(load, proxy.url(load.url)) as worker:
        # what was acknowledged is on the standby, and that becomes the primary
        proxy.target = standby.port
        proxy.drop()
        load.stop()
        enqueued = load.count("jobs")
        standby.catch_up()
        wait_until(lambda: worker.said("takes no writes"), timeout=30, what="the worker saying what it met")
        standby.promote()
        promoted = time.monotonic()
        with Scenario(tmp_path / "after", standby.url(make_url(load.url).database or "")) as after:
            wait_until(
                lambda: after.count("jobs") == 0,
                timeout=30,
                what="what was enqueued before done on the new primary",
            )
            resumed = [time.monotonic() - promoted] if enqueued else [0.0]
            assert after.count("finished_jobs") == len(load.acknowledged)
        readable_log(worker, most=30)
        text = worker.log.read_text()
        told = [line for line in text.splitlines() if "takes no writes" in line or " is back " in line]
        assert text.count("takes no writes") == 1, told
        assert max(resumed) < RESUME_SECONDS
        account.record("a standby is waited out", cases=len(load.acknowledged), resume_seconds=resumed)


@needs("listen")
def test_an_empty_look_at_a_server_that_takes_no_writes_is_refused(database_url: str) -> None:
    url = make_url(database_url).update_query_dict({"options": "-c default_transaction_read_only=on"})
    with closing(sqlq.App(url)) as app, pytest.raises(DBAPIError, match="the server is read-only"):
        look.due_in(app.database, look.KnownQueues())


@needs("mariadb")
def test_workers_wait_while_no_write_is_taken(tmp_path: Path, database_url: str, mariadb: MariaDB) -> None:
    """As while a primary is handed over. It stops no administrator, so the worker is another user."""
    name, url = f"sqlq_{uuid4().hex[:12]}", make_url(database_url)
    mariadb.administer(f"CREATE USER {name}")
    mariadb.administer(f"GRANT ALL ON {url.database}.* TO {name}")
    own = url.set(username=name).render_as_string(hide_password=False)
    try:
        with Scenario(tmp_path / "work", own) as load, working(load, own) as worker:
            mariadb.administer("SET GLOBAL read_only = 1")
            with pytest.raises(DBAPIError, match="the server is read-only"):
                look.due_in(load.app.database, look.KnownQueues())  # long before the next write
            wait_until(lambda: worker.said("takes no writes"), timeout=30, what="the worker saying so")
            mariadb.administer("SET GLOBAL read_only = 0")
            resumed = [load.wait_for_finish(time.monotonic())]
            end(load, worker, "a server that takes no writes is waited out", resumed, faults=2)
    finally:
        mariadb.administer("SET GLOBAL read_only = 0")
        mariadb.administer(f"DROP USER {name}")


# -- waits that end ------------------------------------------------------------------------------------------


SECONDS = 2
CLAIM = f"""
import sys
from sqlq.config import constants
constants.IDLE_TRANSACTION_MS = {SECONDS * 1000}
import sqlq
from tests.kit import claim_on
database = sqlq.App(sys.argv[1]).database
with database.begin() as conn:
    (job,) = claim_on(conn, ["default"], limit=10, owner="the lost", lease_ms=30_000)
    print("claimed", flush=True)
    sys.stdin.readline()
print("committed", flush=True)
"""


@needs("row_locks")
@pytest.mark.parametrize("way", ["frozen", "vanished"])
def test_a_host_that_is_lost_in_mid_transaction_frees_its_jobs(
    app: sqlq.App, engine: Engine, database_url: str, proxy: Proxy, way: str
) -> None:
    guard.install(engine)
    made = app.enqueue(app.task(name="t")(lambda: None).new())
    host = subprocess.Popen(
        [sys.executable, "-c", CLAIM, proxy.url(database_url)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == "claimed\n"
        if way == "frozen":
            host.send_signal(signal.SIGSTOP)
        else:
            proxy.deaf()
        assert claim(app) == []
        mine = wait_until(lambda: claim(app), timeout=30, what="the job's row being free")
        assert mine[0].lease_token == 1, "the claim of the lost host was rolled back"
        host.send_signal(signal.SIGCONT)
        proxy.hear()
        said, errors = host.communicate("\n", timeout=60)
        assert "committed" not in said
        assert "sqlalchemy.exc" in errors
        assert app.jobs.get(made.id).reserved_by == "me"
    finally:
        host.kill()
        host.communicate()


@needs("server")
def test_every_wait_has_a_timeout(
    tmp_path: Path, database_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of call, on a connection that was good and on one that is being made."""
    from sqlq.database import database as databases
    from sqlq.database.timeouts import Use

    short = Use(0.5, 0.5, 2)
    monkeypatch.setattr(databases, "LOOPS", Use(0.5, 2.0, 2))
    with Scenario(tmp_path / "work", proxy.url(database_url)) as load:
        database = databases.Address(make_url(proxy.url(database_url)), None, None).open(use=short)

        def ask(opened: Callable[[], Any]) -> Any:
            with opened() as conn:
                return conn.execute(text("SELECT 1")).scalar()

        calls: tuple[Callable[[], Any], ...] = (
            partial(ask, database.begin),
            partial(ask, database.read),
            lambda: database.run(lambda conn: conn.execute(text("SELECT 1")).scalar(), tries=1),
        )
        for call in calls:
            assert call() == 1
            for _ in ("a connection that was good", "one that is being made"):
                proxy.deaf()
                began = time.monotonic()
                with pytest.raises(DBAPIError, match=r"no answer within 0\.5 s|timeout|timed out"):
                    call()
                assert time.monotonic() - began < RESUME_SECONDS
            proxy.hear()
            assert call() == 1
        database.close()
        load.enqueue_next()
