"""RQ on Redis, as a reference: a process for each job at a time. Finished jobs are kept for 500 s (its
default)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import work
from benchmarks.subject import Subject


class Rq(Subject):
    name = "rq"
    databases = ("redis",)
    requirements = ("rq",)
    packages = ("rq", "redis")
    settings = "worker-pool -n CONCURRENCY with SimpleWorker, which does not fork for each job"
    enqueued = (("LLEN", "rq:queue:default"),)
    left = (("LLEN", "rq:queue:default"), ("ZCARD", "rq:wip:default"))
    answers = True
    chains = True

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        import redis
        import rq

        yield Producer(rq.Queue("default", connection=redis.Redis.from_url(url)))

    def chain(self, url: str, steps: int) -> None:
        import redis
        import rq

        queue, before = rq.Queue("default", connection=redis.Redis.from_url(url)), None
        for number in range(steps):
            before = queue.enqueue(noop, number, depends_on=before)

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        pool = [
            "rq",
            "worker-pool",
            "default",
            "-u",
            url,
            "-n",
            str(concurrency * processes),
            "-w",
            "rq.worker.SimpleWorker",
            "-q",
        ]
        return [pool]


class Producer:
    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def one(self, number: int) -> None:
        self.queue.enqueue(noop, number)

    def answer(self, number: int) -> None:
        self.queue.enqueue(noop, number).latest_result(timeout=60)

    def many(self, numbers: Sequence[int]) -> None:
        from rq import Queue

        self.queue.enqueue_many([Queue.prepare_data(noop, (number,)) for number in numbers])


def noop(number: int) -> None:
    work.done(number)


SUBJECTS = (Rq,)
