"""All features for operators on at once: encrypted payloads, a waiter for each job, and workers with metrics.

`python -m tests.faults --operated` sets SQLQ_TEST_OPERATED, with which the tests of this folder run so. Every
promise must hold with them, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

import sqlq
from tests.faults.account import record
from tests.kit import wait_until
from tests.kit.processes import OPERATED, WorkerProcess

ENDED = ("finished", "failed", "cancelled")
URL = re.compile(r"http://127\.0\.0\.1:(\d+)/metrics")
ANSWER_SECONDS = 30
"""Far more than an answer takes to come, on a machine that is busy with other things."""


def is_on() -> bool:
    return bool(os.environ.get(OPERATED))


class Answer(NamedTuple):
    """The answer that a waiter for a job got."""

    state: str
    value: Any = None
    """The result of the job; else the reason."""


async def answer(app: sqlq.App, job: sqlq.Job[Any] | int, seconds: int | None = None) -> Answer:
    """Wait for a job, as a web process would, and return what came of it. While the database is away a wait
    that begins is refused, so that it begins again."""
    while True:
        try:
            return await _answer(app, job, seconds)
        except DBAPIError:
            await asyncio.sleep(0.1)


async def _answer(app: sqlq.App, job: sqlq.Job[Any] | int, seconds: int | None) -> Answer:
    try:
        return Answer("finished", await app.aresult(job, None if seconds is None else f"{seconds}s"))
    except sqlq.JobFailedError as error:
        return Answer("failed", error.reason)
    except sqlq.JobCancelledError as error:
        return Answer("cancelled", error.reason)
    except sqlq.NoResultError:  # for example a step that an operator skipped
        return Answer("finished")
    except sqlq.JobNotFoundError:
        return Answer("gone")


class Waiters:
    """Waits for each job that is found at `url`, while the block lasts.

    At its end every waiter must have got the job's end as its answer.
    """

    def __init__(self, url: str, each: int = 1) -> None:
        """`each`: how many wait for a job."""
        self._url, self._each = url, each
        self._answers: dict[int, asyncio.Future[list[Answer]]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._wait()), name="waiters")
        self._found: Callable[[], list[tuple[int, str]]] = list

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            try:
                wait_until(self._all_answered, timeout=ANSWER_SECONDS, what="everybody told who waits")
                record("operated: waited for", cases=len(self._answers), told_wrong=0)
            except AssertionError:
                self._leave()
                raise
        self._leave()

    def _leave(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "somebody waits who cannot be called off"

    async def _wait(self) -> None:
        app = sqlq.App(self._url)
        engine = create_engine(self._url, poolclass=NullPool)

        def found() -> list[tuple[int, str]]:
            try:
                with engine.connect() as conn:
                    rows = conn.execute(text("SELECT id, state FROM job_states"))
                    return [(id, state) for id, state in rows]
            except DBAPIError:  # this test's database is away, as it is meant to be, or has no tables
                return []

        self._found = found
        while not self._over.is_set():
            for id, _ in await asyncio.to_thread(found):
                if id not in self._answers:
                    self._answers[id] = asyncio.gather(*(answer(app, id) for _ in range(self._each)))
            await asyncio.sleep(0.05)
        for waiting in self._answers.values():
            waiting.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)
        app.close()
        engine.dispose()

    def _all_answered(self) -> bool:
        """Return whether nobody waits for an ended job; raise where an answer differs from the job."""
        unanswered = 0
        for id, state in self._found():
            task = self._answers.get(id)
            if task is None or not task.done():
                unanswered += state in ENDED
            elif state in ENDED:
                (told,) = set(task.result())
                # an operator may retry or skip a failed job after the answer
                assert told.state in (state, "failed"), f"job {id} is {state}, and who waited was told {told}"
        return unanswered == 0

    def wrong(self, app: sqlq.App) -> dict[int, list[Answer]]:
        """Return the answers that differ from what a new waiter for the ended job gets."""

        async def ask() -> dict[int, list[Answer]]:
            # cancelled at the end of the block, where the job had not ended
            answered = {id: task for id, task in self._answers.items() if not task.cancelled()}
            told = {id: task.result() for id, task in answered.items() if task.done()}
            return {id: each for id, each in told.items() if {*each} != {await answer(app, id)}}

        return asyncio.run(ask())


def numbers(worker: WorkerProcess) -> dict[str, float]:
    """Return the counters that the endpoint of a worker shows, summed over their labels."""
    port = wait_until(lambda: URL.findall(worker.log.read_text()), what="the URL of the endpoint")[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        shown = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(shown):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found
