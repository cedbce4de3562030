"""A queue whose newest job comes first, on every database; what it costs the others: nothing."""

from __future__ import annotations

from typing import Any

import pytest

import sqlq
from sqlq.database.postgresql.statements import claim
from sqlq.errors import ConfigurationError
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions

pytestmark = pytest.mark.each_database

NEWEST = frozenset({"stack"})


@pytest.fixture
def task(app: sqlq.App) -> Any:
    return app.task(name="t")(lambda n=0: None)


def claimer(app: sqlq.App, queues: list[str] | None = None) -> Claimer:
    options = WorkerOptions(None if queues is None else tuple(queues), 10, 30_000)
    return Claimer(app.database.for_loops, "me", options, newest_first=NEWEST)


def test_a_lifo_queue_runs_the_newest_of_each_priority_first(app: sqlq.App, task: Any) -> None:
    stack = [app.enqueue(task.new().set(queue="stack")).id for _ in range(4)]
    urgent = [app.enqueue(task.new().set(queue="stack", priority=5)).id for _ in range(2)]
    later = app.enqueue(task.new().set(queue="stack", delay="1h"))
    queue = [app.enqueue(task.new().set(queue="queue")).id for _ in range(3)]
    claims = claimer(app, ["queue", "stack"])
    assert [job.id for job in claims.claim(4)] == [*queue, urgent[1]]
    assert [job.id for job in claims.claim(3)] == [urgent[0], stack[3], stack[2]]
    newer = app.enqueue(task.new().set(queue="stack"))
    assert [job.id for job in claims.claim(10)] == [newer.id, stack[1], stack[0]]
    assert claims.claim(10) == []
    assert app.jobs.get(later.id).state == "scheduled", "never early"


def test_a_paused_lifo_queue_is_left_alone(app: sqlq.App, task: Any) -> None:
    app.enqueue(task.new().set(queue="stack"))
    app.queues.pause("stack")
    assert claimer(app).claim(10) == []


def test_the_app_sets_the_order_of_a_queue(database_url: str) -> None:
    ran: list[int] = []
    app = sqlq.App(
        database_url, queues={"stack": {"order": "lifo", "max_attempts": 2}, "queue": {"order": "fifo"}}
    )
    task = app.task(name="t", queue="stack")(ran.append)
    assert task.max_attempts == 2
    for number in range(3):
        app.enqueue(task.new(number))
    app.worker(drain=True, concurrency=1).run()
    assert ran == [2, 1, 0]
    app.close()
    with pytest.raises(ConfigurationError, match=r"queues\['stack'\]: order is 'random': it is \"fifo\""):
        sqlq.App(database_url, queues={"stack": {"order": "random"}})


def test_the_claim_of_fifo_queues_has_no_newest_first_order() -> None:
    assert "DESC, id DESC" not in claim(newest_first=False)
    assert "ORDER BY available_at DESC, id DESC" in claim(newest_first=True)
