"""Handlers that wait, die, hang and hold the interpreter, and note each start."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import dataclasses
import os
import signal
import threading
from pathlib import Path

import sqlq
from tests.programs.notes import nap, note, until

app = sqlq.App()
if Path("broken").exists():
    os._exit(3)
if Path("hangs").exists():
    Path("importing.txt").touch()
    while Path("hangs").exists():
        nap()


def wait_for(file: str) -> None:
    """Wait until a file is there, and do not look whether the job should stop."""
    while not Path(file).exists():
        nap(0.01)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).usleep(120_000_000)


@app.task(backoff="0s")
def work() -> None:
    note("work")


@app.task(max_attempts=3)
def poison() -> None:
    note("poison")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(backoff="0s")
def wait() -> None:
    """Run until it is let go, in its first attempt."""
    note("wait")
    if sqlq.current_job().attempt == 1:
        until("go")


@app.task
def orphan() -> None:
    """Leave a process behind whose parent is gone: process 1 inherits it."""
    note("orphan")
    if os.fork() == 0:
        if os.fork() == 0:
            nap(0.2)
        os._exit(0)


@app.task(isolate=True, timeout="500ms", max_attempts=1)
def alone_too_long() -> None:
    note("alone")
    while True:
        try:
            nap(60)
        except BaseException:
            note("deaf")


@app.task(isolate=True)
def alone() -> int:
    note("alone")
    return os.getpid()


@app.task(isolate=True, max_attempts=1)
async def alone_and_gone() -> None:
    note("alone")
    os._exit(5)


@app.task(isolate=True, timeout="4s", max_attempts=1)
def alone_in_progress() -> None:
    note("alone")
    sqlq.current_job().progress(1)
    wait_for("go")


@app.task(timeout="500ms", max_attempts=1)
def stuck() -> None:
    note("stuck")
    wait_for("free")


@app.task(timeout="200ms", max_attempts=1)
async def leaves_a_thread() -> None:
    note("thread")
    atexit.register(open, "left.txt", "w")
    await asyncio.to_thread(threading.Event().wait, 600)


@app.task
def deaf() -> None:
    note("deaf")
    nap(120)


@app.task(timeout="1s", max_attempts=1)
def late_once() -> None:
    note("late_once")
    hold_the_interpreter()


@app.task
def holds() -> None:
    note("holds")
    if sqlq.current_job().attempt == 1:
        hold_the_interpreter()


@app.task
def locks() -> None:
    note("locks")
    if sqlq.current_job().attempt == 1:
        with app.database.begin() as conn:
            conn.exec_driver_sql("UPDATE jobs SET headers = headers")
            os.kill(os.getpid(), signal.SIGSTOP)


@app.task(timeout="1s", backoff="0s")
def late() -> None:
    note("late")
    if sqlq.current_job().attempt == 1:
        wait_for("go")


@app.task
def waits() -> None:
    note("waits")
    wait_for("go")


@dataclasses.dataclass
class Order:
    how: str

    def __post_init__(self) -> None:
        if self.how == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "holds":
            hold_the_interpreter()


@app.task(max_attempts=2, backoff="0s", timeout="1s")
def reads(order: Order) -> None:
    note("reads")
