"""Run a command of a subject in its own environment, and print JSON.

    python -m benchmarks.inside SUBJECT COMMAND …

All subjects have the same loops. Each loop is timed from before the first call to after the return of the
last.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from benchmarks.peers import find
from benchmarks.subject import Subject

WARM_UP = 20
"""Jobs enqueued before the clock starts, so that connections and caches are there."""


async def _ran(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def with_producer(
    subject: Subject, url: str, task: str, measure: Callable[[Any], Any], ameasure: Callable[[Any], Any]
) -> Any:
    """Run one of the two with the subject's producer: `ameasure`, on an event loop, where the producer is
    asynchronous."""
    opened = subject.producer(url, task)
    if isinstance(opened, AbstractAsyncContextManager):

        async def run() -> Any:
            async with opened as producer:
                return await ameasure(producer)

        return asyncio.run(run())
    with opened as producer:
        return measure(producer)


def one(subject: Subject, url: str, task: str, jobs: int) -> float:
    """Enqueue jobs, each in a transaction of its own; return the seconds that those after the first WARM_UP
    took."""

    def measure(producer: Any) -> float:
        for number in range(WARM_UP):
            producer.one(number)
        begin = time.perf_counter()
        for number in range(jobs - WARM_UP):
            producer.one(number)
        return time.perf_counter() - begin

    async def ameasure(producer: Any) -> float:
        for number in range(WARM_UP):
            await producer.one(number)
        begin = time.perf_counter()
        for number in range(jobs - WARM_UP):
            await producer.one(number)
        return time.perf_counter() - begin

    return float(with_producer(subject, url, task, measure, ameasure))


def many(subject: Subject, url: str, task: str, jobs: int, size: int) -> float:
    """Enqueue jobs `size` at a time, each lot in a transaction of its own; return the seconds that all but
    the first lot took."""

    def measure(producer: Any) -> float:
        producer.many(range(size))
        begin = time.perf_counter()
        for first in range(size, jobs, size):
            producer.many(range(first, min(first + size, jobs)))
        return time.perf_counter() - begin

    async def ameasure(producer: Any) -> float:
        await producer.many(range(size))
        begin = time.perf_counter()
        for first in range(size, jobs, size):
            await producer.many(range(first, min(first + size, jobs)))
        return time.perf_counter() - begin

    return float(with_producer(subject, url, task, measure, ameasure))


def fill(subject: Subject, url: str, task: str, jobs: int) -> float:
    """Enqueue jobs the quickest way there is: nobody looks at the clock."""
    return many(subject, url, task, jobs, min(jobs, 1000)) if subject.many else one(subject, url, task, jobs)


def tick(subject: Subject, url: str, task: str, jobs: int, every_ms: int) -> list[list[int]]:
    """Enqueue one job each so many milliseconds; return when each call was made and when it returned, in ns
    of the monotonic clock."""

    def measure(producer: Any) -> list[list[int]]:
        call = getattr(producer, "tick", producer.one)
        moments, begin = [], time.monotonic()
        for number in range(jobs):
            time.sleep(max(0.0, begin + number * every_ms / 1000 - time.monotonic()))
            called = time.monotonic_ns()
            call(number)
            moments.append([called, time.monotonic_ns()])
        return moments

    async def ameasure(producer: Any) -> list[list[int]]:
        moments, begin = [], time.monotonic()
        for number in range(jobs):
            await asyncio.sleep(max(0.0, begin + number * every_ms / 1000 - time.monotonic()))
            called = time.monotonic_ns()
            await producer.one(number)
            moments.append([called, time.monotonic_ns()])
        return moments

    found: list[list[int]] = with_producer(subject, url, task, measure, ameasure)
    return found


def traced(subject: Subject, url: str, task: str, jobs: int, every_ms: int) -> list[list[int]]:
    """Enqueue one job each so many milliseconds, and return four times of each call.

    These are its begin, its INSERT, its COMMIT and its return, in ns of the monotonic clock.
    """
    noted: dict[str, list[int]] = {}
    subject.note_inserts(noted)
    calls = tick(subject, url, task, jobs, every_ms)
    inserts = zip(noted["sent"][-jobs:], noted["answered"][-jobs:], strict=True)
    return [
        [called, sent, answered, returned]
        for (called, returned), (sent, answered) in zip(calls, inserts, strict=True)
    ]


def answers(subject: Subject, url: str, task: str, jobs: int) -> list[float]:
    """Enqueue one job after the other and wait for its result; return the ms each took, those that warm up
    left out."""

    found = []
    opened = subject.producer(url, task)
    assert isinstance(opened, AbstractContextManager), "its producer is synchronous"
    with opened as producer:
        for number in range(WARM_UP + jobs):
            begin = time.perf_counter()
            producer.answer(number)
            found.append((time.perf_counter() - begin) * 1000)
    return found[WARM_UP:]


def versions(subject: Subject) -> dict[str, str]:
    """Return the versions of what the subject is made of."""
    import importlib.metadata

    return {package: importlib.metadata.version(package) for package in subject.packages}


def main(name: str, command: str, *arguments: str) -> None:
    subject = find(name)
    result: Any = None
    match command:
        case "prepare":
            subject.prepare(*arguments)
        case "versions":
            result = versions(subject)
        case "one" | "many" | "fill" | "tick" | "traced" | "answers":
            url, task, *numbers = arguments
            result = globals()[command](subject, url, task, *map(int, numbers))
        case _:  # what only some subjects do
            url, *numbers = arguments
            result = getattr(subject, command)(url, *map(int, numbers))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
