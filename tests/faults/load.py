"""Work that goes on while a fault happens: unique numbers are enqueued all the time, and a worker notes each
it ran."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from tests.kit import wait_until
from tests.kit.processes import Project, WorkerProcess

RESUME_SECONDS = 15.0
"""The limit for a loaded machine. A quiet one takes less than five seconds, which the scorecard shows."""
MODULE = '''
import os, sqlq
app = sqlq.App()

@app.task
def note(n):
    """Leaves a line for each time it ran."""
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{n}\\n".encode())
    os.close(fd)
'''


class Load(Project):
    """A producer that enqueues number after number at `url`, on its own way to the server, and keeps those
    acknowledged."""

    def __init__(self, folder: Path, url: str, *, module: str = "") -> None:
        super().__init__(folder, url, MODULE + module, "work")
        self.note = self.app.task(name="work.note")(lambda n: None)
        self.acknowledged: dict[int, int] = {}
        """The ids of the jobs by their numbers."""
        self.refused = 0
        self._numbers = itertools.count()
        self._engine = create_engine(url, poolclass=NullPool)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.produce, daemon=True)

    def enqueue(self) -> None:
        """Enqueue the next number; the database refusing it is an error that the caller sees, not a loss."""
        n = next(self._numbers)
        try:
            self.acknowledged[n] = self.app.enqueue(self.note.new(n)).id
        except DBAPIError:
            self.refused += 1

    def produce(self) -> None:
        """Enqueue until stopped."""
        while not self._stopping.is_set():
            self.enqueue()
            self._stopping.wait(0.01)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Enqueue no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(60)

    def ran(self) -> Counter[int]:
        return Counter(int(n) for (n,) in self.lines())

    def count(self, what: str) -> int:
        with self._engine.connect() as conn:
            return int(conn.execute(text(f"SELECT count(*) FROM {what}")).scalar_one())

    def seconds_to_next_finish(self, since: float, timeout: float = 30) -> float:
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

    def demand_everything_done(self, timeout: float = 90) -> None:
        """Every acknowledged number has run and its job has finished, and nothing is left."""
        self.stop()
        wait_until(lambda: self.count("jobs") == 0, timeout=timeout, what="no jobs left")
        with self._engine.connect() as conn:
            finished = set(conn.scalars(text("SELECT id FROM finished_jobs WHERE outcome = 'finished'")))
        missing = {n: id for n, id in self.acknowledged.items() if id not in finished}
        assert not missing, (
            f"{len(missing)} of {len(self.acknowledged)} acknowledged jobs did not finish: "
            f"{sorted(missing)[:10]}"
        )
        assert self.acknowledged.keys() <= self.ran().keys()
        assert self.count("failed_jobs") == 0

    def ran_again(self) -> int:
        """How many numbers ran more than once: allowed, but worth knowing."""
        return sum(1 for times in self.ran().values() if times > 1)

    def damaged(self) -> dict[str, int]:
        """Return how many tables are damaged, for the scorecard; nothing where that is not known."""
        if self._engine.dialect.name != "mariadb":
            return {}
        with self._engine.connect() as conn:
            checked = conn.execute(text("CHECK TABLE jobs, finished_jobs, failed_jobs EXTENDED")).all()
        assert len(checked) == 3
        return {"damaged": sum(table.Msg_text != "OK" for table in checked)}

    def __exit__(self, *exc: object) -> None:
        self.stop()
        super().__exit__()
        with warnings.catch_warnings():
            # a connection that breaks while SQLAlchemy sets it up is left to the collector, open as far as
            # its driver knows
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


OF_ONE_JOB = re.compile(r"\) finished in |: lease lost, ")


def readable_log(worker: WorkerProcess, most: int) -> int:
    """Demand a log that a person can read: no traceback, and few lines beside one for each job; return how
    many."""
    log = worker.log.read_text()
    assert "Traceback" not in log, log[-5000:]
    lines = [line for line in log.splitlines() if not OF_ONE_JOB.search(line)]
    assert len(lines) <= most, "\n".join(lines[-100:])
    return len(lines)
