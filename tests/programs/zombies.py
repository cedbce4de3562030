"""Handlers that wait until their worker has woken, and then end in each of the ways there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlq
from tests.programs.effects import have_effect, save_slice
from tests.programs.notes import nap

app = sqlq.App()


def raising(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


def loses_its_lease() -> None:
    for _ in range(6_000):
        if sqlq.current_job().should_stop():
            return
        nap(0.01)
    raise AssertionError("the lease was not lost within a minute")


WAYS: dict[str, Callable[[], Any]] = {
    "success": lambda: "by the zombie",
    "complete": have_effect,
    "checkpoint": save_slice,
    "error": raising(ValueError("by the zombie")),
    "fatal error": raising(BaseException("by the zombie")),
    "system exit": raising(SystemExit(3)),
    "retry": raising(sqlq.Retry("0s")),
    "snooze": raising(sqlq.Snooze("0s")),
    "cancel": raising(sqlq.Cancel("by the zombie")),
    "heartbeat": loses_its_lease,
    "release": lambda: threading.Event().wait(60),
}
"""The actions of a handler once its worker has woken.

"complete" writes and completes the job in a transaction of its own, and lets its LeaseLostError pass.
"checkpoint" saves its cursor so. "heartbeat" ends when its lease is lost. "release" does not end: its worker
is stopped and releases the job.
"""


def as_zombie(way: str) -> Callable[[], Any]:
    def handler() -> Any:
        Path(f"started {way}").touch()
        while not Path("woken").exists():
            nap(0.01)
        return WAYS[way]()

    return handler


for way in WAYS:
    app.task(name=way, backoff="0s", max_attempts=4)(as_zombie(way))
