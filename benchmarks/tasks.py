"""sqlq's side: an App and the tasks, as `sqlq --app benchmarks.tasks:app work` finds them."""

from __future__ import annotations

import asyncio
import os

import sqlq
from benchmarks import work

app = sqlq.App()


@app.task
def noop(number: int) -> None:
    work.done(number)


@app.task
async def anoop(number: int) -> None:
    work.done(number)


@app.task
def nap(number: int, ms: int) -> None:
    work.nap(number, ms)


@app.task
async def anap(number: int, ms: int) -> None:
    work.done(number)
    await asyncio.sleep(ms / 1000)


@app.task
def ticked() -> None:
    moment = sqlq.current_job().scheduled_for
    work.ticked(0.0 if moment is None else moment.timestamp())


if os.environ.get("SQLQ_BENCHMARK_LIMITS"):
    app.limit("declared", running=1)  # so that a worker looks at lines from the start

if counts := os.environ.get("SQLQ_BENCHMARK_STATEMENTS"):
    from benchmarks.statements import count_into

    count_into(counts)

if traces := os.environ.get("SQLQ_BENCHMARK_TRACE"):
    from benchmarks.tracing import note_into

    note_into(traces)
