"""The settings of workers by argument, variable and pyproject.toml, and the effect of those for polls and
claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.worker.claim import claimer as claim
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.ipc.parent import NoParent
from sqlq.worker.options import WorkerOptions, setting
from sqlq.worker.wait import poller
from tests.kit import claim_size_of, for_each, needs, wait_until, working

PLAIN: dict[str, Any] = {
    "queues": None,
    "concurrency": 1,
    "lease": "30s",
    "grace": "25s",
    "drain": False,
    "max_jobs": None,
}


def options(**given: Any) -> tuple[Any, ...]:
    made = WorkerOptions.of(**PLAIN | given)
    return made.poll_ms, made.claim_batch, made.ahead_ms


def test_an_argument_comes_before_the_variable_and_that_before_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert options() == (None, 1_000, 100)
    keys = 'poll = "1s"\nclaim-batch = 7\nahead = "10ms"\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.sqlq]\n{keys}")
    assert options() == (1_000, 7, 10)
    for name, value in (("POLL", "2s"), ("CLAIM_BATCH", "8"), ("AHEAD", "20ms")):
        monkeypatch.setenv(f"SQLQ_{name}", value)
    assert options() == (2_000, 8, 20)
    assert options(poll="3s", claim_batch=9, ahead="0s") == (3_000, 9, 0)


KEYS = """[tool.sqlq]
processes = 2
concurrency = 20
lease = "1m"
grace = "2m"
max-jobs = 1000
max-rss = "400MB"
wait = "60s"
"""
NUMBERS = {
    "processes": 2,
    "concurrency": 20,
    "lease": 60_000,
    "grace": 120_000,
    "max_jobs": 1_000,
    "max_rss": 400_000_000,
    "wait": 60_000,
}


def test_variables_and_keys_set_workers_where_no_argument_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {name: setting(name, None) for name in NUMBERS} == dict.fromkeys(NUMBERS)
    (tmp_path / "pyproject.toml").write_text(KEYS)
    assert {name: setting(name, None) for name in NUMBERS} == NUMBERS
    values = {"lease": "3s", "grace": "3s", "max_rss": "3KB", "wait": "3s"}
    for name in NUMBERS:
        monkeypatch.setenv(f"SQLQ_{name.upper()}", values.get(name, "3"))
    assert {setting(name, None) for name in NUMBERS} == {3, 3_000}
    made = WorkerOptions.of(**PLAIN | {"concurrency": None, "lease": None, "grace": None})
    assert (made.concurrency, made.lease_ms, made.grace_ms) == (3, 3_000, 3_000)
    made = WorkerOptions.of(**PLAIN | {"concurrency": 5, "lease": "5s", "grace": "5s"})
    assert (made.concurrency, made.lease_ms, made.grace_ms) == (5, 5_000, 5_000)


def test_a_worker_in_a_program_has_no_bound_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No supervisor would replace it."""
    monkeypatch.setenv("SQLQ_MAX_JOBS", "1")
    monkeypatch.setenv("SQLQ_MAX_RSS", "1MB")
    made = WorkerOptions.of(**PLAIN)
    assert (made.max_jobs, made.max_rss) == (None, None)


@for_each(
    ("name", "wrong", "says"),
    [
        ("poll", "10ms", "poll is '10ms': it must lie between 20 ms and 5 s"),
        ("poll", "6s", "poll is '6s': it must lie between 20 ms and 5 s"),
        ("poll", 1, "poll is 1: give a timedelta"),
        ("ahead", "2s", "ahead is '2s': it must lie between 0 ms and 1 s"),
        ("claim_batch", 0, "claim_batch is 0: it must be a whole number from 1 to 1,000"),
        ("claim_batch", "many", "claim_batch is 'many': it must be a whole number from 1 to 1,000"),
        ("concurrency", 1_001, "concurrency is 1001: it must be a whole number from 1 to 1,000"),
        ("lease", "2d", "lease is '2d': it must lie between 1 s and 24 h"),
        ("grace", "long", "grace is 'long': write it as in"),
    ],
)
def test_a_wrong_poll_or_batch_setting_is_reported_in_one_sentence(name: str, wrong: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{says}"):
        options(**{name: wrong})


def test_a_wrong_variable_and_a_wrong_key_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.sqlq]\nclaim-batch = 0\n")
    with pytest.raises(
        ConfigurationError, match=r"^claim_batch in .*pyproject.toml is 0: it must be a whole"
    ):
        options()
    monkeypatch.setenv("SQLQ_CLAIM_BATCH", "0.5")
    with pytest.raises(ConfigurationError, match=r"^SQLQ_CLAIM_BATCH is '0.5': it must be a whole number"):
        options()


def test_a_claim_brings_no_more_than_its_batch(app: sqlq.App) -> None:
    app.enqueue_many([app.named("t").new(n) for n in range(10)])
    claimer = Claimer(app.database, "me", WorkerOptions(("default",), 10, 30_000, claim_batch=3))
    taken = [len(claimer.claim(claim_size_of(claimer))) for _ in range(4)]
    assert taken == [3, 3, 3, 1]


@pytest.mark.parametrize(("ahead_ms", "wanted"), [(100, 105), (50, 55), (0, 5)])
def test_a_worker_wants_as_many_as_start_within_its_time(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, wanted: int
) -> None:
    monkeypatch.setattr(claim.Pace, "measure", lambda self, ended, busy_seconds: 1_000.0)
    claimer = Claimer(app.database, "me", WorkerOptions(("default",), 5, 30_000, ahead_ms=ahead_ms))
    assert claim_size_of(claimer) == wanted
    assert claim_size_of(claimer, running=5) == wanted - 5, "with all slots taken"


@needs("listen")
def test_a_host_polls_as_often_as_its_setting(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    ran: list[int] = []
    app.task(name="t")(lambda: ran.append(1))
    with working(app, poll="20ms") as worker:
        wait_until(lambda: worker._wake.is_resting, what="the worker resting")
        with app.database.begin() as conn:  # by SQL, with no notification
            conn.execute(text("INSERT INTO jobs (task) VALUES ('t')"))
        wait_until(lambda: ran, what="a look at the job")


@needs("file")
def test_a_sqlite_worker_polls_as_often_as_its_setting(app: sqlq.App) -> None:
    app.task(name="t")(lambda: None)
    with working(app, poll="100ms") as worker:
        wait_until(lambda: worker._wake._pause == 0.1, what="the longest pause")


def test_the_last_poll_counts_as_recent_for_three_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr(poller, "monotonic", lambda: now[0])
    last_look = poller.LastLook(NoParent(), 5_000)
    last_look.note()
    recent = []
    for _ in range(3):
        recent.append(last_look.is_recent())
        now[0] += 14.9 if len(recent) == 1 else 0.2
    assert recent == [True, True, False]
