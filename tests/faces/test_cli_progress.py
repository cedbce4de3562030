"""The output of a drain while it works, on a terminal and elsewhere, and at its end."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

import sqlq
from sqlq.cli.terminal import progress
from sqlq.store.jobs import lookup
from tests.kit import needs, wait_until
from tests.kit.command import Command

APP = """
import logging, os, signal, time, sqlq
app = sqlq.App()

@app.task(name="slow")
def slow():
    time.sleep(0.1)

@app.task(name="endless")
def endless():
    logging.getLogger("shop").warning("look here")
    while not sqlq.current_job().should_stop():
        time.sleep(0.05)

@app.task(name="dies", max_attempts=1)
def dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def enqueue(app: sqlq.App, task: str, count: int = 1) -> None:
    new = app.task(name=task, max_attempts=1 if task == "dies" else 5)(lambda: None).new()
    app.enqueue_many([new] * count)


@pytest.fixture
def terminal(sqlq_: Command) -> Command:
    (sqlq_.directory / "slow.py").write_text(APP)
    sqlq_.environment |= {"SQLQ_APP": "slow:app", "TERM": "xterm", "COLUMNS": "100"}
    return sqlq_


def on_terminal(run: Command, *options: str, interrupt_at: str | None = None) -> tuple[int, str]:
    """Run a worker whose stderr is a terminal; press Ctrl-C when it has shown a text."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sqlq", "work", *options],
        cwd=run.directory,
        env=run.environment,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown, until = b"", time.monotonic() + 120
    try:
        while time.monotonic() < until:
            if select.select([ours], [], [], 1)[0]:
                try:
                    shown += os.read(ours, 65_536)
                except OSError:  # the other side is closed
                    break
            if interrupt_at is not None and interrupt_at in shown.decode():
                os.killpg(process.pid, signal.SIGINT)
                interrupt_at = None
        return process.wait(30), shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


LINE = r"\r\x1b\[2K([^\r]* running, [^\r]*)\r"


@needs("cheap")
def test_a_drain_on_a_terminal_draws_one_changing_line(terminal: Command, app: sqlq.App) -> None:
    enqueue(app, "slow", 30)
    code, shown = on_terminal(terminal, "--drain", "-c", "2")
    assert code == 0
    drawn = re.findall(LINE, shown)
    assert drawn, shown
    assert any(re.search(r"\d a (second|minute)\), [12] running, \d+ waiting", line) for line in drawn), drawn
    assert ") finished in" not in shown
    last = shown.rstrip().rpartition("\x1b[2K")[2]
    assert re.search(r"stopped: 30 finished in [\d.]+ s \([\d.]+ a (second|minute)\)$", last), shown[-500:]


@needs("cheap")
def test_a_drain_with_lines_prints_a_line_a_job(terminal: Command, app: sqlq.App) -> None:
    enqueue(app, "slow", 2)
    _, shown = on_terminal(terminal, "--drain", "--lines")
    assert shown.count(") finished in") == 2
    assert "\x1b[2K" not in shown


@needs("cheap")
def test_ctrl_c_leaves_the_terminal_clean(terminal: Command, app: sqlq.App) -> None:
    enqueue(app, "endless")
    code, shown = on_terminal(terminal, "--drain", "--grace", "100ms", interrupt_at="1 running")
    assert code == 0
    assert "[shop] job 1 endless: look here" in shown
    assert "\x1b[2K" in shown
    after = shown.rpartition(" running")[2].partition("\r")[2]
    assert after.startswith("\r\x1b[2K"), "the line of progress is taken away"
    assert "Traceback" not in shown


@needs("cheap")
def test_a_job_that_fails_with_its_process_is_counted(terminal: Command, app: sqlq.App) -> None:
    enqueue(app, "slow", 2)
    enqueue(app, "dies")
    done = terminal("work", "--drain", "-c", "1")
    assert done.code == 0
    assert "1 failed" in done.err.splitlines()[-1], done.err
    (line,) = (line for line in done.err.splitlines() if "job 3 dies" in line)
    assert " ERROR " in line, "a failure for good, once"
    assert "WorkerLostError" in done.err
    assert app.jobs.get(3).reason == "worker_lost"


def test_waiting_jobs_are_counted_up_to_a_limit(app: sqlq.App, engine: Engine) -> None:
    new = app.task(name="t", queue="mail")(lambda: None).new()
    app.enqueue_many([*[new] * 5, new.set(delay="1h"), new.set(queue="other")])
    with engine.begin() as conn:
        reserve = "SET reserved_at = created_at, reserved_by = 'w', lease_expires_at = created_at"
        conn.execute(text(f"UPDATE jobs {reserve} WHERE id = 1"))
    with app.database.read() as conn:
        assert lookup.waiting(conn, None, 100) == (5, True)
        assert lookup.waiting(conn, ["mail"], 100) == (4, True)
        assert lookup.waiting(conn, ["none"], 100) == (0, True)
        assert lookup.waiting(conn, ["mail", "other"], 3).exact is False


def test_a_drain_without_a_terminal_logs_a_summary(
    app: sqlq.App, database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.enqueue_many([app.task(name="t")(lambda: None).new()] * 5)
    supervisor: Any = SimpleNamespace(
        counts=Counter(finished=90, failed=2),
        running=3,
        ready_since=time.monotonic() - 10,
        location=(make_url(database_url).render_as_string(hide_password=False), app.database.schema),
    )
    monkeypatch.setattr(progress, "SUMMARY_SECONDS", 0.01)
    caplog.set_level("INFO", "sqlq.worker")
    with progress.Progress(supervisor, None, drawn=False):
        wait_until(lambda: caplog.messages, what="a summary")
    assert re.fullmatch(
        r"90 finished, 2 failed in 1\d[\d.]* s \([789][\d.]* a second\), 3 running, 5 waiting",
        caplog.messages[0],
    )


def test_the_last_line_has_the_counts_and_the_rate() -> None:
    def said(seconds: float, **counts: int) -> str:
        supervisor: Any = SimpleNamespace(counts=Counter(counts), ready_since=time.monotonic() - seconds)
        return progress.outcomes(supervisor)

    assert (
        said(192.0, finished=1472, retried=30, failed=31, lost=0, released=1)
        == "1,472 finished, 30 retried, 31 failed, 1 released in 3 min 12 s (7.67 a second)"
    )
    assert said(5.0, failed=1) == "1 failed in 5 s"
    assert said(5.0) == "no jobs"
