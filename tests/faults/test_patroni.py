"""Failovers of Patroni under load: no acknowledged job is lost, no effect is doubled, and the same worker
processes go on.

`python -m tests.faults --patroni 30` runs thirty. Patroni and etcd come with pip install -e '.[ha]'.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlq
from tests.faults import account
from tests.faults.account import ROUNDS, record
from tests.faults.operated import Answer, answer
from tests.faults.patroni import TTL_SECONDS, Cluster, Member, is_installed, patroni_cluster
from tests.kit import execute, let_pass, wait_until
from tests.kit.postgresql import PostgreSQL
from tests.kit.scenario import Scenario
from tests.programs import effects
from tests.programs.shop import ACCOUNTS, SECRET

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_installed(), reason="NOT TESTED: no Patroni or no etcd; pip install -e '.[ha]'"
    ),
]
CALLERS = (
    "connect_timeout=3&keepalives_idle=5&keepalives_interval=2&keepalives_count=3&tcp_user_timeout=10000"
)
"""Recommended by docs/deploy.md to a caller's own engine."""
LISTENING_SECONDS = 0.25
"""Far less than the 1.25 s between two looks: a notification led to jobs that start so soon."""
RESUME_SECONDS = 5.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patroni_cluster() as cluster:
        yield cluster


@pytest.fixture
def shop(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    with Shop(tmp_path / "shop", cluster) as shop:
        monkeypatch.setenv(effects.VARIABLE, f"{shop.url}&{CALLERS}")
        yield shop


class Shop(Scenario):
    """Two producers on a database of the cluster, and who waits for results."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        server = PostgreSQL(make_url(cluster.leader().url()))
        name = make_url(server.create_database()).database or ""
        server.leave()
        super().__init__(folder, cluster.url(name), "beats")
        self.app.migrate()
        self.engine = create_engine(f"{self.url}&{CALLERS}", poolclass=NullPool)
        effects.create(self.engine)
        execute(self.engine, "CREATE TABLE orders (n INT PRIMARY KEY)")
        execute(self.engine, "CREATE TABLE probes (n INT)")
        self.ledger: dict[int, list[int]] = {}
        """The ids of the jobs of each acknowledged enqueue, by its number."""
        self.tried: set[int] = set()
        """The numbers enqueued, or not, in a transaction with a row of `orders`."""
        self.writes: list[float] = []
        """When commits of a probe were acknowledged by the primary; there is one each 20 ms."""
        self.answers: list[Future[Answer]] = []
        self.is_open, self._ready, self._ended = threading.Event(), threading.Event(), asyncio.Event()
        runs: list[Callable[[], None]] = [
            lambda: asyncio.run(self._wait_for_results()),
            *(partial(self._produce, own) for own in (True, False)),
            *(partial(self._probe, member.url(name)) for member in cluster.members),
        ]
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]

    def begin(self) -> None:
        self.is_open.set()
        for thread in self._threads:
            thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.is_open.set()
        if self._ready.is_set():
            self._loop.call_soon_threadsafe(self._ended.set)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(60)
        super().__exit__(*exc)

    def enqueue_one(self, *, own: bool = True, **options: Any) -> tuple[Any, int, float]:
        """Enqueue the next number, with `options` as a plain job, and enter it in the ledger. Return the job
        or flow, the number, and when it was acknowledged."""
        n = next(self._numbers)
        job = self.new("plain", n, SECRET).set(**options) if options else self._kind(n, own)
        if own:
            made: Any = self.app.enqueue(job)
        else:
            self.tried.add(n)
            with Session(self.engine) as session, session.begin():
                session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
                made = self.app.enqueue(job, session=session)
        acknowledged = time.monotonic()
        self.ledger[n] = [each.id for each in getattr(made, "jobs", [made])]
        return made, n, acknowledged

    def _kind(self, n: int, own: bool) -> Any:
        plain, pay = self.new("plain", n, SECRET), self.new("pay", n, SECRET)
        match n % 12:
            case 0 | 1 | 2:
                return pay
            case 3 | 4:
                return self.new("call", n, SECRET)
            case 5 if own:  # of one producer alone, so that ids rise with the numbers
                return self.new("book", n // 12 % ACCOUNTS, n, SECRET)
            case 6:
                return sqlq.chain(plain, sqlq.group(pay, plain), plain)
            case _:
                return plain

    async def _wait_for_results(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._ended.wait()

    def _produce(self, own: bool) -> None:
        self._ready.wait()
        while not self._over.wait(0.05):
            self.is_open.wait()
            try:
                job, n, _ = self.enqueue_one(own=own)
            except DBAPIError:
                self.refused += 1
                continue
            if n % 12 == 0:
                waiter = asyncio.run_coroutine_threadsafe(answer(self.app, job), self._loop)
                self.answers.append(waiter)

    def _probe(self, url: str) -> None:
        while not self._over.wait(0.02):
            with suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as conn:
                while not self._over.wait(0.02):
                    with suppress(psycopg.errors.ReadOnlySqlTransaction):
                        conn.execute("INSERT INTO probes VALUES (1)")
                        self.writes.append(time.monotonic())

    def wait_for_writes(self, number: int) -> None:
        before = len(self.writes)
        wait_until(lambda: len(self.writes) > before + number, what="a primary that takes writes")

    def missing(self) -> list[int]:
        """Return the ids of acknowledged jobs that are nowhere."""
        acknowledged = [id for ids in [*self.ledger.values()] for id in ids]  # producers may go on
        rows = set(self.scalars("SELECT id FROM job_states"))
        return [id for id in acknowledged if id not in rows]

    def figures(self, told: list[Answer]) -> dict[str, int]:
        """Judge all that has ended: figures of `account.MUST_BE_ZERO`, and a few more."""
        with self.engine.connect() as conn:
            query = text("SELECT id, task, payload FROM finished_jobs WHERE outcome = 'finished'")
            rows = [row for row in conn.execute(query) if not row.task.endswith((".beat", ".follow"))]
        numbers = {row.id: json.loads(row.payload)["args"][-2] for row in rows}
        acknowledged = {id for ids in self.ledger.values() for id in ids}
        written = Counter(effects.committed(self.engine))
        paid = {row.id for row in rows if row.task.endswith(".pay")}
        orders = set(self.scalars("SELECT n FROM orders"))
        plain = account.intervals(self.notes(), {})["plain"]
        return {
            **account.limits_of(self),
            **account.ticks_of(self.app),
            "lost": len(acknowledged - numbers.keys()),
            "in_doubt_and_there": len(numbers.keys() - acknowledged),
            "effects_difference": sum(written[id] != 1 for id in {*paid, *written}),
            "never_committed": len(orders ^ {n for n in numbers.values() if n in self.tried}),
            "told_wrong": sum(each.state != "finished" for each in told),
            "waited_for": len(told),
            "ran_again": len(plain) - len({run.job for run in plain}),
        }


def leads_another(cluster: Cluster, old: Member) -> bool:
    roles = cluster.roles()
    return any(role == "leader" for name, role in roles.items() if name != old.name)


def wait_for_another(cluster: Cluster, old: Member) -> None:
    wait_until(lambda: leads_another(cluster, old), timeout=90, what="another leader")


def kill(cluster: Cluster, leader: Member) -> None:
    leader.kill()
    wait_for_another(cluster, leader)
    leader.start()


def switchover(cluster: Cluster, leader: Member) -> None:
    (standby,) = (name for name, role in cluster.roles().items() if role == "sync_standby")
    cluster.ctl("switchover", "--leader", leader.name, "--candidate", standby, "--force")
    wait_for_another(cluster, leader)


def freeze(cluster: Cluster, leader: Member) -> None:
    leader.signal(signal.SIGSTOP)
    let_pass(TTL_SECONDS + 5, "the leader's time is over")
    leader.signal(signal.SIGCONT)
    wait_for_another(cluster, leader)


def kill_etcd(cluster: Cluster, leader: Member) -> None:
    def is_demoted() -> bool:
        try:
            return bool(leader.ask("SELECT pg_is_in_recovery()"))
        except psycopg.Error:
            return True

    cluster.kill_etcd()
    wait_until(is_demoted, what="Patroni's end of a leader that etcd does not confirm")
    cluster.start_etcd()
    cluster.leader()


FAULTS = {kill: 30, switchover: 8, freeze: 35, kill_etcd: 15}
"""For how many seconds from its beginning jobs become due."""


@pytest.mark.timeout(3600)  # for each round a minute, if need be
def test_failovers_lose_and_double_no_job(cluster: Cluster, shop: Shop) -> None:
    rounds, seed = int(os.environ.get(ROUNDS, "3")), 20_261_125
    faults = (list(FAULTS) * rounds)[:rounds]
    random.Random(seed).shuffle(faults)
    outages: list[tuple[float, float]] = []
    lone: dict[int, tuple[str, float]] = {}
    queues = ["default,follow,one", "default,follow,two"]
    with shop.working("-q", queues[0]) as one, shop.working("-q", queues[1]) as two:
        pids = one.children() + two.children()
        wait_until(shop.app.schedules.list, what="the schedule")
        shop.begin()
        for fault in faults:
            before = len(shop.writes)
            shop.wait_for_writes(20)
            for n in range(4 * FAULTS[fault]):
                shop.enqueue_one(delay=f"{n * 250}ms")
            fault(cluster, cluster.leader())
            cluster.wait_until_whole()
            shop.wait_for_writes(5)
            # the last write before the longest pause, and the first after it
            outages.append(max(pairwise(shop.writes[before:]), key=lambda pair: pair[1] - pair[0]))
            shop.is_open.clear()
            wait_until(shop.is_done, timeout=120, what=f"all jobs done after {fault.__name__}")
            for queue in ("one", "two") * 5:
                job, _, at = shop.enqueue_one(queue=queue)
                shop.app.wait_all([job], "30s")
                lone[job.id] = queue, at
            assert shop.missing() == [], f"after {fault.__name__}"
            assert one.children() + two.children() == pids, "a process was started anew"
            shop.is_open.set()
        shop.is_open.clear()
        wait_until(shop.is_done, timeout=120, what="all jobs done")
        told = [future.result(60) for future in shop.answers]
        assert {each.state for each in told} == {"finished"}, Counter(told)
        assert (one.stop(), two.stop()) == (0, 0)
        assert "Traceback" not in one.log.read_text() + two.log.read_text()
    begins = {each.job: each.at for each in reversed(shop.notes()) if each.what == "begin"}
    resumed = [min(at for at in begins.values() if at >= again) - again for _, again in outages]
    delays = {
        queue: [begins[id] - at for id, (of, at) in lone.items() if of == queue] for queue in ("one", "two")
    }
    for fault, (last, again), seconds in zip(faults, outages, resumed, strict=True):
        print(f"{fault.__name__}: no write for {again - last:.2f} s, a job {seconds:.3f} s after it")
    lone_seconds = [each for seconds in delays.values() for each in seconds]
    figures = shop.figures(told) | {"cases": len(shop.ledger)}
    account.demand(
        "failovers of Patroni", figures, seed=seed, failover_seconds=resumed, lone_seconds=lone_seconds
    )
    assert max(map(statistics.median, delays.values())) < LISTENING_SECONDS
    assert max(resumed) < RESUME_SECONDS


@pytest.mark.parametrize("synchronous", [True, False])
def test_only_an_asynchronous_standby_loses_jobs_when_replication_is_cut(
    cluster: Cluster, shop: Shop, synchronous: bool
) -> None:
    with cluster.synchronous(synchronous):
        shop.begin()
        shop.wait_for_writes(20)
        leader = cluster.leader()
        receivers = [
            psutil.Process(member.ask("SELECT pid FROM pg_stat_wal_receiver"))
            for member in cluster.members
            if member is not leader
        ]
        for receiver in receivers:
            receiver.suspend()
        let_pass(2, "producers go on")
        at_the_kill = len(shop.ledger)
        leader.kill()
        for receiver in receivers:
            receiver.kill()
        wait_for_another(cluster, leader)
        leader.start()
        cluster.wait_until_whole("sync_standby" if synchronous else "replica")
        shop.wait_for_writes(20)
        shop.is_open.clear()
        gone, acknowledged = len(shop.missing()), len(shop.ledger)
    print(f"synchronous: {synchronous}; {gone} gone of {acknowledged}, {at_the_kill} at the kill")
    record(f"a standby behind a cut link, synchronous: {synchronous}", cases=acknowledged)
    assert (gone > 0) is not synchronous
