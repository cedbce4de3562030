"""Commands on a terminal confirm, draw and fit its width. A drain reports its progress."""

from __future__ import annotations

import re
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

import sqlq
from sqlq.cli.terminal import progress
from sqlq.store.jobs import lookup
from tests.kit import end, failed, needs, wait_until
from tests.kit.command import Command

pytestmark = pytest.mark.integration

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


@pytest.fixture
def slow(sqlq_: Command) -> Command:
    (sqlq_.directory / "slow.py").write_text(APP)
    sqlq_.environment |= {"SQLQ_APP": "slow:app"}
    return sqlq_


def enqueue(app: sqlq.App, task: str, count: int = 1) -> None:
    app.enqueue_many([app.named(task).new()] * count)


@needs("cheap")
def test_a_command_that_ends_many_jobs_confirms_it_on_a_terminal(sqlq_: Command, app: sqlq.App) -> None:
    enqueue(app, "send", 3)
    done = sqlq_.on_terminal("cancel", "--all", typed="n\n")
    # some releases of click move the blanks around their prompt
    assert "cancel3jobs?[y/N]:" in done.out.replace(" ", "")
    assert (done.code, done.out.endswith("sqlq: nothing was done\r\n")) == (1, True), done
    assert {str(job.state) for job in app.jobs.list()} == {"available"}
    done = sqlq_.on_terminal("cancel", "--all", typed="y\n")
    assert (done.code, "cancelled 3 jobs: " in done.out) == (0, True), done


@needs("cheap")
def test_a_terminal_gets_a_fitting_table_without_escapes_from_rows(sqlq_: Command, app: sqlq.App) -> None:
    enqueue(app, "send")
    end(app, failed("\x1b[2Jgone \x07" + "long " * 50))
    shown = sqlq_.on_terminal("jobs", "--state", "failed").out
    assert "\x1b[1m" in shown, "headings are bold"
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "gone" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 100
    assert "\x1b" not in sqlq_.ok("jobs", "--state", "failed")


@needs("cheap")
def test_a_drain_on_a_terminal_draws_one_changing_line(slow: Command, app: sqlq.App) -> None:
    enqueue(app, "slow", 30)
    done = slow.on_terminal("work", "--drain", "-c", "2")
    assert done.code == 0
    drawn = re.findall(r"\r\x1b\[2K([^\r]* running, [^\r]*)\r", done.out)
    assert any(re.search(r"\d a (second|minute)\), [12] running, \d+ waiting", line) for line in drawn), drawn
    assert ") finished in" not in done.out
    last = done.out.rstrip().rpartition("\x1b[2K")[2]
    assert re.search(r"stopped: 30 finished in [\d.]+ s \([\d.]+ a (second|minute)\)$", last), last
    enqueue(app, "slow", 2)
    shown = slow.on_terminal("work", "--drain", "--lines").out
    assert (shown.count(") finished in"), "\x1b[2K" in shown) == (2, False), "a line for each job"


@needs("cheap")
def test_ctrl_c_leaves_the_terminal_clean(slow: Command, app: sqlq.App) -> None:
    enqueue(app, "endless")
    done = slow.on_terminal("work", "--drain", "--grace", "100ms", interrupt_at="1 running")
    assert done.code == 0
    assert "[shop] job 1 endless: look here" in done.out
    after = done.out.rpartition(" running")[2].partition("\r")[2]
    assert after.startswith("\r\x1b[2K"), "the line of progress is taken away"
    assert "Traceback" not in done.out


@needs("cheap")
def test_a_job_that_fails_with_its_process_is_counted(slow: Command, app: sqlq.App) -> None:
    enqueue(app, "slow", 2)
    enqueue(app, "dies")
    done = slow("work", "--drain", "-c", "1")
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
    supervisor: Any = SimpleNamespace(counts=Counter(finished=90, failed=2), running=3)
    supervisor.ready_since = time.monotonic() - 10
    supervisor.location = (make_url(database_url).render_as_string(hide_password=False), app.database.schema)
    monkeypatch.setattr(progress, "SUMMARY_SECONDS", 0.01)
    caplog.set_level("INFO", "sqlq.worker")
    with progress.Progress(supervisor, None, drawn=False):
        wait_until(lambda: caplog.messages, what="a summary")
    said = r"90 finished, 2 failed in 1\d[\d.]* s \([789][\d.]* a second\), 3 running, 5 waiting"
    assert re.fullmatch(said, caplog.messages[0])


def test_the_last_line_has_the_counts_and_the_rate() -> None:
    def said(seconds: float, **counts: int) -> str:
        supervisor: Any = SimpleNamespace(counts=Counter(counts), ready_since=time.monotonic() - seconds)
        return progress.outcomes(supervisor)

    all_kinds = said(192.0, finished=1472, retried=30, failed=31, lost=0, released=1)
    assert all_kinds == "1,472 finished, 30 retried, 31 failed, 1 released in 3 min 12 s (7.67 a second)"
    assert said(5.0, failed=1) == "1 failed in 5 s"
    assert said(5.0) == "no jobs"
