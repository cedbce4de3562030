"""A shop whose workers, host or database fail: a task for each way to run and to end."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import sqlq
from tests.programs.effects import have_effect
from tests.programs.notes import nap, note, until

app = sqlq.App()
SECRET = "4111-1111"
RUNNING, ACCOUNTS = 4, 3
OFTEN: dict[str, Any] = {"max_attempts": 50, "backoff": "0s"}


@app.task(queue="follow", **OFTEN)
def follow(ended: sqlq.JobOutcome) -> None: ...


FOLLOWED: dict[str, Any] = {"backoff": "0s", "on_success": follow, "on_failure": follow}


@app.task
def quick(n: int) -> None:
    note("quick", n)


@app.task(max_attempts=3, backoff="0s")
def hang(n: int) -> None:
    note("hang", n)
    until("go")


@app.task
def long(n: int, seconds: float) -> None:
    note("long", n)
    nap(seconds)
    note("long", n, "end")


@app.task(**FOLLOWED, max_attempts=50)
def plain(n: int, card: str) -> str:
    note("plain", n)
    nap()
    note("plain", n, "end")
    return f"{n} {card}"


@app.task(**OFTEN)
async def loop(n: int, card: str) -> str:
    note("loop", n)
    await asyncio.sleep(0.02)
    return f"{n} {card}"


@app.task(**OFTEN)
def second(n: int, card: str) -> str:
    note("second", n)
    nap()
    if sqlq.current_job().attempt == 1:
        raise ValueError("not yet")
    return f"{n} {card}"


@app.task(isolate=True, **OFTEN)
def apart(n: int, card: str) -> str:
    note("apart", n)
    return f"{n} {card}"


@app.task(**FOLLOWED, max_attempts=50)
def pay(n: int, card: str) -> None:
    note("pay", n)
    nap()
    have_effect(f"{n} {card}")


@app.task(isolate=True, **FOLLOWED, max_attempts=50)
def pay_apart(n: int, card: str) -> None:
    note("pay_apart", n)
    have_effect(f"{n} {card}")


@app.task(**FOLLOWED, max_attempts=2)
def fails(n: int, card: str) -> None:
    note("fails", n)
    raise ValueError("no")


@app.task(**FOLLOWED, max_attempts=50)
def cancels(n: int, card: str) -> None:
    note("cancels", n)
    raise sqlq.Cancel("not wanted")


@app.task(**FOLLOWED, max_attempts=1)
def poison(n: int, card: str) -> None:
    note("poison", n)
    os.kill(os.getpid(), signal.SIGKILL)


def _run(key: str, n: int) -> None:
    note(key, n)
    nap(0.1)
    note(key, n, "end")
    if n % 7 == 3 and sqlq.current_job().attempt == 1:
        raise ValueError("not yet")


@app.task(limit=sqlq.Limit("stripe", running=RUNNING), max_attempts=20, backoff="10ms")
def call(n: int, card: str) -> str:
    _run("stripe", n)
    return f"{n} {card}"


@app.task(limit=sqlq.Serial("account:{account}"), max_attempts=20, backoff="10ms")
def book(account: int, n: int, card: str) -> str:
    _run(f"account:{account}", n)
    return f"{n} {card}"
