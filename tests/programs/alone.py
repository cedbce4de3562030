"""Handlers that run in subprocesses of their own: how they complete, exit, and are stopped."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

import sqlq
from tests.programs.notes import nap

app = sqlq.App()


@app.task
def own_pid() -> int:
    return os.getpid()


@app.task(isolate=True, max_attempts=1)
def completes(end: str) -> None:
    """Complete the job, and then go on past its timeout, or die."""
    job, engine = sqlq.current_job(), create_engine(app.database.engine.url)
    sqlq.configure_sqlite(engine, immediate=True)
    with job.completing(engine, "done"):
        pass
    if end == "gone":
        os._exit(5)
    while not job.should_stop():
        nap(0.01)


async def _exits() -> None:
    sys.exit(3)


@app.task(isolate=True, max_attempts=1)
async def exits_in_a_task() -> None:
    await asyncio.create_task(_exits())


async def _own_id() -> int:
    return sqlq.current_job().id


@app.task(isolate=True)
def returns_its_id() -> Coroutine[Any, Any, int]:
    return _own_id()


def began(why: str) -> None:
    Path(f"{why}.began").touch()


def ended(why: str) -> None:
    Path(f"{why}.ended").write_text(str(os.getpid()))


def stay(why: str) -> None:
    try:
        began(why)
        threading.Event().wait(100)
    finally:
        nap(0.1)
        ended(why)


async def astay(why: str) -> None:
    try:
        began(why)
        await asyncio.sleep(100)
    finally:
        ended(why)


def returns_astay(why: str) -> Coroutine[Any, Any, None]:
    return astay(why)


for handler in (stay, astay, returns_astay):
    app.task(isolate=True, max_attempts=1)(handler)
