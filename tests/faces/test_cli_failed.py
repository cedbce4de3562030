"""`sqlq status` and `sqlq failed`: what they show, to people and to programs, and what they mend."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.model.job import State
from tests.kit import execute, wait_until
from tests.kit.command import SEARCH, Command

FAILED_KEYS = {
    "id", "queue", "task", "priority", "attempts", "max_attempts", "unique_key", "created_at", "reserved_at",
    "ended_at", "reason", "exception", "message",
}  # fmt: skip


def _failed(
    engine: Engine,
    id: int,
    *,
    queue: str = "mail",
    task: str = "shop.fail",
    key: str | None = None,
    message: str = "boom",
) -> int:
    """A failed job, as a worker leaves it."""
    execute(
        engine,
        "INSERT INTO failed_jobs (id, queue, task, payload, priority, attempts, max_attempts, "
        "available_at, lease_token, "
        "unique_key, unique_until, releases, created_at, reason, exception, message) "
        'SELECT :id, :queue, :task, \'{"args": ["it"]}\', 0, 2, 2, available_at, 2, :key, '
        "'finish', 0, created_at, "
        "'error', 'ValueError', :message FROM jobs WHERE task = 'model'",
        id=id,
        queue=queue,
        task=task,
        key=key,
        message=message,
    )
    return id


@pytest.fixture(autouse=True)
def _model(engine: Engine) -> None:
    """A job whose times the failed ones take: each database stores times in its own way."""
    execute(engine, "INSERT INTO jobs (queue, task) VALUES ('model', 'model')")


# -- status --------------------------------------------------------------------------------------------------


def test_status_shows_each_queue_and_its_workers(sqlq_: Command, engine: Engine) -> None:
    _failed(engine, 101)
    found = sqlq_("status", "--json").json()
    assert found["workers"] == []
    queues = {queue["queue"]: queue for queue in found["queues"]}
    keys = {"queue", "available", "scheduled", "blocked", "running", "failed"}
    keys |= {"oldest_wait_seconds", "paused", "served", "capped", "estimated"}
    assert all(queue.keys() == keys for queue in queues.values())
    assert (queues["model"]["available"], queues["model"]["served"], queues["mail"]["failed"]) == (
        1,
        False,
        1,
    )
    assert queues["model"]["oldest_wait_seconds"] >= 0
    first, second, _, header, *rows = sqlq_.ok("status").splitlines()
    assert first.startswith("to do: no worker is alive, and 1 job is due → start one with sqlq work")
    assert second.startswith("check: 1 job has failed for good → sqlq failed")
    assert header.split() == [
        "queue",
        "available",
        "scheduled",
        "blocked",
        "running",
        "failed",
        "oldest",
        "wait",
        "served",
    ]
    assert [row.split()[:6] for row in rows[:2]] == [
        ["mail", "0", "0", "0", "0", "1"],
        ["model", "1", "0", "0", "0", "0"],
    ]
    assert rows[1].rstrip().endswith("no worker")


def test_status_shows_the_live_workers(sqlq_: Command) -> None:
    with sqlq_.working("-q", "mail", "-c", "2") as worker:
        sqlq_.wait_for_worker()
        found = sqlq_("status", "--json").json()
        assert [(w["queues"], w["concurrency"]) for w in found["workers"]] == [(["mail"], 2)]
        pid = found["workers"][0]["pid"]
        assert pid != worker.pid, "that is the supervisor"
        assert {queue["queue"]: queue["served"] for queue in found["queues"]} == {
            "mail": True,
            "model": False,
        }
        said = sqlq_.ok("status")
        assert said.startswith(
            "to do: no worker serves model (1 due) → start one with sqlq work -q model -a module:attribute"
        )
        assert re.search(rf"pid {pid} +idle +mail +2 ", said)
        worker.terminate()
        assert worker.wait(30) == 0
    assert sqlq_("status", "--json").json()["workers"] == []


# -- jobs --state failed, show --------------------------------------------------------------------------------


def test_failed_jobs_are_listed_the_newest_first(sqlq_: Command, engine: Engine) -> None:
    assert sqlq_.ok("jobs", "--state", "failed") == "no failed jobs\n"
    assert sqlq_("jobs", "--state", "failed", "--json").json() == []
    for id in (101, 102):
        _failed(engine, id)
    _failed(engine, 103, queue="boxes", task="shop.pack", message="no box\nleft")
    found = sqlq_("jobs", "--state", "failed", "--json").json()
    assert [job["id"] for job in found] == [103, 102, 101]
    assert all(job.keys() >= FAILED_KEYS for job in found)
    assert "payload" not in found[0]
    assert sqlq_("show", "103", "--json").json()["payload"] == {"args": ["it"]}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?[+-]\d\d:\d\d", found[0]["ended_at"])
    assert [job["id"] for job in sqlq_("jobs", "--state", "failed", "--queue", "boxes", "--json").json()] == [
        103
    ]
    assert [
        job["id"]
        for job in sqlq_("jobs", "--state", "failed", "--task", "shop.fail", "-n", "1", "--json").json()
    ] == [102]
    assert sqlq_.ok("jobs", "--state", "failed", "--queue", "nowhere") == "no failed jobs in queue nowhere\n"
    header, *rows = sqlq_.ok("jobs", "--state", "failed").splitlines()
    assert header.split() == ["id", "state", "queue", "task", "attempts", "time", "error"]
    assert [row.split()[0] for row in rows] == ["103", "102", "101"]
    assert rows[0].rstrip().endswith("ValueError: no box left")
    assert "these are the newest 2; --limit N shows more" in sqlq_.ok("jobs", "--state", "failed", "-n", "2")


def test_a_table_is_not_cut_in_a_pipe_and_fits_a_given_width(sqlq_: Command, engine: Engine) -> None:
    message = "the warehouse says " + "no " * 100 + "end"
    task = "a_rather_long_package.with_modules.and_a_long_function"
    _failed(engine, 101, message=message, task=task)
    (_, row) = sqlq_.ok("jobs", "--state", "failed").splitlines()
    assert message in row
    narrow = sqlq_.ok("jobs", "--state", "failed", env={"COLUMNS": "80"}).splitlines()
    assert max(map(len, narrow)) <= 80
    header, *rows = narrow
    start, end = header.index("task"), header.index("attempts")
    assert "".join(row[start:end].strip() for row in rows) == task, "a name that does not fit goes on below"
    assert re.match(r"101  failed  mail ", rows[0])
    assert "ValueError: the" in rows[0]


def test_a_terminal_gets_a_fitting_table_without_escapes_from_rows(sqlq_: Command, engine: Engine) -> None:
    _failed(engine, 101, message="\x1b[2Jgone \x07" + "long " * 50)
    lead, follow = pty.openpty()
    fcntl.ioctl(follow, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**sqlq_.environment, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "sqlq", "jobs", "--state", "failed"],
        cwd=sqlq_.directory,
        env=environment,
        stdout=follow,
        stderr=follow,
    ) as process:
        os.close(follow)
        shown = b""
        with suppress(OSError):  # the error of Linux when the other end is closed
            while chunk := os.read(lead, 65_536):
                shown += chunk
    os.close(lead)
    assert process.returncode == 0
    output = shown.decode()
    assert "\x1b[1m" in output, "headings are bold"
    assert "\x1b[2J" not in output
    assert "\x07" not in output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert "gone" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 80
    assert "\x1b" not in sqlq_.ok("jobs", "--state", "failed")


def test_show_prints_a_failed_job_with_its_traceback(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_.shop("enqueue", "shop.fail", "lift it", "--json").json()["id"]
    wait_until(lambda: "1 failed" in sqlq_.work().err, timeout=60)
    found = sqlq_("show", str(id), "--json").json()
    assert (found["id"], found["state"], found["reason"], found["exception"]) == (
        id,
        "failed",
        "error",
        "ValueError",
    )
    assert found["message"] == "cannot lift it\nfor several reasons"
    assert "raise ValueError" in found["traceback"]
    assert [(error["attempt"], error["exception"]) for error in found["errors"]] == [(1, "ValueError")]
    said = sqlq_.ok("show", str(id))
    for words in (
        '{"args": ["lift it"]}',
        "2 of 2",
        "ValueError: cannot lift it",
        "history",
        'shop.py", line',
    ):
        assert words in said


def test_an_unknown_job_is_reported_in_one_sentence(sqlq_: Command) -> None:
    assert "there is no job 4711" in sqlq_("show", "4711").sentence()
    assert sqlq_("show", "x").code == 2


# -- retry, delete -----------------------------------------------------------------------------


def test_a_failed_job_runs_again_once_its_cause_is_mended(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_.shop("enqueue", "shop.fail", "it", "--json").json()["id"]
    wait_until(lambda: "1 failed" in sqlq_.work().err, timeout=60)
    sqlq_.touch("mended")
    assert sqlq_.ok("retry", str(id)) == f"retried 1 job: {id}\n"
    sqlq_.work()
    job = app.jobs.get(id)
    assert (job.state, job.attempts, len(job.errors)) == (State.FINISHED, 1, 2)


def test_retry_by_id_task_queue_or_all(sqlq_: Command, engine: Engine) -> None:
    for id, queue, task in (
        (101, "a", "x"),
        (102, "a", "y"),
        (103, "b", "x"),
        (104, "b", "y"),
        (105, "c", "z"),
    ):
        _failed(engine, id, queue=queue, task=task)
    assert sqlq_("retry").misuse() == f"name the jobs, or give {SEARCH}, --error, --flow, --all"
    assert "or all of them, and not both" in sqlq_("retry", "101", "--all").sentence()
    nothing: dict[str, list[int]] = {"held": [], "not_retried": []}
    assert sqlq_("retry", "101", "--json").json() == {"retried": [101], **nothing}
    assert sqlq_("retry", "--task", "x", "--json").json() == {"retried": [103], **nothing}
    assert sqlq_("retry", "--queue", "a", "--json").json() == {"retried": [102], **nothing}
    assert sqlq_("retry", "--all", "--json").json() == {"retried": [104, 105], **nothing}
    assert sqlq_.ok("retry", "--all") == "no jobs retried\n"


def test_retry_prints_an_outcome_for_each_id(sqlq_: Command, engine: Engine, app: sqlq.App) -> None:
    for id in (101, 102):
        _failed(engine, id, key="k")
    (model,) = app.jobs.list(state="available")
    done = sqlq_("retry", "101", "102", "4711", str(model.id))
    assert done.code == 1
    assert "retried 1 job: 101" in done.out
    assert "1 job stays failed, since live jobs hold the same unique keys: 102" in done.out
    assert "job 4711: there is no such job" in done.err
    assert f"job {model.id}: it is available: retry is for failed jobs" in done.err


def test_retry_names_the_live_job_and_exits_with_1_for_a_held_key(sqlq_: Command, engine: Engine) -> None:
    for id in (101, 102):
        _failed(engine, id, key="k")
    sqlq_.ok("retry", "101")
    done = sqlq_("retry", "102")
    assert done.code == 1
    assert "job 102: a live job holds its unique key: sqlq why 102 names it" in done.err
    assert sqlq_("retry", "--all").code == 0


def test_delete_by_id_task_queue_or_all(sqlq_: Command, engine: Engine, app: sqlq.App) -> None:
    for id, queue, task in (
        (101, "a", "x"),
        (102, "a", "y"),
        (103, "b", "x"),
        (104, "b", "y"),
        (105, "c", "z"),
    ):
        _failed(engine, id, queue=queue, task=task)
    assert sqlq_("delete").misuse() == f"name the jobs, or give {SEARCH}, --error, --all"
    assert sqlq_("delete", "101", "--json").json() == {"deleted": [101], "not_deleted": []}
    assert sqlq_.ok("delete", "--task", "x", "--yes") == "deleted 1 job of task x: 103\n"
    assert sqlq_("delete", "102", "--queue", "b").code == 1, "ids and queue must both fit"
    assert [job.id for job in app.jobs.list(state="failed")] == [105, 104, 102]
    assert sqlq_("delete", "--all", "--yes", "--json").json() == {
        "deleted": [102, 104, 105],
        "not_deleted": [],
    }
    assert app.jobs.list(state="failed") == []
