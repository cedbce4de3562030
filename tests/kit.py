"""Run a worker while a test goes on, or do by hand what a worker does with its jobs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.outcome import Outcome, Settlement
from sqlq.store.jobs import claim as claiming
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import Fate


@contextmanager
def working(app: sqlq.App, **options: Any) -> Iterator[Any]:
    """Run a worker in a thread of this process; at the end it stops at once, whatever a test asserts."""
    worker = app.worker(**options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()


def claim(app: sqlq.App, lease_ms: int = 30_000, owner: str = "me", limit: int = 10) -> list[Any]:
    with app.database.begin() as conn:
        return claiming.claim(conn, ["default"], limit=limit, owner=owner, lease_ms=lease_ms)


def ids(rights: set[tuple[int, int]]) -> set[int]:
    return {id for id, _ in rights}


def settle(app: sqlq.App, job: Any, outcome: Outcome) -> set[int]:
    with app.database.begin() as conn:
        return ids(settling.settle(conn, [Settlement(job.id, job.lease_token, job.attempts, outcome)]))


def fate(app: sqlq.App, job: Any) -> Fate:
    with app.database.read() as conn:
        return lease.fates(conn, [(job.id, job.lease_token)])[job.id, job.lease_token]


def expire(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET lease_expires_at = reserved_at WHERE reserved_at IS NOT NULL"))


def rescue(app: sqlq.App) -> list[settling.Rescued]:
    with app.database.begin() as conn:
        return settling.rescue(conn)


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have no thread of this name started, as where the system has none left."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
