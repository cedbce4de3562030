"""A NewJob and its options: each one checked where it is given, the job itself never changed."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from zoneinfo import ZoneInfo

import pytest

from sqlq.app.app import App
from sqlq.enqueue.enqueue import spread_over
from sqlq.errors import ArgumentsError, ConfigurationError, EnqueueError
from sqlq.model.job import NewJob, Progress
from sqlq.model.outcome import Follower
from tests.kit import for_each

JOB = NewJob(task="shop.send_receipt", payload="{}", queue="mail", max_attempts=5)
SOON = datetime(2030, 1, 1, tzinfo=UTC)


def test_set_returns_another_job() -> None:
    changed = JOB.set(queue="slow", priority=-100, max_attempts=1, timeout="30s")
    changed = changed.set(unique_key="k", unique_until="start", delay=timedelta(minutes=5))
    options = dataclasses.replace(JOB, queue="slow", priority=-100, max_attempts=1, timeout_ms=30_000)
    assert changed == dataclasses.replace(options, delay_ms=300_000, unique_key="k", unique_until="start")
    assert NewJob(task="shop.send_receipt", payload="{}", queue="mail", max_attempts=5) == JOB
    assert JOB.set() == JOB
    assert JOB.set(delay="5m").set(available_at=SOON) == JOB.set(available_at=SOON)
    assert JOB.set(available_at=SOON).set(delay="5m") == JOB.set(delay="5m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        JOB.queue = "slow"  # type: ignore[misc]


def test_none_takes_a_key_a_label_and_a_group_away() -> None:
    named = JOB.set(unique_key="k", on_conflict="debounce", max_wait="1h", label="ada", batch="import")
    assert named.set(unique_key=None, label=None, batch=None) == JOB
    for option in ("unique_key", "label", "batch"):
        with pytest.raises(EnqueueError, match=f"{option} is ''"):
            JOB.set(**{option: ""})  # type: ignore[arg-type]


def test_a_spread_counts_instants_in_the_hour_that_comes_twice() -> None:
    half_past = datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    for fold in (0, 1):
        due = datetime(2030, 10, 27, fold, 30, tzinfo=UTC)
        job = JOB.set(available_at=half_past.replace(fold=fold))
        spread = [each.available_at for each in spread_over([job, job], "2h")]
        assert spread == [due, due + timedelta(hours=1)]


class Queue(Enum):
    MAIL = "mail"


class Mixed(str, Enum):  # noqa: UP042  # what people had before StrEnum
    MAIL = "mail"


class Name(StrEnum):
    MAIL = "mail"


def test_names_may_be_members_of_text_enums() -> None:
    for queue in (Mixed.MAIL, Name.MAIL):
        job = JOB.set(queue=queue, unique_key=queue)
        assert type(job.queue) is str is type(job.unique_key)
        assert job.queue == job.unique_key == "mail"
    with pytest.raises(EnqueueError, match=r"queue is <Queue.MAIL: 'mail'>: it must be text"):
        JOB.set(queue=Queue.MAIL)  # type: ignore[arg-type]


def test_a_queue_has_no_separator_in_its_name() -> None:
    """It would be two queues, or one with a weight, to `sqlq work -q`."""
    app = App("sqlite:///none.db")
    for name in ("a,b", "a=1", "mail=3", "="):
        refused = f"queue is '{name}': a comma separates queues, and = a weight"
        with pytest.raises(ConfigurationError, match=refused):
            app.task(name="t", queue=name)(print)
        with pytest.raises(EnqueueError, match=refused):
            JOB.set(queue=name)
        with pytest.raises(ConfigurationError, match=refused):
            app.worker([name])


@for_each("queue", ["a,b", "\\ud800", "\\u0000", " ", "x" * 256])
def test_a_bad_queue_of_a_callback_is_named_with_its_column(queue: str) -> None:
    with pytest.raises(ArgumentsError, match=r"^the queue in on_failure "):
        Follower.from_text(f'{{"task": "alarm", "queue": "{queue}"}}', "on_failure")


def test_arguments_are_shown() -> None:
    app = App("sqlite:///shop.db")
    task = app.task(name="t")(lambda *args, **kwargs: None)
    new = task.new(7, (1, 2), copy=True)
    assert (new.args, new.kwargs) == ([7, [1, 2]], {"copy": True})
    assert (task.new().args, task.new().kwargs) == ([], {})
    assert new.set(delay="1h").args == new.args
    unread = new._with_payload("sqlq:encrypted")
    assert (unread.args, unread.kwargs) == (None, None)
    assert new == task.new(7, (1, 2), copy=True)
    assert new != task.new(7, (1, 2))
    assert new != new.set(delay="1h")


@for_each(
    ("progress", "share", "text"),
    [
        (Progress(25, 100), 0.25, "25 of 100"),
        (Progress(3, 12, "packing"), 0.25, "3 of 12 (25%): packing"),
        (Progress(0.5), None, "0.5"),
        (Progress(7, 0), None, "7 of 0"),
        (Progress(9, 3), 1.0, "9 of 3 (100%)"),
    ],
)
def test_progress_is_shown_with_share_and_text(progress: Progress, share: float | None, text: str) -> None:
    assert (progress.share, str(progress)) == (share, text)
