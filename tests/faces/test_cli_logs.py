"""What `sqlq work` lets through of the App's own logging, and how its lines say which job they are of."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

import sqlq
from sqlq.cli.logs import JsonLines, Lines
from sqlq.settings import ERROR_BYTES
from sqlq.worker.running import running_here
from tests.faces.command import Command

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

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

@app.task(name="large", max_attempts=1)
def large():
    try:
        raise ValueError("x" * 5_000_000)
    except ValueError as error:
        log.error("large: %s", error)
        raise
"""


class Chatty:
    def __init__(self, run: Command) -> None:
        self._run = run

    def log(self, set_up: str, *options: str, jobs: tuple[tuple[str, ...], ...]) -> str:
        (self._run.directory / "chatty.py").write_text(APP.format(set_up=set_up))
        for job in jobs:
            self._run.ok("enqueue", "-a", "chatty:app", *job)
        done = self._run("work", "--drain", "-a", "chatty:app", *options)
        assert done.code == 0, done
        return done.err


@pytest.fixture
def chatty(sqlq_: Command) -> Chatty:
    return Chatty(sqlq_)


def test_a_handlers_own_lines_appear_with_logger_and_job(chatty: Chatty) -> None:
    said = chatty.log("", jobs=(("plain", "1"), ("later", "2"), ("alone", "3")))
    for number, name in enumerate(("plain", "later", "alone"), 1):
        (line,) = (line for line in said.splitlines() if line.endswith(f"{name} {number}"))
        assert line[30:] == f"INFO    [chatty.mail] job {number} {name}: {name} {number}"
    assert "starts" not in said


def test_as_json_they_carry_the_job(chatty: Chatty) -> None:
    said = chatty.log("", "--log-format", "json", "--log-level", "debug", jobs=(("later", "2"),))
    lines: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    (line,) = (line for line in lines if line["message"] == "later 2")
    assert {name: line[name] for name in ("level", "logger", "job_id", "task", "queue", "attempt")} == {
        "level": "info",
        "logger": "chatty.mail",
        "job_id": 1,
        "task": "later",
        "queue": "default",
        "attempt": 1,
    }
    (begun,) = (line for line in lines if line.get("event") == "begun")
    assert begun["message"].endswith("starts")


def test_the_level_holds_for_them_too(chatty: Chatty) -> None:
    assert chatty.log("", "--log-level", "warning", jobs=(("plain", "1"), ("alone", "2"))) == ""


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
def test_what_the_apps_module_sets_up_counts_for_all_lines(chatty: Chatty, set_up: str) -> None:
    """dictConfig, unless told otherwise, disables all loggers there are: sqlq's, too."""
    lines = chatty.log(set_up, jobs=(("plain", "1"), ("alone", "2"))).splitlines()
    assert "MINE chatty.mail plain 1" in lines
    assert "MINE chatty.mail alone 2" in lines
    assert any(line.startswith("MINE sqlq.worker job 1 plain (queue default") for line in lines)
    assert "stopped: 2 completed" in lines[-1], "the supervisor does not import the App"


def test_an_error_of_many_megabytes_is_cut(chatty: Chatty) -> None:
    assert len(chatty.log("", jobs=(("large",),))) < 6 * ERROR_BYTES


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


def test_what_a_thread_logs_between_jobs_is_of_no_job(app: sqlq.App) -> None:
    seen: list[Any] = []

    @app.task(name="looks")
    def looks() -> None:
        seen.append(sqlq.current_job().id)

    app.enqueue(looks.new())
    worker = app.worker(drain=True)
    settle = worker._executors._done

    def done(job: Any, outcome: Any) -> None:
        seen.append(running_here())
        settle(job, outcome)

    worker._executors._done = done
    worker.run()
    assert seen == [1, None]
