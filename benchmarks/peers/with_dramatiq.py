"""Dramatiq on Redis, as a reference: what it acknowledges leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from benchmarks import work
from benchmarks.subject import Subject


class Dramatiq(Subject):
    name = "dramatiq"
    databases = ("redis",)
    requirements = ("dramatiq[redis]",)
    packages = ("dramatiq", "redis")
    settings = "-p 1 -t CONCURRENCY, no results"
    many = False
    enqueued = (("LLEN", "dramatiq:default"),)
    left = (("LLEN", "dramatiq:default"), ("HLEN", "dramatiq:default.msgs"))

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        yield Producer(_actor(url))

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [
            ["dramatiq", f"{__name__}:set_up", "-p", str(processes), "-t", str(concurrency), "--skip-logging"]
        ]

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        return {"SQLQ_BENCHMARK_URL": url}


class Producer:
    def __init__(self, actor: Any) -> None:
        self.one = actor.send


@cache
def _actor(url: str) -> Any:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=url))

    @dramatiq.actor(actor_name="noop")
    def noop(number: int) -> None:
        work.done(number)

    return noop


def set_up() -> None:
    _actor(os.environ["SQLQ_BENCHMARK_URL"])


SUBJECTS = (Dramatiq,)
