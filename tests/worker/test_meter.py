"""The counts of a worker reach the supervisor once, in bounded names, and cost nothing without metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import sqlq
from sqlq.events import EventName, JobEvent
from sqlq.model.job import ClaimedJob
from sqlq.model.job_options import FailureReason
from sqlq.worker.ipc.parent import NoParent
from sqlq.worker.report import meter as metering
from sqlq.worker.report.meter import OTHER, QUEUE_NAMES, Meter, Totals
from tests.kit import span, worker_of

KNOWN = {"send": SimpleNamespace(name="send", aliases=("mail.send",), queue="mail")}


def claimed(task: str = "send", queue: str = "mail") -> ClaimedJob:
    return ClaimedJob(1, 1, queue, task, "{}", 1, 5)


def test_counts_are_sent_once() -> None:
    totals = Totals()
    counting = Meter(totals.add, KNOWN)
    for _ in range(3):
        counting.claimed([claimed(), claimed()], 0.02)
        counting.flush()
    counting.flush()
    counts, times = totals.now()
    assert +Counter(counts) == {("claimed", "mail"): 6}
    buckets, seconds = times["claim", "jobs"]
    assert sum(buckets) == 3
    assert buckets[metering.BOUNDS.index(0.025)] == 3
    assert round(seconds, 6) == 0.06


def test_counts_that_the_supervisor_did_not_take_are_sent_later() -> None:
    totals, takes = Totals(), False

    def send(numbers: dict[str, Any]) -> bool:
        if takes:
            totals.add(numbers)
        return takes

    counting = Meter(send, KNOWN)
    counting.claimed([claimed()], 0.02)
    counting.flush()
    assert not totals.now()[0]
    takes = True
    counting.claimed([claimed()], 0.02)
    counting.flush()
    assert +Counter(totals.now()[0]) == {("claimed", "mail"): 2}


def test_counters_begin_at_zero_when_a_worker_has_counted_nothing_of_a_task() -> None:
    """Prometheus sees no increase in a series that begins at another number."""
    totals = Totals()
    counting = Meter(totals.add, KNOWN)
    counting.claimed([], 0.02)
    counting.flush()
    outcomes = {*get_args(EventName)} - {"enqueued", "started"}
    labels = [
        *(("attempts", each) for each in outcomes),
        *(("failed", each) for each in get_args(FailureReason)),
    ]
    expected = {(kind, task, "mail", label) for kind, label in labels for task in ("send", "mail.send")}
    counts = totals.now()[0]
    assert counts.keys() == {("claimed", "mail"), *expected}
    assert not any(counts.values())
    totals.event(died("send"))
    counting.claimed([claimed()], 0.02)
    counting.flush()
    assert totals.now()[0]["failed", "send", "mail", "worker_lost"] == 1, "once begun it is not begun again"


def test_a_time_counts_in_the_bucket_of_its_upper_bound() -> None:
    numbers = metering.Numbers()
    for seconds in (0.0, 0.001, 0.0011, 1800.0, 1801.0):
        numbers._time(seconds, "claim", "jobs")
    assert numbers._times["claim", "jobs"][:-1] == [2, 1, *[0] * (len(metering.BOUNDS) - 3), 1, 1]


def died(task: str, queue: str = "mail", name: str = "failed") -> JobEvent:
    return JobEvent(name=name, id=1, task=task, queue=queue, attempt=1, reason="worker_lost")


def test_unknown_tasks_and_queues_after_a_bound_count_as_other() -> None:
    totals = Totals()
    Meter(totals.add, KNOWN).flush(totals.add)
    counting = Meter(totals.add, KNOWN)
    counting.claimed([claimed()], 0.0)
    counting.flush()  # the names of tasks come with the first numbers
    for i in range(50):
        totals.event(died(f"nobody{i}"))
    for name in ("send", "mail.send"):
        totals.event(died(name))
    for i in range(QUEUE_NAMES + 50):
        totals.event(died("send", f"tenant{i}"))
    counts, _ = totals.now()
    tasks = {key[1] for key in counts if key[0] == "attempts"}
    queues = {key[2] for key in counts if key[0] == "attempts"}
    assert tasks == {"send", "mail.send", OTHER}
    assert len(queues) == QUEUE_NAMES + 1
    assert counts["attempts", OTHER, "mail", "failed"] == 50
    assert counts["failed", "send", OTHER, "worker_lost"] == 51


def test_a_task_that_takes_the_place_of_another_is_named() -> None:
    """And one that comes between a message and its being sent."""
    tasks: dict[str, Any] = dict(KNOWN)
    totals = Totals()
    sends: list[Callable[[], None]] = []

    def send(numbers: Any) -> bool:
        totals.add(numbers)
        for late in sends:
            late()
        return True

    counting = Meter(send, tasks)
    counting.claimed([claimed()], 0.02)
    counting.flush()
    gone = tasks.pop(next(iter(tasks)))
    tasks["new"] = SimpleNamespace(**{**vars(gone), "name": "new"})
    sends.append(lambda: tasks.update(late=SimpleNamespace(**{**vars(gone), "name": "late"})))
    counting.claimed([claimed()], 0.02)
    counting.flush()
    assert "new" in totals._known
    sends.clear()
    counting.claimed([claimed()], 0.02)
    counting.flush()
    assert "late" in totals._known


class WorkerRequest(NoParent):
    """The parent of a worker in a test that counts."""

    def __init__(self) -> None:
        self.totals = Totals()

    def meter(self, tasks: Any) -> Meter:
        return Meter(self.totals.add, tasks)


def test_a_worker_counts_how_its_attempts_end(app: sqlq.App) -> None:
    @app.task(name="send", queue="mail")
    def send(order_id: int) -> None: ...

    @app.task(name="fail", max_attempts=2, backoff="0s")
    def fail() -> None:
        raise ValueError("no")

    @app.task(name="later")
    def later() -> None:
        raise sqlq.Snooze("1h")

    @app.task(name="no more")
    def no_more() -> None:
        raise sqlq.Cancel("no more")

    app.enqueue_many([*map(send.new, range(5)), fail.new(), later.new(), no_more.new()])
    asked = WorkerRequest()
    worker_of(app, drain=True, supervision=asked).run()
    counts, times = asked.totals.now()
    assert {key[1:]: n for key, n in counts.items() if key[0] == "attempts" and n} == {
        ("send", "mail", "finished"): 5,
        ("fail", "default", "retried"): 1,
        ("fail", "default", "failed"): 1,
        ("later", "default", "snoozed"): 1,
        ("no more", "default", "cancelled"): 1,
    }
    assert counts["failed", "fail", "default", "error"] == 1
    assert counts["claimed", "mail"] == 5
    assert counts["claimed", "default"] == 4
    ran, waited = times["run", "send", "mail", "finished"], times["wait", "send", "mail"]
    assert sum(ran[0]) == sum(waited[0]) == sum(times["settle", "mail"][0]) == 5
    assert 0 < ran[1] < 5
    assert 0 <= waited[1] < 60


def test_a_wait_is_counted_from_when_the_job_was_due(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    with app.database.begin() as conn:
        conn.exec_driver_sql(f"UPDATE jobs SET available_at = available_at - {span(conn, 60)}")
    asked = WorkerRequest()
    worker_of(app, drain=True, supervision=asked).run()
    _, seconds = asked.totals.now()[1]["wait", "t", "default"]
    assert 60 <= seconds < 120


def test_a_worker_without_metrics_counts_nothing(app: sqlq.App) -> None:
    worker = app.worker(drain=True)
    assert worker._meter is None
    assert worker._reporter._meter is None
