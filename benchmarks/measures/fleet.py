"""The load of many idle workers on one PostgreSQL, how soon one takes a lone job, and how fast all drain.

Transactions are those that PostgreSQL counts for the database, which its processes report with some delay. A
listener that receives a notification counts one, too. Connections are the sessions of the workers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.bench import Bench, Workers
from benchmarks.environments import TREE, variables
from benchmarks.measures import Figure, Measure, Medians, Target
from benchmarks.measures.latency import quantile
from benchmarks.peers import find
from benchmarks.servers import Place, UnavailableError
from benchmarks.subject import NOOP
from benchmarks.work import CALLS, Calls
from tests.kit.pgbouncer import pgbouncer
from tests.kit.postgresql import OwnPostgreSQL

REPORTED_SECONDS = 12.0
"""After so long idle processes of PostgreSQL have reported what they did."""
LONE_EVERY_MS = 1_000
MOST_LONE = 30
POOLED = 20
"""How many connections PgBouncer has to the server."""
JOBS_BEFORE = 20
"""How many jobs each process has run before."""


@dataclass(frozen=True)
class Fleet:
    """How many hosts, each with how many worker processes."""

    hosts: int = 1
    processes: int = 1
    simulated: bool = False
    connections: int = 0
    """How many connections they hold of PgBouncer, which has a few to the server."""


CASES = {
    "1 process": Fleet(),
    "2 processes": Fleet(processes=2),
    "8 processes": Fleet(processes=8),
    "24 processes": Fleet(processes=24),
    "8 hosts": Fleet(hosts=8),
    "24 hosts": Fleet(hosts=24),
    "100 hosts, simulated": Fleet(hosts=100, simulated=True),
    "1,000 hosts, simulated": Fleet(hosts=1_000, simulated=True),
    "10,000 connections of PgBouncer": Fleet(hosts=100, simulated=True, connections=10_000),
}


def fleet(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Let many workers come to rest, then enqueue one job each second, then many at once."""
    wanted = CASES[case]
    own = 3 * wanted.hosts * (1 if wanted.simulated else wanted.processes + 1)
    _have_room(bench, (POOLED if wanted.connections else own) + 20)
    lone = min(MOST_LONE, bench.size.ticks)
    subject = find("sqlq")
    with bench.place(subject, database) as place, _working(bench, place, wanted, lone) as workers:
        before = JOBS_BEFORE * (1 if wanted.simulated else wanted.hosts * wanted.processes)
        bench.inside(subject, "fill", place.url, NOOP, before)
        workers.wait_for(lambda: place.number(subject.left) == 0, "drained")
        with _beside(place) as beside:
            idle, connections = _at_rest(bench, beside, place)
            asked, began = beside.transactions(), time.monotonic()
            moments = bench.inside(subject, "tick", place.url, NOOP, lone, LONE_EVERY_MS)
            workers.wait_for(lambda: workers.calls.count() >= before + lone, "called for each job")
            time.sleep(min(REPORTED_SECONDS, bench.size.idle_seconds))
            each = (beside.transactions() - asked - idle * (time.monotonic() - began)) / lone
        waits = [
            (start - returned) / 1e6
            for (_, returned), start in zip(moments, workers.calls.starts(), strict=True)
        ]
        figures = {
            "transactions": idle,
            "connections": connections,
            "lone": each,
            "p50": quantile(waits, 50),
            "p99": quantile(waits, 99),
        }
        done = before + lone
        if not wanted.simulated:
            figures |= _drained(bench, place, workers, done)
            done += bench.size.jobs
        bench.check(subject, place, workers, done)
        return figures


def _at_rest(bench: Bench, beside: Beside, place: Place) -> tuple[float, float]:
    """Return the transactions a second, and the connections, of idle workers."""
    time.sleep(min(REPORTED_SECONDS, bench.size.idle_seconds))
    asked, began = beside.transactions(), time.monotonic()
    time.sleep(bench.size.idle_seconds)
    idle = (beside.transactions() - asked) / (time.monotonic() - began)
    return idle, beside.connections()


def _drained(bench: Bench, place: Place, workers: Workers, done: int) -> dict[str, float]:
    jobs = bench.size.jobs
    used = _processor_seconds(workers)
    place.rows(
        "INSERT INTO jobs (queue, task, payload, max_attempts) "
        f"SELECT 'default', 'benchmarks.tasks.noop', '{{\"args\": [-1]}}', 5 FROM generate_series(1, {jobs})"
    )
    with place.questions() as number:
        begun = workers.wait_for(
            lambda: workers.calls.count() >= done + jobs / 10, "through a tenth", look=0.002
        )
        first = workers.calls.count()
        ended = workers.wait_for(
            lambda: number(find("sqlq").left) == 0 and workers.calls.count() >= done + jobs, "drained"
        )
    python = (_processor_seconds(workers) - used) / jobs * 1e6
    return {"rate": (done + jobs - first) / max(ended - begun, 0.001), "python": python}


def _processor_seconds(workers: Workers) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in workers.family())


class Beside:
    """An observer that counts, on a connection to another database."""

    def __init__(self, connection: psycopg.Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def transactions(self) -> int:
        return self._number(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %(name)s"
        )

    def connections(self) -> int:
        return self._number(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %(name)s AND backend_type = 'client "
            "backend'"
        )

    def _number(self, question: str) -> int:
        row = self._connection.execute(question, {"name": self._name}).fetchone()
        assert row is not None
        return int(row[0])


@contextmanager
def _beside(place: Place) -> Iterator[Beside]:
    name = place.url.rpartition("/")[2].partition("?")[0]
    with psycopg.connect(place.url, dbname="postgres", autocommit=True) as connection:
        yield Beside(connection, name)


@contextmanager
def _working(bench: Bench, place: Place, wanted: Fleet, lone: int) -> Iterator[Workers]:
    """Run the workers, from when all of them are registered."""
    subject = find("sqlq")
    with tempfile.TemporaryDirectory(dir=bench.servers.folder) as name, ExitStack() as stack:
        folder = Path(name)
        calls = Calls(folder)
        calls.note_starts(lone)
        workers = Workers(calls, folder / "words", bench.patience)
        told = variables({CALLS: name} | subject.environment(place.url, 10))
        simulations: list[subprocess.Popen[str]] = []
        try:
            if wanted.simulated:
                url = place.url
                if wanted.connections:
                    url = stack.enter_context(_pooled(url, wanted.connections))
                    simulations.append(_simulate(told, url, wanted.connections - wanted.hosts, "held"))
                simulations.append(_simulate(told, url, wanted.hosts))
            else:
                (command,) = subject.workers(place.url, NOOP, 10, 1)
                for _ in range(wanted.hosts):
                    whole = [*command, "-p", str(wanted.processes)]
                    workers.start(bench.environments.command(subject, whole), told)
                entered = "SELECT count(*) FROM sqlq_workers"
                workers.wait_for(
                    lambda: place.number(entered) == wanted.hosts * wanted.processes, "up", look=0.2
                )
            yield workers
        finally:
            workers.stop()
            for simulation in simulations:
                simulation.kill()
                simulation.wait()


def _simulate(environment: dict[str, str], url: str, number: int, *words: str) -> subprocess.Popen[str]:
    simulation = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulated", url, str(number), *words],
        cwd=TREE,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert simulation.stdout is not None
    if simulation.stdout.readline() != "ready\n":
        raise RuntimeError("the simulated hosts ended")
    return simulation


@contextmanager
def _pooled(url: str, connections: int) -> Iterator[str]:
    if shutil.which("pgbouncer", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))) is None:
        raise UnavailableError("this case needs PgBouncer: apt-get install pgbouncer")
    with pgbouncer(url, pool=POOLED, clients=connections + 100) as pooler:
        yield pooler.url(url)


def _have_room(bench: Bench, connections: int) -> None:
    """Have the server take so many connections, if it is ours; a restart is needed for that."""
    server = bench.servers.postgresql()
    place = Place(server.url("postgres").replace("+psycopg", ""))
    if place.number("SELECT setting::int FROM pg_settings WHERE name = 'max_connections'") >= connections:
        return
    if not isinstance(server, OwnPostgreSQL):
        raise UnavailableError(f"the server takes fewer than {connections} connections")
    place.rows(f"ALTER SYSTEM SET max_connections = {connections}")
    server.restart()


def _own(case: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get("fleet", "postgresql", case, figure)


MEASURES = [
    Measure(
        "fleet",
        "Fleets of idle workers",
        "Worker processes with concurrency 10, on one host (`sqlq work -p N`) or as many hosts (so many "
        "`sqlq work`), that have run some jobs and then found none: the transactions PostgreSQL counts in "
        "a second, and the connections. Then one job each second: the transactions for each of them, and how "
        "soon it starts. Then {jobs} jobs at once, which no hint announces. Of simulated hosts there are "
        "connections alone, which ask what a real one asks.",
        {
            "transactions": Figure("per s idle", more_is_better=False, decimals=2),
            "connections": Figure("connections", more_is_better=False),
            "lone": Figure("transactions a lone job", more_is_better=False, decimals=1),
            "p50": Figure("ms p50", more_is_better=False, decimals=2),
            "p99": Figure("ms p99", more_is_better=False, decimals=2),
            "rate": Figure("jobs/s"),
            "python": Figure("µs of Python a job", more_is_better=False, decimals=1),
        },
        fleet,
        lambda bench, peers: [("postgresql", case) for case in CASES],
        [
            *(
                Target(
                    "postgresql",
                    case,
                    "transactions a second at rest",
                    _own(case, "transactions"),
                    most=wanted.hosts * (1 + 0.2 * (wanted.processes - 1)),
                )
                for case, wanted in CASES.items()
            ),
            *(
                Target(
                    "postgresql",
                    case,
                    "connections",
                    _own(case, "connections"),
                    most=wanted.hosts * (2 * (wanted.processes + 1) + 1),
                )
                for case, wanted in CASES.items()
                if not wanted.simulated
            ),
            Target(
                "postgresql", "8 processes", "transactions a lone job", _own("8 processes", "lone"), most=15
            ),
        ],
        smoke=lambda database, case: case == "2 processes",
        subjects=False,
        rounds=1,
    )
]
