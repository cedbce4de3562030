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

from tests.kit import execute
from tests.kit.command import Command


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


# -- tables --------------------------------------------------------------------------------------------------


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
