"""The App's own log lines under `sqlq work`: which of them appear, and how they name their job."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import sqlq
from sqlq.cli.terminal.logs import JsonLines, Lines, Stderr
from sqlq.config.constants import ERROR_BYTES
from sqlq.worker.report import reporter
from tests.kit import needs
from tests.kit.command import Command
from tests.kit.preloaded import Forked, preloaded

pytestmark = needs("cheap")

APP = """
import asyncio, logging, logging.config, sqlq
{set_up}
app = sqlq.App()
log = logging.getLogger("chatty.mail")

@app.task(name="plain", max_attempts=1)
def plain(n):
    log.info("plain %s", n)

@app.task(name="later", max_attempts=1)
async def later(n):
    await asyncio.sleep(0)
    log.info("later %s", n)

@app.task(name="alone", isolate=True, max_attempts=1)
def alone(n):
    log.info("alone %s", n)

"""


@pytest.fixture
def chatty(sqlq_: Command) -> Callable[..., str]:
    """Run jobs of an App that logs, and return the log."""

    def chatty(set_up: str, *options: str, jobs: tuple[tuple[str, ...], ...]) -> str:
        (sqlq_.directory / "chatty.py").write_text(APP.format(set_up=set_up))
        for job in jobs:
            sqlq_.ok("enqueue", "-a", "chatty:app", *job)
        return sqlq_("work", "--drain", "-a", "chatty:app", *options).err

    return chatty


def test_a_handlers_own_lines_appear_with_logger_and_job(chatty: Callable[..., str]) -> None:
    said = chatty("", jobs=(("plain", "1"), ("later", "2"), ("alone", "3")))
    for number, name in enumerate(("plain", "later", "alone"), 1):
        (line,) = (line for line in said.splitlines() if line.endswith(f"{name} {number}"))
        assert line[30:] == f"INFO    [chatty.mail] job {number} {name}: {name} {number}"
    assert "starts" not in said
    said = chatty("", "--log-format", "json", "--log-level", "debug", jobs=(("later", "2"),))
    lines: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    (row,) = (line for line in lines if line["message"] == "later 2")
    about = {"level": "info", "logger": "chatty.mail", "job_id": 4, "attempt": 1}
    assert row.items() >= (about | {"task": "later", "queue": "default"}).items()
    (begun,) = (line for line in lines if line.get("event") == "begun")
    assert begun["message"].endswith("starts")


READING = """
import json, sqlq
app = sqlq.App()
@app.task(name="read")
def read(text):
    return json.loads(text)
"""


@pytest.mark.parametrize(("options", "is_whole"), [((), False), (("--log-level", "debug"), True)])
def test_a_failed_attempt_names_the_line_of_the_handler(
    sqlq_: Command, options: tuple[str, ...], is_whole: bool
) -> None:
    (sqlq_.directory / "reading.py").write_text(READING)
    sqlq_.ok("enqueue", "-a", "reading:app", "read", "nothing")
    said = sqlq_("work", "--drain", "-a", "reading:app", *options).err
    (line,) = (line for line in said.splitlines() if "next attempt in" in line)
    assert f"(char 0), at {sqlq_.directory.name}/reading.py:6), next attempt in" in line
    assert ("Traceback (most recent call last)" in said) is is_whole


NAMESAKES = """
import logging, sqlq
app = sqlq.App()

class Silent:
    def __str__(self):
        raise ValueError

@app.task(name="plain", max_attempts=1)
def plain():
    fields = [{"job_id": "theirs"}, {"task": "theirs", "queue": b"theirs"}]
    circle = []
    circle.append(circle)
    for event in (Silent(), {(1, 2): {3}}, b"4", float("nan"), circle):
        fields.append({"event": event})
    for number, extra in enumerate(fields):
        logging.getLogger("shop").info("line %d", number, extra=extra)
"""


def test_no_field_of_a_record_breaks_its_line(sqlq_: Command) -> None:
    (sqlq_.directory / "namesakes.py").write_text(NAMESAKES)

    def lines(form: str) -> list[str]:
        sqlq_.ok("enqueue", "-a", "namesakes:app", "plain")
        return sqlq_("work", "--drain", "-a", "namesakes:app", "--log-format", form).err.splitlines()

    shown = [line.partition("[shop] ")[2] for line in lines("text") if "[shop]" in line]
    assert shown == [f"job 1 plain: line {number}" for number in range(7)]
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines("json")]
    found = [line for line in found if line["logger"] == "shop"]
    assert [line["message"] for line in found] == [f"line {number}" for number in range(7)]
    assert {(line["job_id"], line["task"], line["queue"]) for line in found} == {(2, "plain", "default")}
    events = [line.get("event") for line in found]
    assert events[:-1] == [None, None, "<Silent>", {"(1, 2)": "{3}"}, "b'4'", "nan"]
    assert "[[...]]" in json.dumps(events[-1])


@pytest.mark.variants
@pytest.mark.parametrize(
    "set_up",
    [
        "logging.basicConfig(level='INFO', format='MINE %(name)s %(message)s')",
        "logging.config.dictConfig({'version': 1,"
        " 'formatters': {'f': {'format': 'MINE %(name)s %(message)s'}},"
        " 'handlers': {'h': {'class': 'logging.StreamHandler', 'formatter': 'f'}},"
        " 'root': {'level': 'INFO', 'handlers': ['h']}})",
    ],
    ids=["basicConfig", "dictConfig"],
)
def test_logging_configured_by_the_app_module_formats_all_lines(
    chatty: Callable[..., str], set_up: str
) -> None:
    """dictConfig by default disables all existing loggers, sqlq's too."""
    lines = chatty(set_up, jobs=(("plain", "1"), ("alone", "2"))).splitlines()
    assert "MINE chatty.mail plain 1" in lines
    assert "MINE chatty.mail alone 2" in lines
    assert any(line.startswith("MINE sqlq.worker job 1 plain (queue default") for line in lines)
    assert "stopped: 2 finished" in lines[-1], "the supervisor does not import the App"


def test_formatters_cut_tracebacks_and_messages(app: sqlq.App) -> None:
    try:
        raise ValueError("y" * 5_000_000)
    except ValueError as error:
        record = logging.LogRecord("shop", 40, __file__, 1, "%s", (error,), (ValueError, error, None))
    for form in (Lines(), JsonLines()):
        record.exc_text = None
        text = form.format(record)
        assert len(text) < 3 * ERROR_BYTES
        assert "... cut ..." in text


def test_no_record_is_made_when_only_sqlqs_handler_listens(
    app: sqlq.App,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [Stderr(Lines())])
    caplog.set_level("INFO", "sqlq")
    made: list[Any] = []
    monkeypatch.setattr(reporter, "write_line", made.append)
    app.enqueue_many([app.task(name="plain")(lambda: None).new()] * 3)
    app.worker(drain=True).run()
    assert made == []
    said = capfd.readouterr().err.splitlines()
    names = sorted(line.split(" INFO    ")[1][:11] for line in said)  # they run at once
    assert names == ["job 1 plain", "job 2 plain", "job 3 plain"]


MANY = """
import os, signal, sqlq, stat, logging
from pathlib import Path
app = sqlq.App()

@app.task(name="plain")
def plain():
    pass

@app.task(name="wordy")
def wordy():
    logging.getLogger("shop").info("x" * 10_000)

@app.task(name="looks")
def looks():
    return [stat.S_ISCHR(os.fstat(fd).st_mode) for fd in (0, 1, 2)]

@app.task(name="dies", max_attempts=1)
def dies():
    # it has slot and settler to itself: what ended before is written without its doing
    while Path("log").read_text().count(") finished in") < 5:
        pass
    logging.getLogger("shop").info("before the end")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def many(sqlq_: Command) -> Command:
    (sqlq_.directory / "many.py").write_text(MANY)
    sqlq_.environment["SQLQ_APP"] = "many:app"
    return sqlq_


def enqueue(app: sqlq.App, task: str, count: int, **options: Any) -> None:
    app.enqueue_many([app.task(name=task, **options)(lambda: None).new()] * count)


def working(run: Command, *options: str, stderr: Any) -> Forked:
    args = ["work", *options]
    return preloaded().start(args, run.directory, run.environment, stderr, stderr, new_session=True)


@pytest.mark.integration
@pytest.mark.parametrize("task", ["plain", "wordy"])
def test_jobs_go_on_when_nobody_reads_the_pipe(many: Command, app: sqlq.App, task: str) -> None:
    enqueue(app, task, 1_500)
    reading, writing = os.pipe()
    try:
        assert working(many, "--drain", stderr=writing).wait(120) == 0
    finally:
        os.close(reading)
        os.close(writing)
    assert len(app.jobs.list(state="finished", limit=2_000)) == 1_500


def test_lines_logged_before_a_kill_are_written(many: Command, app: sqlq.App) -> None:
    enqueue(app, "plain", 5)
    enqueue(app, "dies", 1, max_attempts=1)
    with (many.directory / "log").open("w") as log:
        assert working(many, "--drain", stderr=log).wait(120) == 0
    lines = (many.directory / "log").read_text().splitlines()
    assert sum(") finished in" in line for line in lines) == 5
    (at,) = (at for at, line in enumerate(lines) if line.endswith("[shop] job 6 dies: before the end"))
    assert sum(") finished in" in line for line in lines[:at]) == 5, "in order"
    assert any("was killed by signal 9" in line for line in lines[at:])


@pytest.mark.variants
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"], ids=["stderr", "all"])
def test_closed_descriptors_stop_no_job(many: Command, app: sqlq.App, closed: str) -> None:
    """The number of the closed stderr may belong to a new file, where no output must end."""
    enqueue(app, "wordy", 3)
    enqueue(app, "looks", 1)
    command = f'exec "{sys.executable}" -m sqlq work --drain {closed}'
    assert many.process("sh", "-c", command, stdout=subprocess.DEVNULL).code == 0
    assert app.jobs.get(4).result == [True, True, True]
