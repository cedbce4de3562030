"""`sqlq jobs`, `sqlq show`, `sqlq status`; and all commands that look, for those who may only
look."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

import sqlq
from sqlq.model.outcome import ErrorText, Failed
from sqlq.store import health
from sqlq.store.jobs import failed
from sqlq.testing import drain
from tests.kit import claim, needs
from tests.kit.command import Command, Console, obey_permissions

AGO = r"(?:\d+ s ago|just now)"


BOOM = Failed("error", ErrorText("ValueError", "no box\nof that size", "Traceback …\n  line 1\nValueError"))

# -- jobs ----------------------------------------------------------------------------------------------------


@needs("cheap")
def test_bytes_in_a_row_are_shown(console: Console, engine: Engine) -> None:
    with engine.begin() as conn:
        conn.exec_driver_sql("INSERT INTO jobs (task, queue, label) VALUES (x'fa', x'fb', x'fc')")
    (row,) = console("jobs").splitlines()[1:]
    assert row.split()[1:4] == ["available", r"b'\xfb'", r"b'\xfa'"]
    assert r"b'\xfb'" in console("show", row.split()[0])
    assert "\nb'\\xfb' " in console("status")


@needs("cheap")
def test_escapes_in_a_row_do_not_reach_the_terminal(console: Console, engine: Engine) -> None:
    steering = "q\x1b[31m\r\n\x9b2J\u202e\u2028q"
    payload = json.dumps({"args": [steering, "\ud800", float("nan")], "kwargs": {"\ud801": 1}})
    with engine.begin() as conn:
        row = {"task": "t", "queue": steering, "key": steering, "payload": payload}
        conn.execute(
            text(
                "INSERT INTO jobs (task, queue, unique_key, payload) VALUES (:task, :queue, :key, :payload)"
            ),
            row,
        )
    (line,) = console("jobs").splitlines()[1:]
    id = line.split()[0]
    assert "work -q 'q\\u001b[31m\\r\\n\\u009b2J\\u202e\\u2028q' " in console("show", id)
    for shown in (console("jobs"), console("show", id), console("status"), console("show", id, "--json")):
        assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []
    found = json.loads(console("show", id, "--json"), parse_constant=pytest.fail)
    assert (found["queue"], found["payload"]) == (
        steering,
        {"args": [steering, "\ud800", "nan"], "kwargs": {"\ud801": 1}},
    )


def test_jobs_reports_when_it_read_only_the_newest(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    rare = console.enqueue(queue="rare")
    for _ in range(3):
        console.enqueue()
    monkeypatch.setattr("sqlq.cli.commands.lists.SEARCH_LIMIT", 2)
    assert "no jobs in queue rare\n\nonly the newest" in console("jobs", "--queue", "rare")
    assert str(rare) in console("jobs", "--queue", "rare", "--exact")


@needs("cheap")
def test_a_narrow_terminal_folds_what_does_not_fit(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    id = console.end(BOOM)
    monkeypatch.setenv("COLUMNS", "40")
    output = console("jobs") + console("show", str(id)).partition("\nhistory\n")[0]
    assert max(map(len, output.splitlines())) <= 40
    assert "…" not in console("jobs")
    assert f"retry {id}" in console("show", str(id)).partition("\nnext\n")[2], "whole, however long"


# -- show ----------------------------------------------------------------------------------------------------


def test_failed_jobs_counted_by_error(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    assert console("failed") == "no failed jobs\n"
    _, newest = console.end(BOOM), console.end(BOOM)
    other = console.end(Failed("error", ErrorText("LookupError", "no van")))
    header, first, second = console("failed").splitlines()
    assert header.split() == ["number", "first", "last", "task", "newest", "fingerprint", "error"]
    row = r" +{}  \S.*\S  +\S.*\S +shop\.send +{}  ([0-9a-f]{{12}})  {}"
    assert re.fullmatch(row.format(2, newest, "ValueError: no box"), first)
    assert re.fullmatch(row.format(1, other, "LookupError: no van"), second)
    listed = console.json("failed", "-n", "1")
    (error,) = listed["errors"]
    told = {"task": "shop.send", "error": "ValueError: no box", "number": 2, "newest": newest}
    assert told.items() <= error.items()
    assert not listed["capped"]
    assert "and 1 other error; --limit N shows more" in console("failed", "-n", "1")
    monkeypatch.setattr(failed, "ROWS", -1)
    assert console("failed", "--queue", "default").count("about ") == 2
    listed = console.json("failed")
    assert sorted(each["estimated"] for each in listed["errors"]) == [["number"], ["number"]]
    (queue,) = console.json("status")["queues"]
    assert queue["estimated"] == ["failed"]
    monkeypatch.setattr(failed, "KEYS", 1)
    assert "and more errors" in console("failed")
    assert console.json("failed")["capped"]


# -- status, workers -----------------------------------------------------------------------------------------


def test_status_marks_counts_that_ended_early(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        console.enqueue()
    monkeypatch.setattr(health, "COUNT_LIMIT", 2)
    said = console("status")
    (row,) = [line for line in said.splitlines() if line.startswith("default ")]
    assert row.split()[:3] == ["default", "2+", "0"], said
    (queue,) = console.json("status")["queues"]
    assert (queue["available"], queue["capped"]) == (2, ["available"])
    (queue,) = console.json("status", "--exact")["queues"]
    assert (queue["available"], queue["capped"]) == (3, [])


def test_workers_shows_a_line_for_each_job_the_longest_held_first(console: Console) -> None:
    console.serve(slots=8)
    ids = [console.enqueue() for _ in range(12)]
    first = claim(console.app, "w", 1)[0].id
    claim(console.app, "w", 20)
    _, row, _, name, _, *claimed = console("workers").splitlines()
    assert re.fullmatch(rf"box pid 7  busy   all     8      12    {AGO} +1", row)
    assert name == "box pid 7"
    assert re.fullmatch(rf" *{first}  shop\.send  default  {AGO}", claimed[0])
    assert len(claimed) == 10
    assert len(console.json("workers")[0]["jobs"]) == len(ids)


@needs("cheap")
def test_workers_on_a_narrow_terminal(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    console.serve()
    id = console.enqueue()
    claim(console.app, "w", 1)
    monkeypatch.setenv("COLUMNS", "50")
    lines = console("workers").splitlines()
    assert lines[-1].split()[0] == str(id)
    assert max(map(len, lines)) <= 50


# -- those who may only look ---------------------------------------------------------------------------------


def looking(id: int) -> list[tuple[str, ...]]:
    return [
        ("status",),
        ("status", "--exact"),
        ("jobs",),
        ("jobs", "--state", "failed"),
        ("show", str(id)),
        ("why", str(id)),
        ("workers", "--all"),
        ("schedules",),
        ("jobs", "--state", "failed"),
        ("failed",),
        ("show", str(id)),
        ("doctor",),
        ("migrate", "--check"),
    ]


@pytest.mark.variants
@needs("file")
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
@pytest.mark.parametrize("way", ["by its permissions", "by its URL", "by the App's engine"])
def test_commands_read_a_read_only_file(console: Console, tmp_path: Path, journal: str, way: str) -> None:
    id = console.end(BOOM)
    console.app.close()
    place = tmp_path / "sealed"
    place.mkdir()
    file = place / "jobs.db"
    owner = create_engine(f"sqlite:///{file}", poolclass=NullPool)
    with owner.connect() as conn:
        conn.exec_driver_sql(f"ATTACH '{tmp_path}/sqlq.db' AS source")
    (tmp_path / "sqlq.db").rename(file)
    with owner.connect() as conn:
        assert conn.exec_driver_sql(f"PRAGMA journal_mode = {journal}").scalar() == journal.lower()
    assert [each.name for each in place.iterdir()] == ["jobs.db"]
    runner = Command(tmp_path)
    (tmp_path / "shop.py").write_text(
        f"import sqlq, sqlalchemy\napp = sqlq.App(engine=sqlalchemy.create_engine('sqlite:///{file}'))"
    )
    which = {
        "by its permissions": ("-d", f"sqlite:///{file}"),
        "by its URL": ("-d", f"sqlite:///file:{file}?mode=ro&uri=true"),
        "by the App's engine": ("-a", "shop:app"),
    }[way]
    script = (
        "import sys\nfrom sqlq.cli.context import Context\nfrom sqlq.cli.root import sqlq\n"
        f"for arguments in {looking(id)!r}:\n"
        "    try:\n"
        f"        sqlq.main([*{which!r}, *arguments], standalone_mode=False, obj=Context())\n"
        "    except SystemExit as ended:\n"
        "        if ended.code and arguments != ('doctor',): raise\n"
    )
    file.chmod(0o444)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=runner.environment,
        preexec_fn=obey_permissions if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"job {id}: failed" in done.stdout
    if way == "by its permissions":
        assert "may only be read" in done.stdout


# -- where it is shown ---------------------------------------------------------------------------------------


@needs("cheap")
@pytest.mark.variants
@pytest.mark.parametrize("words", [("show", "1"), ("show", "1", "--json"), ("jobs",)])
def test_a_job_is_shown_in_a_locale_without_its_characters(
    sqlq_: Command, app: sqlq.App, words: tuple[str, ...]
) -> None:
    _fail_strangely(app)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "strange" in sqlq_.ok(*words, env=ascii_only)


@needs("cheap")
@pytest.mark.variants
@pytest.mark.parametrize("words", ["show 1", "show 1 --json", "jobs --json", "status --json"])
def test_a_command_exits_with_0_when_its_reader_closes(sqlq_: Command, app: sqlq.App, words: str) -> None:
    _fail_strangely(app)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m sqlq {words} | head -n 1"],
        cwd=sqlq_.directory,
        env=sqlq_.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


def _fail_strangely(app: sqlq.App) -> None:
    @app.task(name="strange \ufffd", max_attempts=1)
    def strange() -> None:
        raise ValueError("\ufffd and more\n" * 5_000)

    app.enqueue(strange.new())
    assert drain(app).failed == 1
