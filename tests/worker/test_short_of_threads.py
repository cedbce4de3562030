"""Threads that a worker begins when it first needs them.

When none can be started, the rest goes on, and the next call tries again.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

import sqlq
from sqlq.worker.maintain import services
from sqlq.worker.worker import Worker
from tests.kit import needs, refuse_threads, wait_until


@pytest.fixture
def unswept(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker without the sweeps that make up for what was not looked at."""
    monkeypatch.setattr(services.Unblock, "run", lambda self: 3600.0)
    return app.worker()


@pytest.fixture
def limited(app: sqlq.App) -> Any:
    return app.task(name="t", limit=sqlq.Limit("api", running=1))(lambda: None)


def are_finished(app: sqlq.App, number: int) -> bool:
    return len(app.jobs.list(state="finished")) == number


def test_a_step_is_unblocked_without_the_unblock_thread(
    app: sqlq.App,
    limited: Any,
    unswept: Worker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = sqlq.Flow()
    flow.add(limited.new())
    app.enqueue(flow)
    app.enqueue(limited.new())
    refuse_threads(monkeypatch, "sqlq-flow")
    with caplog.at_level(logging.DEBUG, "sqlq.worker"), unswept:
        wait_until(lambda: are_finished(app, 2), what="the second of the key")
    assert "the thread sqlq-flow cannot be started now: can't start new thread" in caplog.text
    assert "settling jobs failed" not in caplog.text


@needs("cheap")
def test_admissions_begin_when_a_thread_can_be_started(
    app: sqlq.App, limited: Any, unswept: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "sqlq-limit":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    app.enqueue_many([limited.new(), limited.new()])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        unswept.start()
        assert refused.wait(30)
    try:
        wait_until(lambda: are_finished(app, 2), what="both, admitted one after the other")
    finally:
        unswept.stop()
        assert unswept.join("30s")
