"""Events on their way to listeners, and the numbers of a worker."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import sqlq
from sqlq import JobEvent, events
from sqlq.events import EventName
from sqlq.model.job import ClaimedJob
from sqlq.model.job_options import FailureReason
from sqlq.worker.report import meter as metering
from sqlq.worker.report.meter import OTHER, QUEUE_NAMES, Meter, Totals
from tests.kit import refuse_threads, wait_until
from tests.kit.workers import listening


def lost(id: int = 1, name: EventName = "lost") -> JobEvent:
    return JobEvent(name=name, id=id, task="t", queue="q", attempt=1)


def test_events_beyond_the_maximum_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "MAX_WAITING", 3)
    go_on, told = threading.Event(), []

    def slow(batch: list[JobEvent]) -> None:
        told.extend(batch)
        assert go_on.wait(20)

    app = sqlq.App("sqlite://")
    app.on("lost")(slow)
    app._events.publish(lost())
    wait_until(lambda: told)
    for _ in range(5):
        app._events.publish(lost())
    assert "slow is too slow: 1 events were dropped" in caplog.text, "the first; the others in a minute"
    go_on.set()
    assert app._events.flush(10)
    assert len(told) == 4


def test_events_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LARGEST_BATCH", 40)
    app, sizes = sqlq.App("sqlite://"), list[int]()
    app.on("lost")(lambda batch: sizes.append(len(batch)))
    for id in range(100):
        app._events.publish(lost(id))
    assert app._events.flush(10)
    assert sum(sizes) == 100
    assert max(sizes) <= 40
    assert len(sizes) < 50


def test_events_wait_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    app = sqlq.App("sqlite://")
    told, event = listening(app, "lost"), lost()
    with monkeypatch.context() as patched:
        refuse_threads(patched, "")
        app._events.publish(event)
    assert app._events.flush(10)
    assert told == [event]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_publishes_its_own_events(tmp_path: Path) -> None:
    app, file = sqlq.App("sqlite://"), tmp_path / "told.txt"

    @app.on("lost")
    def note(batch: list[JobEvent]) -> None:
        with file.open("a") as lines:
            lines.writelines(f"{event.id} {os.getpid()}\n" for event in batch)

    app._events.publish(lost(1))
    child = os.fork()
    if not child:
        app._events.publish(lost(2))
        app._events.flush(10)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert app._events.flush(10)
    assert sorted(file.read_text().splitlines()) == [f"1 {os.getpid()}", f"2 {child}"]


# -- numbers -------------------------------------------------------------------------------------------------


KNOWN = {"send": SimpleNamespace(name="send", aliases=("mail.send",), queue="mail")}


def claimed(task: str = "send", queue: str = "mail") -> ClaimedJob:
    return ClaimedJob(1, 1, queue, task, "{}", 1, 5)


def died(task: str, queue: str = "mail", name: str = "failed") -> JobEvent:
    return JobEvent(name=name, id=1, task=task, queue=queue, attempt=1, reason="worker_lost")


@pytest.fixture
def totals() -> Totals:
    return Totals()


@pytest.fixture
def counting(totals: Totals) -> Meter:
    return Meter(totals.add, KNOWN)


def test_counts_are_sent_once(totals: Totals, counting: Meter) -> None:
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


def test_counters_begin_at_zero_before_a_task_is_counted(totals: Totals, counting: Meter) -> None:
    """Prometheus sees no increase in a series that begins at another number."""
    counting.claimed([], 0.02)
    counting.flush()
    outcomes = {*get_args(EventName)} - {"enqueued", "started"}
    labels = [("attempts", each) for each in outcomes]
    labels += [("failed", each) for each in get_args(FailureReason)]
    expected = {(kind, task, "mail", label) for kind, label in labels for task in ("send", "mail.send")}
    counts = totals.now()[0]
    assert counts.keys() == {("claimed", "mail"), *expected}
    assert not any(counts.values())
    totals.event(died("send"))
    counting.claimed([claimed()], 0.02)
    counting.flush()
    assert totals.now()[0]["failed", "send", "mail", "worker_lost"] == 1, "once begun it is not begun again"


def test_unknown_tasks_and_queues_after_a_bound_count_as_other(totals: Totals, counting: Meter) -> None:
    Meter(totals.add, KNOWN).flush(totals.add)
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


def test_a_task_that_takes_the_place_of_another_is_named(totals: Totals) -> None:
    """And one that comes between a message and its being sent."""
    tasks: dict[str, Any] = dict(KNOWN)
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
