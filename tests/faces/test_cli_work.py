"""`sqlq work` as a process: what it runs, how it stops, what it logs."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.job import State
from tests.faces.command import Command
from tests.waiting import wait_until


def _enqueue(run: Command, *args: str) -> int:
    return int(run.shop("enqueue", "--json", *args).json()["id"])


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_drain_works_until_nothing_is_available_and_says_what_it_did(sqlq_: Command, app: sqlq.App, database_url: str) -> None:
    done, failing = _enqueue(sqlq_, "shop.send", "7", "true"), _enqueue(sqlq_, "shop.fail", "lift it", "--max-attempts", "1")
    here, later = _enqueue(sqlq_, "shop.where"), _enqueue(sqlq_, "shop.send", "8", "--delay", "1h")
    worked = sqlq_.work("-c", "3")
    assert worked.out == "", "logs go to stderr"
    first, *middle, last = worked.err.splitlines()
    for line in (first, *middle, last):
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO   |WARNING) ", line), line
    place = database_url if database_url.startswith("sqlite") else database_url.rpartition("/")[2]
    for words in (place, "all queues", "3 slots", "4 tasks"):
        assert words in first
    assert len(middle) == 3
    assert any(f"job {done} shop.send (queue mail, attempt 1 of 2) finished" in line for line in middle)
    assert any(
        f"job {failing} shop.fail (queue mail, attempt 1 of 1) failed for good" in line and "cannot lift it" in line for line in middle
    )
    assert last.endswith("stopped: 2 completed, 1 failed")
    assert app.get(done).result == "7 True "
    assert app.get(here).result == str(sqlq_.directory)
    assert app.get(failing).state is State.FAILED
    assert app.get(later).state is State.SCHEDULED


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_worker_says_where_its_sqlite_file_is(sqlq_: Command, database_url: str) -> None:
    name = Path(database_url.removeprefix("sqlite:///")).name
    worked = sqlq_("-d", f"sqlite:///{name}", "-a", "shop:app", "work", "--drain")
    assert f"sqlite:///{sqlq_.directory / name}" in worked.err


def test_only_the_queues_named_are_served_and_only_so_many_jobs_by_a_process(sqlq_: Command, app: sqlq.App) -> None:
    mail = [_enqueue(sqlq_, "shop.send", str(n)) for n in range(2)]
    first, other = _enqueue(sqlq_, "shop.send", "7", "--queue", "first"), _enqueue(sqlq_, "shop.send", "7", "--queue", "other")
    worked = sqlq_.work("-q", "first", "-q", "mail", "--max-jobs", "2").err
    assert "queues first, mail" in worked
    assert [app.get(id).state for id in (first, *mail, other)] == [*[State.FINISHED] * 3, State.AVAILABLE]
    assert "it has had its number of jobs" in worked


def test_log_lines_as_json_carry_the_fields_of_the_event(sqlq_: Command) -> None:
    done, failing = _enqueue(sqlq_, "shop.send", "7"), _enqueue(sqlq_, "shop.fail", "it")
    worked = _lines(sqlq_.work("--log-format", "json").err)
    assert worked[0]["event"] == "started"
    assert worked[-1]["event"] == "stopped"
    events = {(line["event"], line["job_id"]): line for line in worked if "job_id" in line}
    line = events["completed", done]
    assert (line["task"], line["queue"], line["attempt"], line["level"]) == ("shop.send", "mail", 1, "info")
    assert line["duration_ms"] >= 0
    assert line["time"].endswith("+00:00")
    assert f"job {done} shop.send" in line["message"]
    assert events["retried", failing]["level"] == "warning"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_log_level_is_kept(sqlq_: Command) -> None:
    _enqueue(sqlq_, "shop.send", "7")
    assert sqlq_.work("--log-level", "warning").err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_what_runs_finish(sqlq_: Command, app: sqlq.App, number: signal.Signals) -> None:
    running = _enqueue(sqlq_, "wait", "a")
    with sqlq_.working("-c", "1") as worker:
        sqlq_.wait_for("a.started")
        waiting = _enqueue(sqlq_, "shop.send", "7")
        worker.send_signal(number)
        wait_until(lambda: "stopping" in sqlq_.log())
        assert worker.poll() is None
        sqlq_.touch("a.go")
        assert worker.wait(30) == 0
    assert [app.get(id).state for id in (running, waiting)] == [State.FINISHED, State.AVAILABLE]
    assert app.get(waiting).attempts == 0
    assert "stopped: 1 completed" in sqlq_.log()
    assert app.admin.workers() == []


def test_after_the_grace_time_a_running_job_is_given_back_unburnt(sqlq_: Command, app: sqlq.App) -> None:
    running = _enqueue(sqlq_, "wait", "a")
    with sqlq_.working("--grace", "100ms") as worker:
        sqlq_.wait_for("a.started")
        worker.terminate()
        assert worker.wait(30) == 0, "a handler that cannot be stopped must not keep the process"
    job = app.get(running)
    assert (job.state, job.attempts, job.releases) == (State.AVAILABLE, 0, 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_second_signal_leaves_at_once(sqlq_: Command, app: sqlq.App, number: signal.Signals, code: int) -> None:
    running = _enqueue(sqlq_, "wait", "a")
    with sqlq_.working() as worker:
        sqlq_.wait_for("a.started")
        worker.send_signal(number)
        wait_until(lambda: "stopping" in sqlq_.log())
        worker.send_signal(number)
        assert worker.wait(30) == code
    assert app.get(running).state is State.RUNNING, "its lease runs out, and somebody else takes over"
    assert "Traceback" not in sqlq_.log()


WRONG: dict[tuple[str, ...], str] = {
    ("--lease", "5"): 'text such as "30s"',
    ("--lease", "10ms"): "it must lie between 1s and 1d",
    ("--grace", "soon"): "grace is 'soon'",
    ("-c", "0"): "concurrency is 0",
    ("-q", ""): "queue is ''",
    ("--max-jobs", "0"): "max_jobs is 0",
}


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_wrong_options_are_one_sentence(sqlq_: Command, args: tuple[str, ...]) -> None:
    assert WRONG[args] in sqlq_.shop("work", *args).sentence()
