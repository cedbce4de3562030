"""`sqlq why`, and `app.jobs.why`: why a job does not run now, when it will, or what became of it."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import text

import sqlq
from sqlq.store import health
from sqlq.store.workers import workers
from sqlq.testing import drain
from tests.kit import claim_on, for_each, span


def _busy(app: sqlq.App) -> None:
    """Enter a worker with one slot, which is taken."""
    with app.database.begin() as conn:
        workers.register(conn, id="w", host="here", pid=1, version="0", queues=None, concurrency=1)
        assert claim_on(conn, ["mail"], limit=1, owner="w", lease_ms=60_000)


FORECASTS = {
    "ten have ended in the last minutes": (
        10,
        "",
        None,
        r"about \d.*: 4 before it, \d.* (a second|a minute)",
    ),
    "more are before it than are counted": (10, "", 3, r"more than \d.*: more than 3 before it, \d.*"),
    "too few have ended": (4, "", None, None),
    "they have ended long ago": (10, "finished_at = finished_at - {hour}", None, None),
    "newer ones were claimed first": (10, "available_at = available_at + {hour}", None, None),
    "others were of a larger priority": (
        10,
        "priority = 9, available_at = available_at + {hour}",
        None,
        "about",
    ),
}


@for_each("name", FORECASTS)
def test_why_forecasts_when_a_due_job_begins(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ended, change, most, said = FORECASTS[name]
    send = app.task(name=f"send: {name}", queue="mail")(lambda: None)
    with app.database.begin() as conn:
        for table in ("jobs", "finished_jobs", "sqlq_workers"):
            conn.execute(text(f"DELETE FROM {table}"))
    app.enqueue_many([send.new()] * ended)
    drain(app)
    with app.database.begin() as conn:
        if change:
            conn.execute(text(f"UPDATE finished_jobs SET {change.format(hour=span(conn, 3_600))}"))
    app.enqueue(send.new())
    _busy(app)
    app.enqueue_many([send.new().set(priority=5), send.new(), send.new(), send.new().set(priority=5)])
    job = app.enqueue(send.new())
    app.enqueue_many([send.new(), send.new().set(priority=-5), send.new().set(queue="other", priority=5)])
    monkeypatch.setattr(health, "COUNT_LIMIT", most or 10_000)
    first, *_ = app.jobs.why(job.id)
    taken = "the slot of its worker is taken"
    assert re.fullmatch(taken if said is None else f"{taken}; {said}.*", first)
