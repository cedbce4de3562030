"""Celery on Redis, as a reference: what it acknowledges leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from benchmarks import work
from benchmarks.subject import Subject


class Celery(Subject):
    name = "celery"
    databases = ("redis",)
    requirements = ("celery[redis]",)
    packages = ("celery", "redis")
    settings = (
        "-P prefork -c CONCURRENCY (quicker than threads here), prefetch multiplier 10, results "
        "ignored but where they are waited for, no gossip, mingle or heartbeat"
    )
    many = False
    enqueued = (("LLEN", "celery"),)
    left = (("LLEN", "celery"), ("HLEN", "unacked"))
    answers = True
    chains = True

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        yield Producer(_app(url).tasks["noop"], _app(url).tasks["answered"])

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        options = ["-P", "prefork", "-c", str(concurrency), "--prefetch-multiplier", "10", "-l", "WARNING"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return [
            ["celery", "-q", "-A", f"{__name__}:app", "worker", "-n", f"w{n}@%h", *options, *quiet]
            for n in range(processes)
        ]

    def chain(self, url: str, steps: int) -> None:
        import celery

        noop = _app(url).tasks["noop"]
        celery.chain(*(noop.si(number) for number in range(steps))).delay()

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        return {"SQLQ_BENCHMARK_URL": url, "C_FORCE_ROOT": "1"}


class Producer:
    def __init__(self, task: Any, answered: Any) -> None:
        self.one = task.delay
        self._answered = answered

    def answer(self, number: int) -> None:
        self._answered.delay(number).get(timeout=60)


@cache
def _app(url: str) -> Any:
    import celery

    app = celery.Celery("benchmark", broker=url, backend=url)
    app.conf.update(task_ignore_result=True, worker_hijack_root_logger=False)

    @app.task(name="noop")
    def noop(number: int) -> None:
        work.done(number)

    @app.task(name="answered", ignore_result=False)
    def answered(number: int) -> None:
        work.done(number)

    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app(os.environ["SQLQ_BENCHMARK_URL"])
    raise AttributeError(name)


SUBJECTS = (Celery,)
