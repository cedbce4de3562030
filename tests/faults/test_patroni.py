"""Failovers of Patroni under load: no acknowledged job is lost, no effect is doubled, and the same worker
processes go on.

`python -m tests.faults --patroni 30` runs thirty. Patroni and etcd come with pip install -e '.[ha]'.
"""

from __future__ import annotations

import asyncio
import itertools
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
from tests.faults import effects
from tests.faults.limited import ACCOUNTS, RUNNING, intervals, most_at_once, notes
from tests.faults.limited import MODULE as LIMITED
from tests.faults.operated import Answer, answer
from tests.faults.patroni import TTL_SECONDS, Cluster, Member, is_installed, patroni_cluster
from tests.faults.scorecard import MUST_BE_ZERO, ROUNDS, record
from tests.faults.ticks import account, moments_of
from tests.kit import let_pass, wait_until
from tests.kit.postgresql import PostgreSQL
from tests.kit.processes import worker_process

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_installed(), reason="NOT TESTED: there is no Patroni, or no etcd; pip install -e '.[ha]'"
    ),
]
MODULE = f"""{LIMITED}
from tests.faults.effects import have_effect

@app.task(schedule=sqlq.Schedule(every="1s", catch_up="all"))
def beat():
    pass

@app.task
def plain(n):
    note("begin", "plain", sqlq.current_job().id)
    note("end", "plain", sqlq.current_job().id)

@app.task(max_attempts=99, backoff="10ms")
def pay(n):
    have_effect()
"""
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
    shop = Shop(tmp_path / "shop", cluster)
    monkeypatch.setenv(effects.VARIABLE, f"{shop.url}&{CALLERS}")
    yield shop
    shop.close()


class Shop:
    """Two producers on a database of the cluster, and who waits for results.

    The file `ledger` takes a line for each acknowledged enqueue: its number, and the ids of its jobs.
    """

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        folder.mkdir()
        (folder / "fire.py").write_text(MODULE)
        server = PostgreSQL(make_url(cluster.leader().url()))
        name = make_url(server.create_database()).database or ""
        server.leave()
        self.folder, self.url = folder, cluster.url(name)
        self.app = sqlq.App(self.url)
        self.app.migrate()
        self._engine = create_engine(f"{self.url}&{CALLERS}", poolclass=NullPool)
        effects.create(self._engine)
        with self._engine.begin() as conn:
            conn.execute(text("CREATE TABLE orders (n INT PRIMARY KEY)"))
            conn.execute(text("CREATE TABLE probes (n INT)"))
        self.plain = self.app.task(name="fire.plain")(lambda n: None)
        self._pay = self.app.task(name="fire.pay", max_attempts=99)(lambda n: None)
        limits = sqlq.Limit("stripe", running=RUNNING), sqlq.Serial("account:{account}")
        self._call = self.app.task(name="fire.call", limit=limits[0], max_attempts=20)(lambda n: None)
        self._book = self.app.task(name="fire.book", limit=limits[1], max_attempts=20)(
            lambda account, n: None
        )
        self.refused = 0
        self.tried: set[int] = set()
        """The numbers enqueued, or not, in a transaction with a row of `orders`."""
        self.writes: list[float] = []
        """When commits of a probe were acknowledged by the primary; there is one each 20 ms."""
        self.answers: list[Future[Answer]] = []
        self._ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._numbers = itertools.count()
        self._over, self.is_open = threading.Event(), threading.Event()
        self._ready, self._ended = threading.Event(), asyncio.Event()
        runs: list[Callable[[], None]] = [
            lambda: asyncio.run(self._wait_for_results()),
            *(partial(self._produce, own) for own in (True, False)),
            *(partial(self._probe, member.url(name)) for member in cluster.members),
        ]
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]

    def start(self) -> None:
        self.is_open.set()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        self.is_open.set()
        if self._ready.is_set():
            self._loop.call_soon_threadsafe(self._ended.set)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(60)
        self.app.close()
        os.close(self._ledger)

    def enqueue(self, *, own: bool = True, **options: Any) -> tuple[Any, int, float]:
        """Enqueue the next number, with `options` as a plain job, and note that in the ledger. Return the job
        or flow, the number, and when it was acknowledged."""
        n = next(self._numbers)
        job = self.plain.new(n).set(**options) if options else self._kind(n, own)
        if own:
            made: Any = self.app.enqueue(job)
        else:
            self.tried.add(n)
            with Session(self._engine) as session, session.begin():
                session.execute(text("INSERT INTO orders VALUES (:n)"), {"n": n})
                made = self.app.enqueue(job, session=session)
        acknowledged = time.monotonic()
        ids = " ".join(str(each.id) for each in getattr(made, "jobs", [made]))
        os.write(self._ledger, f"{n} {ids}\n".encode())
        return made, n, acknowledged

    def _kind(self, n: int, own: bool) -> Any:
        plain, pay = self.plain.new(n), self._pay.new(n)
        match n % 12:
            case 0 | 1 | 2:
                return pay
            case 3 | 4:
                return self._call.new(n)
            case 5 if own:  # of one producer alone, so that ids rise with the numbers
                return self._book.new(n // 12 % ACCOUNTS, n)
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
                job, n, _ = self.enqueue(own=own)
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

    def acknowledged(self) -> dict[int, list[int]]:
        lines = (self.folder / "ledger").read_text().splitlines()
        return {int(n): [int(id) for id in ids] for n, *ids in map(str.split, lines)}

    def scalars(self, query: str) -> list[int]:
        with self._engine.connect() as conn:
            return list(conn.scalars(text(query)))

    def missing(self) -> list[int]:
        """Return the ids of acknowledged jobs that are nowhere."""
        acknowledged = self.acknowledged()  # before the look: producers may go on
        there = set(self.scalars("SELECT id FROM job_states"))
        return [id for ids in acknowledged.values() for id in ids if id not in there]

    def figures(self, told: list[Answer]) -> dict[str, int]:
        """Judge all that has ended: figures of `scorecard.MUST_BE_ZERO`, and a few more."""
        query = text("SELECT id, task, payload FROM finished_jobs WHERE outcome = 'finished'")
        with self._engine.connect() as conn:
            rows = conn.execute(query).all()
        ends = {row.id: row.task for row in rows}
        payloads = {row.id: json.loads(row.payload)["args"] for row in rows if row.task != "fire.beat"}
        written = Counter(self.scalars("SELECT job FROM effects"))
        paid = {id for id, task in ends.items() if task == "fire.pay"}
        runs = intervals(notes(self.folder), {})
        serial = [runs[f"account:{account}"] for account in range(ACCOUNTS)]
        ticks = self.app.jobs.list(task="fire.beat", limit=100_000)
        first = min(job.scheduled_for for job in ticks if job.scheduled_for)
        (beat,) = self.app.schedules.list()
        moments = [moment for moment in moments_of(beat, first) if moment >= first]
        ticks_lost, ticks_doubled = account(ticks, {beat.name: moments})
        acknowledged = {id for ids in self.acknowledged().values() for id in ids}
        orders = set(self.scalars("SELECT n FROM orders"))
        return {
            "lost": len(acknowledged - ends.keys()),
            "in_doubt_and_there": len(payloads.keys() - acknowledged),
            "effects_difference": sum(written[id] != 1 for id in {*paid, *written}),
            "never_committed": len(
                orders ^ {args[-1] for args in payloads.values() if args[-1] in self.tried}
            ),
            "ticks_lost": ticks_lost,
            "ticks_doubled": ticks_doubled,
            "told_wrong": sum(each.state != "finished" for each in told),
            "over_the_limit": max(0, most_at_once(runs["stripe"]) - RUNNING)
            + sum(most_at_once(each) - 1 for each in serial),
            "out_of_order": sum(b[2] < a[2] for each in serial for a, b in pairwise(each)),
            "waited_for": len(told),
            "ran_again": len(runs["plain"]) - len({id for *_, id in runs["plain"]}),
        }

    def is_done(self) -> bool:
        return self.scalars("SELECT count(*) FROM jobs WHERE task <> 'fire.beat'") == [0]


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
    start = partial(worker_process, shop.folder, "fire:app", shop.url)
    with start("-q", "default,one") as one, start("-q", "default,two") as two:
        pids = one.children() + two.children()
        wait_until(shop.app.schedules.list, what="the schedule")
        shop.start()
        for fault in faults:
            before = len(shop.writes)
            shop.wait_for_writes(20)
            for n in range(4 * FAULTS[fault]):
                shop.enqueue(delay=f"{n * 250}ms")
            fault(cluster, cluster.leader())
            cluster.wait_until_whole()
            shop.wait_for_writes(5)
            # the last write before the longest pause, and the first after it
            outages.append(max(pairwise(shop.writes[before:]), key=lambda pair: pair[1] - pair[0]))
            shop.is_open.clear()
            wait_until(shop.is_done, timeout=120, what=f"all jobs done after {fault.__name__}")
            for queue in ("one", "two") * 5:
                job, _, at = shop.enqueue(queue=queue)
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
    found = notes(shop.folder)
    begins = {(each.key, each.n): each.at for each in reversed(found) if each.what == "begin"}
    resumed = [min(at for at in begins.values() if at >= again) - again for _, again in outages]
    delays = {
        queue: [begins["plain", id] - at for id, (of, at) in lone.items() if of == queue]
        for queue in ("one", "two")
    }
    figures = shop.figures(told)
    for fault, (last, again), seconds in zip(faults, outages, resumed, strict=True):
        print(f"{fault.__name__}: no write for {again - last:.2f} s, a job {seconds:.3f} s after it")
    print(figures)
    record(
        "failovers of Patroni",
        cases=len(shop.acknowledged()),
        seed=seed,
        rounds=rounds,
        refused=shop.refused,
        failover_seconds=resumed,
        lone_seconds=[each for seconds in delays.values() for each in seconds],
        **figures,
    )
    assert not [name for name in MUST_BE_ZERO if figures.get(name)], figures
    assert max(map(statistics.median, delays.values())) < LISTENING_SECONDS
    assert max(resumed) < RESUME_SECONDS


@pytest.mark.parametrize("synchronous", [True, False])
def test_only_an_asynchronous_standby_loses_jobs_when_replication_is_cut(
    cluster: Cluster, shop: Shop, synchronous: bool
) -> None:
    with cluster.synchronous(synchronous):
        shop.start()
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
        at_the_kill = len(shop.acknowledged())
        leader.kill()
        for receiver in receivers:
            receiver.kill()
        wait_for_another(cluster, leader)
        leader.start()
        cluster.wait_until_whole("sync_standby" if synchronous else "replica")
        shop.wait_for_writes(20)
        shop.is_open.clear()
        gone, acknowledged = len(shop.missing()), len(shop.acknowledged())
    print(f"synchronous: {synchronous}; {gone} gone of {acknowledged}, {at_the_kill} at the kill")
    which = "a synchronous" if synchronous else "an asynchronous"
    record(f"{which} standby behind a cut link", cases=acknowledged, gone=gone)
    assert (gone > 0) is not synchronous
