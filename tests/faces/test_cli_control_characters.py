"""Characters that steer a terminal, in every text that others may write: no command prints them raw."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, MetaData, Table

import sqlq
from sqlq.cli.terminal.logs import JsonLines, Lines
from sqlq.cli.terminal.output import show_wrapped
from sqlq.config.command_hint import escaped, escaped_lines
from sqlq.model.job import ClaimedJob
from tests.kit.command import Command, Done

STEERING = "q\x1b]0;pwned\x07\x1b[2J\r\n\x0b\x0c\x85\x9b31m\x7f\u061c\u202e\u2066\u2028z"

EVIL = f"""
import logging, warnings

STEERING = {STEERING!r}

@app.task(queue="mail", max_attempts=1)
def evil() -> None:
    logging.getLogger("shop" + STEERING).warning("said %s", STEERING, stack_info=True)
    logging.getLogger("shop").error(STEERING, exc_info=ValueError(STEERING))
    warnings.warn(STEERING)
    raise ValueError(STEERING)

@app.task(queue="mail", max_attempts=1)
def fine() -> str:
    return STEERING
"""


def steers(text: str) -> list[str]:
    return [letter for letter in text if not letter.isprintable() and letter not in "\n\t"]


def insert(conn: Connection, table: str, /, **values: Any) -> None:
    conn.execute(Table(table, MetaData(), autoload_with=conn).insert(), values)


@pytest.fixture
def hostile(sqlq_: Command, app: sqlq.App, engine: Engine) -> Command:
    """A database with rows whose texts steer, in every table."""
    with (sqlq_.directory / "shop.py").open("a") as shop:
        shop.write(EVIL)
    for _ in range(2):
        app.enqueue(app.named("shop.evil").new().set(queue="mail", label=STEERING[:3], max_attempts=1))
        app.enqueue(app.named("shop.fine").new().set(queue="mail"))
    step, after = (app.named("shop.fine").new().set(queue="mail", delay="1h") for _ in range(2))
    flow = sqlq.Flow("flow")
    flow.add(after, after=flow.add(step))
    app.enqueue(flow)
    with engine.begin() as conn:
        texts = {"queue": STEERING, "task": STEERING, "label": STEERING, "unique_key": STEERING}
        insert(conn, "jobs", **texts, progress_note=STEERING, schedule=STEERING)
        insert(conn, "jobs", queue=STEERING, task="shop.fine", payload='{"args": []}', label=STEERING)
        insert(conn, "jobs", queue="mail", task=STEERING, label=STEERING)
        worker = {"id": f"w{STEERING}", "host": STEERING, "name": STEERING, "version": "1\x1b[2J"}
        insert(conn, "sqlq_workers", **worker, pid=7, queues=json.dumps([STEERING]), concurrency=1)
        insert(conn, "sqlq_limits", limit_key=STEERING, max_running=1)
        plan = {"plan": '{"every": 1}', "error": STEERING, "payload": STEERING, "service": STEERING}
        insert(conn, "sqlq_schedules", name=STEERING, task=STEERING, queue=STEERING, **plan)
        conn.exec_driver_sql("UPDATE sqlq_flows SET name = 'f\x1b[2J\x9b\u202e'")
    return sqlq_


def checked(done: Done, *args: str) -> Done:
    assert steers(done.out) == [], args
    assert steers(done.err) == [], args
    return done


LOOKS = (
    *("status", "jobs", "jobs --state failed", "workers", "doctor", "metrics", "flows", "flows show 1"),
    *("limits", "schedules", "schedules show S", "failed", "jobs --task S", "jobs --queue S"),
    "jobs --state failed --task S",
)
ACTS = (
    *("queues pause S", "queues pause S", "queues resume S", "status", "limits set S --running 2"),
    *("limits clear S", "schedules pause S", "schedules resume S", "schedules run S", "cancel --queue S"),
    *("enqueue S", "enqueue shop.fine -q S", "replay --task S", "retry --task S", "show S"),
    *("workers pause S", "workers S", "schedules remove S", "S", "delete --task S", "flows show S"),
    "jobs --state S",
)


def words(command: str) -> list[str]:
    return [STEERING if word == "S" else word for word in command.split()]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_worker_prints_no_control_characters(hostile: Command, form: str) -> None:
    done = checked(hostile.shop("work", "--drain", "--log-format", form), "work")
    assert "pwned" in done.err
    assert "shop.fine" in done.err
    lines = done.err.splitlines()
    if form == "json":
        assert all(json.loads(line) for line in lines)
    else:
        assert sum("said q" in line for line in lines) == 2, "one line each"
    refused = checked(hostile.shop("work", "--drain", "--log-format", form, "-q", STEERING), "work -q")
    reason = json.loads(refused.err)["message"] if form == "json" else refused.misuse()
    assert "leave out blanks at its ends, line breaks and control characters" in reason


@pytest.mark.parametrize("form", [Lines, JsonLines])
def test_the_line_of_a_finished_job_steers_no_terminal(form: type[Lines | JsonLines]) -> None:
    job = ClaimedJob(7, 1, STEERING, f"shop.{STEERING}", "{}", 1, 3)
    line = form().finished(job, 1.0, "2030-01-01 00:00:00.000+00:00")
    assert "pwned" in line
    assert steers(line) == []
    assert "\n" not in line


@pytest.mark.integration
def test_reading_commands_print_no_control_characters(hostile: Command) -> None:
    hostile.work()
    shown = [hostile("jobs", "--json"), hostile("jobs", "--state", "failed", "--json")]
    ids = [str(row["id"]) for each in shown for row in each.json()]
    assert len(ids) > 6
    ids = list(dict.fromkeys(ids))
    each = (f"{look} {id}" for id in ids for look in ("show", "show --result", "why"))
    for args in map(words, (*LOOKS, *each)):
        said = checked(hostile(*args), *args)
        assert said.code in (0, 1), said
        if args[0] not in ("doctor", "metrics", "result"):
            checked(hostile(*args, "--json"), *args)


def test_wrapped_text_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_wrapped(STEERING, STEERING)
    printed = capsys.readouterr().out
    assert "pwned" in printed
    assert steers(printed) == []


def test_acting_commands_print_no_control_characters(hostile: Command) -> None:
    for args in map(words, ACTS):
        checked(hostile.shop(*args), *args)


def test_escaped_names_stay_distinct() -> None:
    assert escaped("a\x1b\x07\tb") == "a\\u001b\\u0007\tb"
    assert escaped_lines("a\n\x9b\nb") == "a\n\\u009b\nb"
    assert len({escaped(f"mail{letter}") for letter in STEERING}) == len(set(STEERING))
