"""The costs of each feature for a job that uses it.

One process enqueues and runs jobs that do nothing. Its processor time is divided by their number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlq

LOT = 1_000
FOUND_BY_NAME = "benchmarks.found_by_name"
KEY = UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
tenant: ContextVar[str] = ContextVar("tenant", default="acme")

Make = Callable[[int], "sqlq.NewJob[Any]"]


def number(n: int) -> None:
    """The handler of every feature that needs none of its own."""


def typed(key: UUID, moment: datetime) -> None:
    """A handler whose arguments are more than JSON."""


def reports(n: int) -> None:
    sqlq.current_job().progress(n, of=n + 1)


def _nothing(events: Sequence[sqlq.JobEvent]) -> None:
    """A listener."""


def _around() -> Callable[[sqlq.JobContext], Iterator[None]]:
    def around(job: sqlq.JobContext) -> Iterator[None]:
        yield

    return around


def _listening(*names: Any) -> Callable[[sqlq.App], Make]:
    def build(app: sqlq.App) -> Make:
        app.on(*names)(_nothing)
        return app.task(number).new

    return build


def _surrounded(times: int) -> Callable[[sqlq.App], Make]:
    def build(app: sqlq.App) -> Make:
        for _ in range(times):
            app.middleware(_around())
        return app.task(number).new

    return build


def _task(**options: Any) -> Callable[[sqlq.App], Make]:
    return lambda app: app.task(**options)(number).new


def _set(**options: Any) -> Callable[[sqlq.App], Make]:
    def build(app: sqlq.App) -> Make:
        task = app.task(number)
        return lambda n: task.new(n).set(**options)

    return build


def _stamped(app: sqlq.App) -> Make:
    app.before_enqueue(lambda job: {"request": "42"})
    return app.task(number).new


def _unique(app: sqlq.App) -> Make:
    task = app.task(number)
    return lambda n: task.new(n).set(unique_key=f"order {time.monotonic_ns()}")


def _named(app: sqlq.App) -> Make:
    app.task(name=FOUND_BY_NAME)(number)
    return app.named(FOUND_BY_NAME).new


def _typed(app: sqlq.App) -> Make:
    task = app.task(typed)
    return lambda n: task.new(KEY, MOMENT)


def _followed(app: sqlq.App) -> Make:
    return app.task(on_success=app.task(name="benchmarks.follows")(lambda ended: None))(number).new


FEATURES: dict[str, Callable[[sqlq.App], Make]] = {
    "plain": _task(),
    "timeout": _task(timeout="1m"),
    "retention": _task(retention="1h"),
    "backoff of the job": _set(backoff=["1s", "1m"]),
    "label": _set(label="export of May"),
    "headers": _set(headers={"request": "42"}),
    "before_enqueue": _stamped,
    "carried variable": _task(),
    "unique key": _unique,
    "start_within": _set(start_within="1h"),
    "by name": _named,
    "UUID and datetime": _typed,
    "middleware": _surrounded(1),
    "three middlewares": _surrounded(3),
    "listener of enqueued": _listening("enqueued"),
    "listener of started": _listening("started"),
    "listener of finished": _listening("finished"),
    "progress": lambda app: app.task(reports).new,
    "limit": _task(limit=sqlq.Limit("benchmark", running=50)),
    "on_success": _followed,
}


def measure(feature: str, url: str, jobs: int) -> dict[str, float]:
    """Return the processor time, in µs for each job, to enqueue one at a time and many, and to run them."""
    logging.disable(logging.INFO)
    app = sqlq.App(url, carry=[tenant] if feature == "carried variable" else ())
    make = FEATURES[feature](app)
    singly, many = max(LOT // 10, jobs // 10), jobs
    for n in range(20):  # connections, statements and imports are there afterwards
        app.enqueue(make(n))
    one = _processor(lambda: [app.enqueue(make(n)) for n in range(singly)], singly)
    lots = _processor(
        lambda: [app.enqueue_many([make(n) for n in range(LOT)]) for _ in range(many // LOT)], many
    )
    done = 20 + singly + many // LOT * LOT
    if feature == "on_success":
        done *= 2
    run = _processor(app.worker(concurrency=10, drain=True).run, done)
    left = app.jobs.list(limit=1, state="available")
    if left:
        raise RuntimeError(f"{left[0]} was left")
    app.close()
    return {"enqueue": one, "enqueue_many": lots, "run": run}


def _processor(work: Callable[[], object], jobs: int) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) / jobs * 1e6
