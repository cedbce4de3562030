"""A scenario: a program of `tests/programs`, its workers, who enqueues, and the faults that meet them."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import random
import re
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.model.job import JobDetails
from tests.kit.processes import WorkerProcess, worker_process
from tests.kit.waiting import wait_until
from tests.programs.notes import Note, notes

RESUME_SECONDS = 15.0
"""The limit for a loaded machine. A quiet one takes less than five seconds, which the scorecard shows."""
OF_ONE_JOB = re.compile(r"\) finished in |: lease lost, ")


class Scenario:
    """The jobs, workers and faults around one database. `options` are those of every worker.

    A worker is forked, which is fast, unless it is to be started `anew`, as people do.
    """

    def __init__(
        self, folder: Path, url: str, program: str = "shop", *options: str, anew: bool = False
    ) -> None:
        folder.mkdir()
        self.folder, self.url = folder, url
        self.program = importlib.import_module(f"tests.programs.{program}")
        self._tasks = {name.rpartition(".")[2]: task for name, task in self.program.app.tasks.items()}
        self.app = sqlq.App(url)
        self.engine = create_engine(url, poolclass=NullPool)
        self.hosts: list[WorkerProcess] = []
        self.killed: dict[int, float] = {}
        """When each process was killed, by the monotonic clock."""
        self.made: dict[int, sqlq.NewJob] = {}
        self.acknowledged: dict[int, int] = {}
        """The ids of the producer's jobs by their numbers."""
        self.refused = 0
        self._options, self._anew = options, anew
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._producers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.app.close()
        with warnings.catch_warnings():
            # a connection that breaks while SQLAlchemy sets it up is left to the collector, open as far as
            # its driver knows
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    # -- who enqueues ----------------------------------------------------------------------------------------

    def new(self, task: str, *args: Any) -> sqlq.NewJob:
        job: sqlq.NewJob = self._tasks[task].new(*args)
        return job

    def enqueue(self, task: str, *args: Any) -> int:
        return self.enqueue_all([self.new(task, *args)])[0]

    def enqueue_all(self, jobs: Iterable[sqlq.NewJob]) -> list[int]:
        jobs = list(jobs)
        ids = [job.id for job in self.app.enqueue_many(jobs)]
        self.made |= dict(zip(ids, jobs, strict=True))
        return ids

    def enqueue_next(self) -> None:
        """Enqueue the next number; the database refusing it is an error that the caller sees, not a loss."""
        n = next(self._numbers)
        try:
            self.acknowledged[n] = self.app.enqueue(self.new("quick", n)).id
        except DBAPIError:
            self.refused += 1

    def produce(self) -> None:
        """Enqueue number after number until stopped."""
        while not self._over.wait(0.01):
            self.enqueue_next()

    def start(self, producers: int = 1) -> None:
        self._producers = [threading.Thread(target=self.produce, daemon=True) for _ in range(producers)]
        for producer in self._producers:
            producer.start()

    def stop(self) -> None:
        self._over.set()
        for producer in self._producers:
            producer.join(60)

    # -- workers ---------------------------------------------------------------------------------------------

    @contextmanager
    def working(self, *options: str, url: str | None = None, ready: bool = True) -> Iterator[WorkerProcess]:
        """Run `sqlq work` on the program while a block lasts."""
        name, url = f"{self.program.__name__}:app", url or self.url
        options = (*self._options, *options)
        with worker_process(self.folder, name, url, *options, ready=ready, anew=self._anew) as worker:
            yield worker

    @contextmanager
    def working_at(self, number: int, *options: str) -> Iterator[None]:
        """Have so many hosts work while a block lasts. One that is killed is there again at once."""
        self._options = options
        self.hosts = [self._host() for _ in range(number)]
        try:
            for host in self.hosts:
                host.wait_ready()
            yield
            assert {host.stop() for host in self.hosts} == {0}
        finally:
            for host in self.hosts:
                try:
                    host.kill()
                except ProcessLookupError:  # it has ended, or has no group yet
                    host.process.kill()

    def _host(self) -> WorkerProcess:
        return WorkerProcess(self.folder, f"{self.program.__name__}:app", self.url, *self._options)

    def logs(self) -> str:
        return "".join(log.read_text() for log in self.folder.glob("worker-*.log"))

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    # -- what handlers did -----------------------------------------------------------------------------------

    def notes(self) -> list[Note]:
        return notes(self.folder)

    def starts(self, id: int) -> list[Note]:
        return [note for note in self.notes() if (note.job, note.what) == (id, "begin")]

    def started(self, id: int, times: int = 1) -> bool:
        return len(self.starts(id)) >= times

    def ran(self) -> Counter[int]:
        """Return how often each number began to run."""
        return Counter(note.n for note in self.notes() if note.what == "begin")

    def ran_again(self) -> int:
        """How many numbers ran more than once: allowed, but worth knowing."""
        return sum(times > 1 for times in self.ran().values())

    # -- waiting ---------------------------------------------------------------------------------------------

    def count(self, rows: str) -> int:
        with self.engine.connect() as conn:
            return int(conn.scalar(text(f"SELECT count(*) FROM {rows}")) or 0)

    def scalars(self, query: str) -> list[Any]:
        with self.engine.connect() as conn:
            return list(conn.scalars(text(query)))

    def is_done(self) -> bool:
        """Whether all jobs have ended but those of schedules."""
        return self.count("jobs WHERE schedule IS NULL") == 0

    def wait_done(self, timeout: float = 120) -> None:
        wait_until(self.is_done, timeout=timeout, what="all jobs done")

    def wait_for_notes(self, number: int) -> None:
        """Wait until so many more runs have begun or ended, or all jobs are done."""
        before = len(self.notes())
        wait_until(lambda: len(self.notes()) >= before + number or self.is_done(), what="more of the jobs")

    def wait_for_finish(self, since: float, timeout: float = 30) -> float:
        """Wait for a job that finished after now, and return how long after `since` (of the monotonic clock)
        that was seen."""
        before = self._finished()
        wait_until(lambda: self._finished() > before, timeout=timeout, what="a job finished after the fault")
        return time.monotonic() - since

    def _finished(self) -> int:
        try:
            return self.count("finished_jobs")
        except DBAPIError:
            return -1

    def ended(self, id: int) -> JobDetails:
        """Wait for the end of a job, and return it."""
        wait_until(lambda: self.app.jobs.get(id).ended_at, what="the job's end")
        return self.app.jobs.get(id)

    def demand_everything_done(self, timeout: float = 90) -> None:
        """Every acknowledged number has run and its job has finished, and nothing is left."""
        self.stop()
        wait_until(lambda: self.count("jobs") == 0, timeout=timeout, what="no jobs left")
        finished = set(self.scalars("SELECT id FROM finished_jobs WHERE outcome = 'finished'"))
        missing = sorted(n for n, id in self.acknowledged.items() if id not in finished)
        assert not missing, f"{len(missing)} of {len(self.acknowledged)} did not finish: {missing[:10]}"
        assert self.acknowledged.keys() <= self.ran().keys()
        assert self.count("failed_jobs") == 0

    # -- faults ----------------------------------------------------------------------------------------------

    def kill_one(self, chance: random.Random) -> None:
        """Kill a process in the middle of a job, as soon as there is one."""
        wait_until(lambda: self._kills_one(chance), what="a job to be killed in")

    def _kills_one(self, chance: random.Random) -> bool:
        pids = {run.pid for run in open_runs(self.notes())} - self.killed.keys()
        return bool(pids and self._kill(chance.choice(sorted(pids)))) or self.is_done()

    def _kill(self, pid: int) -> bool:
        at = time.monotonic()  # before it: afterwards another run may have begun already
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed[pid] = at
        return True

    def kill_host(self, chance: random.Random) -> None:
        """Kill all processes of a worker, as the loss of its machine would, and start it again."""
        number = chance.randrange(len(self.hosts))
        host = self.hosts[number]
        family = psutil.Process(host.process.pid).children(recursive=True)
        at = time.monotonic()
        host.kill()
        self.killed |= dict.fromkeys((process.pid for process in family), at)
        self.hosts[number] = self._host()


def open_runs(found: Iterable[Note]) -> list[Note]:
    """Return the runs that have begun and not ended."""
    still: dict[tuple[int, int, str], Note] = {}
    for each in found:
        if each.what == "begin":
            still[each.pid, each.job, each.key] = each
        else:
            still.pop((each.pid, each.job, each.key), None)
    return list(still.values())


def readable_log(worker: WorkerProcess, most: int) -> int:
    """Demand a log that a person can read: no traceback, and few lines beside one for each job; return how
    many."""
    log = worker.log.read_text()
    assert "Traceback" not in log, log[-5000:]
    lines = [line for line in log.splitlines() if not OF_ONE_JOB.search(line)]
    assert len(lines) <= most, "\n".join(lines[-100:])
    return len(lines)


Fault = Callable[[Scenario, random.Random], object]
