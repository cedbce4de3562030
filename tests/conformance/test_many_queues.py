"""A producer makes more queues than one look reads, on every database."""

from __future__ import annotations

import pytest

import sqlq
from sqlq.cli.commands.status import show_queues
from sqlq.cli.context import Context
from sqlq.database.values import LARGEST_WINDOW
from sqlq.store.workers.look import KEPT_SECONDS, KnownQueues, due_in
from tests.kit import drain, execute

pytestmark = pytest.mark.each_database

FAR = {"postgresql": "now() + interval '1 day'", "sqlite": "9e12", "mariadb": "now() + interval 1 day"}


def enqueue_in(app: sqlq.App, names: list[str]) -> None:
    task = app.task(name="of_no_worker")(lambda: None)
    app.enqueue_many([task.new().set(queue=name) for name in names])


def test_looks_read_all_queues_in_turn_when_there_are_more_than_a_window(app: sqlq.App) -> None:
    names = [f"q{i:05}" for i in range(2 * LARGEST_WINDOW + 5)]
    enqueue_in(app, [*names, "zoë"])
    app.queues.pause(names[LARGEST_WINDOW - 1])
    queues, found, sizes = KnownQueues(), set[str](), list[int]()
    for _ in range(3):
        due = due_in(app.database, queues)
        found |= due.keys()
        sizes.append(len(due))
    assert found == {*names, "zoë"} - {names[LARGEST_WINDOW - 1]}
    assert queues.after == "", "the next look begins with the first queue"
    assert max(sizes) <= 2 * LARGEST_WINDOW
    assert len(queues.names) == LARGEST_WINDOW


def test_a_worker_runs_jobs_of_its_tasks_when_strangers_fill_the_window(app: sqlq.App) -> None:
    """The queue of its task comes after those of the window."""
    ran: list[int] = []
    task = app.task(name="own", queue="own")(lambda: ran.append(1))
    execute(
        app.database.engine,
        "INSERT INTO jobs (queue, task, payload, available_at) VALUES "
        + ", ".join(
            f"('a{i:05}', 'no', '{{}}', {FAR[app.database.engine.dialect.name]})"
            for i in range(2 * LARGEST_WINDOW)
        ),
    )
    app.enqueue(task.new())
    assert drain(app).finished == 1


def rows(*names: str, first: int | None = 1) -> list[tuple[str, float, int | None]]:
    return [(name, 0.0, None if first is None else first + i) for i, name in enumerate(names)]


def test_known_queues_keep_those_with_the_latest_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlq.store.workers.look.LARGEST_WINDOW", 3)
    now = [1_000.0]
    monkeypatch.setattr("sqlq.store.workers.look.time.monotonic", lambda: now[0])
    queues = KnownQueues(own=["own"])
    queues.note(rows("a", "b", "c"), claimed=["served"])
    assert queues.with_jobs[0] == "served"
    assert len(queues.with_jobs) == 3
    assert queues.after == "c"
    now[0] += KEPT_SECONDS / 2
    queues.note(rows("d", "e", "f"), claimed=["later"])
    assert queues.names[:3] == ["own", "later", "served"]
    now[0] += KEPT_SECONDS / 2 + 1
    queues.note(rows("g"))
    assert queues.names == ["own", "later", "g"]
    assert queues.with_jobs == ["later", "g"]
    assert queues.after == "", "there are no more queues after this window"


def test_named_queues_have_no_window() -> None:
    queues = KnownQueues(["mail"])
    queues.note(rows("mail", first=None), claimed=["mail"])
    assert (queues.names, queues.after) == (["mail"], None)


def test_status_counts_the_queues_that_it_does_not_show(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("sqlq.store.health", "sqlq.admin.queues"):
        monkeypatch.setattr(f"{module}.QUEUE_LIMIT", 3)
    enqueue_in(app, [f"q{i}" for i in range(6)])
    app.queues.pause("q5")
    for exact in (False, True):
        shown = app.queues.list(exact=exact)
        assert [each.queue for each in shown] == ["q0", "q1", "q5"], "a paused queue is shown first"
        assert shown.others == 3
        show_queues(Context(), shown)
        assert "and 3 other queues" in capsys.readouterr().out
