"""A storm with all features for operators: encrypted payloads, waiters for each job, and metrics.

Whatever is killed, every waiter gets the end of its job.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.payload.encryption import new_key
from tests.faults import effects
from tests.faults.operated import Answer, answer, numbers
from tests.faults.scorecard import record
from tests.kit import wait_until
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.processes import WorkerProcess

pytestmark = pytest.mark.integration

SECRET = "4111-1111"
WAITERS = 4
"""Waiters for each job: 200 at once in a round."""
MODULE = """
import asyncio
import os
import signal
import threading

import sqlq
from sqlalchemy import text
from tests.faults.effects import effects_engine

app = sqlq.App()
often = {"max_attempts": 50, "backoff": "0s"}
nap = lambda: threading.Event().wait(0.02)  # so that few have ended, and are not written, when all is killed


@app.task(**often)
def plain(n: int, card: str) -> str:
    nap()
    return f"{n} {card}"


@app.task(**often)
async def loop(n: int, card: str) -> str:
    await asyncio.sleep(0.02)
    return f"{n} {card}"


@app.task(**often)
def second(n: int, card: str) -> str:
    nap()
    if sqlq.current_job().attempt == 1:
        raise ValueError("not yet")
    return f"{n} {card}"


@app.task(isolate=True, **often)
def apart(n: int, card: str) -> str:
    return f"{n} {card}"


@app.task(**often)
def effect(n: int, card: str) -> None:
    nap()
    with effects_engine() as engine, sqlq.current_job().completing(engine, result=f"{n} {card}") as session:
        session.execute(text("INSERT INTO effects VALUES (:job)"), {"job": sqlq.current_job().id})


@app.task(max_attempts=1)
def fails(n: int, card: str) -> None:
    nap()
    raise ValueError("no")


@app.task(**often)
def cancels(n: int, card: str) -> None:
    nap()
    raise sqlq.Cancel("not wanted")


@app.task(max_attempts=2, backoff="0s")
def poison(n: int, card: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Storm:
    """Jobs of every kind, their waiters, and the answers they must get."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.jobs: dict[int, tuple[str, int]] = {}
        """Their kinds and numbers."""
        self.told: dict[int, list[Future[Answer]]] = {}
        """The waiters of each job."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._threads = ThreadPoolExecutor(16)

    def enqueue(self, chance: random.Random, number: int, kinds: dict[str, int]) -> None:
        """Enqueue so many jobs of each kind, mixed, and wait for each: most of them on a loop, a few in
        threads of their own."""
        wanted = [kind for kind, share in kinds.items() for _ in range(share)]
        chance.shuffle(wanted)
        numbered = [(kind, number + place) for place, kind in enumerate(wanted)]
        new = [
            self.app.named(f"storm.{kind if kind != 'late' else 'plain'}").new(n, SECRET)
            for kind, n in numbered
        ]
        late = [
            job.set(delay="1h") if kind == "late" else job
            for job, (kind, _) in zip(new, numbered, strict=True)
        ]
        for place, (job, what) in enumerate(zip(self.app.enqueue_many(late), numbered, strict=True)):
            self.jobs[job.id] = what
            self.told[job.id] = [self._wait(job, in_a_thread=not (place + n) % 20) for n in range(WAITERS)]

    def _wait(self, job: sqlq.Job[Any], *, in_a_thread: bool) -> Future[Answer]:
        if in_a_thread:
            return self._threads.submit(lambda: asyncio.run(answer(self.app, job, 120)))
        return asyncio.run_coroutine_threadsafe(answer(self.app, job, 120), self._loop)

    def number_told(self) -> int:
        """Return of how many jobs everybody knows who waits for them."""
        return sum(all(each.done() for each in told) for told in self.told.values())

    def cancel_the_late(self) -> None:
        self.app.jobs.cancel([id for id, (kind, _) in self.jobs.items() if kind == "late"])

    def wrong(self) -> dict[int, tuple[str, list[Answer]]]:
        """Return answers that are no end of a job of that kind, or differ from others for the job."""
        answers = {id: [each.result(120) for each in told] for id, told in self.told.items()}
        return {
            id: (self.jobs[id][0], told)
            for id, told in answers.items()
            if not self._fits(id, told[0]) or len(set(told)) > 1
        }

    def _fits(self, id: int, told: Answer) -> bool:
        kind, n = self.jobs[id]
        match kind:
            case "fails":
                return told in (Answer("failed", "error"), Answer("failed", "worker_lost"))
            case "poison":
                return told == Answer("failed", "worker_lost")
            case "cancels":
                return told == Answer("cancelled", "not wanted")
            case "late":
                return told.state == "cancelled"
            case _:
                return told == Answer("finished", f"{n} {SECRET}")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


KINDS = {"plain": 16, "loop": 12, "second": 6, "apart": 1, "effect": 5, "fails": 3, "cancels": 3, "late": 3}
FINISH = 16 + 12 + 6 + 1 + 5


@pytest.fixture
def blow(
    request: pytest.FixtureRequest,
    database_url: str,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], None]:
    """A storm of so many rounds."""
    return lambda rounds: _blow(request, database_url, engine, tmp_path, monkeypatch, rounds)


def test_every_waiter_gets_the_end_of_its_job_in_a_storm(blow: Callable[[int], None]) -> None:
    blow(1)


@pytest.mark.slow
def test_every_waiter_gets_the_end_of_its_job_in_a_long_storm(blow: Callable[[int], None]) -> None:
    blow(8)


def _blow(
    request: pytest.FixtureRequest,
    database_url: str,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounds: int,
) -> None:
    monkeypatch.setenv("SQLQ_KEYS", new_key())
    monkeypatch.setenv("SQLQ_ENCRYPTION", "encrypt")
    monkeypatch.setenv(effects.VARIABLE, database_url)
    effects.create(engine)
    engine.dispose()
    folder = tmp_path / "storm"
    folder.mkdir()
    (folder / "storm.py").write_text(MODULE)
    app = sqlq.App(database_url)
    storm = Storm(app)
    seed = 20_261_123
    chance = random.Random(seed)
    scrapes = Counter[str]()
    server: OwnPostgreSQL | None = None
    if app.database.dialect.notifies:
        server = request.getfixturevalue("restartable_postgresql")

    def started() -> WorkerProcess:
        options = ("-p", "2", "-c", "1", "--lease", "2s", "--metrics-port", "0")
        worker = WorkerProcess(folder, "storm:app", database_url, *options)
        worker.wait_ready()
        return worker

    def ended(least: int) -> bool:
        return storm.number_told() >= least

    def scrape() -> None:
        found = numbers(worker)
        scrapes["times"] += 1
        scrapes["attempts"] = max(scrapes["attempts"], int(found.get("sqlq_attempts_total", 0)))

    worker = started()
    try:
        for turn in range(rounds):
            before = len(storm.told)
            storm.enqueue(chance, 1_000 * turn, KINDS | ({"poison": 1} if turn == 0 else {}))
            wait_until(partial(ended, before + chance.randint(3, 10)), what="some told")
            for pid in chance.sample(worker.children(), 1 if turn else 0):  # the first one has its poison
                os.kill(pid, signal.SIGKILL)
            scrape()
            if server is not None:
                wait_until(partial(ended, before + chance.randint(15, 20)), what="more told")
                server.stop("immediate")
                scrape()  # what is shown does not need the database
                server.start()
            wait_until(partial(ended, before + chance.randint(25, 35)), what="many told")
            worker.kill()
            worker = started()
            storm.cancel_the_late()
        wrong = storm.wrong()
        scrape()
        code = worker.stop()
        logs = "".join(log.read_text() for log in folder.glob("worker-*.log"))
    finally:
        if worker.process.poll() is None:
            worker.kill()
        storm.close()
        app.close()
    with engine.connect() as conn:
        left = conn.scalar(text("SELECT count(*) FROM jobs"))
        texts = "coalesce(payload, '') || coalesce(result, '')"
        plain = conn.scalar(text(f"SELECT count(*) FROM finished_jobs WHERE {texts} LIKE '%{SECRET}%'"))
        by_state = text("SELECT state, count(*) FROM job_states GROUP BY state")
        states = {row.state: row[1] for row in conn.execute(by_state)}
        wanted = sorted(id for id, (kind, _) in storm.jobs.items() if kind == "effect")
    record(
        "operated: encrypted, waited for and measured, in a storm",
        cases=len(storm.jobs),
        seed=seed,
        told_wrong=len(wrong),
        lost=left,
        effects_difference=len(set(effects.committed(engine)) ^ set(wanted)),
    )
    assert wrong == {}
    assert code == 0
    assert left == 0
    assert plain == 0, "a secret is in the database as it is"
    assert effects.committed(engine) == wanted
    assert states == {
        "finished": rounds * FINISH,
        "failed": rounds * 3 + 1,
        "cancelled": rounds * 6,
    }
    assert scrapes["attempts"] > 0
    assert logs.count("Traceback") <= states["failed"], "one of the handler's own each"
    assert SECRET not in logs
