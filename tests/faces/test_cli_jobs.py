"""`sqlq jobs`, `sqlq show`, `sqlq status`; and all commands that look, for those who may only
look."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

import sqlq
from sqlq.cli.context import Context
from sqlq.cli.problems import explain
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Finished, Retried
from sqlq.store import health
from sqlq.store.jobs import failed, lease
from sqlq.testing import drain
from tests.kit import claim, execute, needs, settle
from tests.kit.command import Command, Console, obey_permissions

MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"
AGO = r"(?:\d+ s ago|just now)"


BOOM = Failed("error", ErrorText("ValueError", "no box\nof that size", "Traceback …\n  line 1\nValueError"))

# -- jobs ----------------------------------------------------------------------------------------------------


def test_jobs_lists_jobs_of_any_state_newest_first(console: Console) -> None:
    assert console("jobs") == "no jobs\n"
    assert console("jobs", "--state", "failed", "--queue", "mail") == "no failed jobs in queue mail\n"
    assert console.json("jobs") == []
    finished = console.end(Finished('"sent"'))
    failed = console.end(BOOM)
    cancelled = console.end(Cancelled("not wanted"))
    running = console.enqueue()
    claim(console.app, "w", 1)
    scheduled = console.enqueue(delay="1h", queue="mail")
    available = console.enqueue()
    header, *rows = console("jobs").splitlines()
    assert header.split() == ["id", "state", "queue", "task", "attempts", "time"]
    newest = [available, scheduled, running, cancelled, failed, finished]
    states = ["available", "scheduled", "running", "cancelled", "failed", "finished"]
    assert [row.split()[:2] for row in rows] == [[str(id), s] for id, s in zip(newest, states, strict=True)]
    assert re.fullmatch(
        rf"{scheduled} +scheduled +mail +shop\.send +0/3  in (1 h|59 min \d+ s)", rows[1].strip()
    )
    assert re.fullmatch(rf"{failed} +failed +default +shop\.send +1/3  {AGO}", rows[4].strip())
    assert [job["id"] for job in console.json("jobs", "--state", "failed")] == [failed]
    assert [job["id"] for job in console.json("jobs", "--queue", "mail")] == [scheduled]
    assert console.json("jobs", "--task", "shop.pack") == []
    said = console("jobs", "-n", "2")
    assert "these are the newest 2; --limit N shows more" in said
    assert len(said.splitlines()) == 5
    found = {job["id"]: job for job in console.json("jobs")}
    assert console.json("show", str(finished))["result"] == "sent"
    assert found[failed]["error"] == "ValueError: no box\nof that size"
    large = {"payload", "result", "traceback"}
    whole = console.json("show", str(failed))
    assert found[failed] == {name: value for name, value in whole.items() if name not in large}


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


def test_a_label_progress_and_headers_are_shown(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    plain = console.enqueue()
    assert console("jobs").splitlines()[0].split()[-1] == "time", "no columns of what no job has"
    options: dict[str, Any] = {"backoff": "10s", "retention": "1h", "priority": 5}
    labelled = console.enqueue(label="export of May", headers={"tenant": "blue"}, **options)
    (job,) = claim(console.app, "w", 1)
    with console.app.database.begin() as conn:
        lease.note(conn, [lease.Note(job.id, job.lease_token, 25, 100, "writing", None)])
    header, first, second, *_ = console("jobs").splitlines()
    assert header.split() == ["id", "state", "queue", "task", "attempts", "time", "progress", "label"]
    assert first.endswith("25 of 100: writing  export of May")
    assert str(plain) in second
    said = console("show", str(labelled))
    for line in (
        "\n  label         export of May\n",
        '\n  headers       {"tenant": "blue"}\n',
        "\n  progress      25 of 100: writing\n",
        "\n  backoff       10 s\n",
        "\n  kept          1 h after its end\n",
    ):
        assert line in said
    found = {job["id"]: job for job in console.json("jobs")}
    assert found[labelled]["progress"] == {"done": 25.0, "of": 100.0, "note": "writing"}
    assert (found[labelled]["label"], found[labelled]["headers"]) == ("export of May", {"tenant": "blue"})
    assert "label" not in console("show", str(plain))


# -- show ----------------------------------------------------------------------------------------------------


def test_show_prints_every_field_of_a_job_in_any_state(console: Console) -> None:
    finished = console.end(Finished('{"sent": 1}'), 7)
    said = console("show", str(finished))
    assert said.startswith(f"job {finished}: finished\n  task          shop.send\n  queue         default\n")
    for line in (
        r'  arguments     \{"args": \[7\]\}',
        r'  result        \{"sent": 1\}',
        r"  attempts      1 of 3",
        r"  timeout       none",
        r"  priority      100",
        rf"  created       {MOMENT} \({AGO}\)",
        rf"  last claimed  {MOMENT} \({AGO}\)",
        rf"  finished      {MOMENT} \({AGO}\)",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)
    assert re.search(f"^  sqlq .*replay {finished}.* it has ended and runs no more", said, re.MULTILINE)

    cancelled = console.end(Cancelled("not wanted"))
    assert "\n  reason        not wanted\n" in console("show", str(cancelled))

    scheduled = console.enqueue(delay="1h", timeout="90s", unique_key="k", queue="mail")
    said = console("show", str(scheduled))
    assert re.search(rf"^  due           {MOMENT} \(in (1 h|59 min \d+ s)\)$", said, re.MULTILINE)
    assert "\n  timeout       90 s\n  unique key    k (until finish)\n" in said
    assert re.search("^  sqlq .*work -q mail.* no worker serves its queue$", said, re.MULTILINE)
    assert re.search(f"^  sqlq .*cancel {scheduled}.* a cancel ends it", said, re.MULTILINE)
    console.app.queues.pause("mail")
    said = console("show", str(scheduled))
    assert re.search("^  sqlq .*resume mail.* its queue is paused$", said, re.MULTILINE)

    running = console.enqueue()
    console.serve()
    claim(console.app, "w", 1)
    console("cancel", str(running), "--reason", "the order is void")
    said = console("show", str(running))
    assert re.search(rf"\n    –  {MOMENT}  cancel requested: the order is void\n", said)
    assert re.search(rf"^  to cancel     asked to stop {MOMENT} \({AGO}\)$", said, re.MULTILINE)
    assert re.search(rf"\nnext\n  sqlq .*cancel {running} --force.* it was asked to stop", said)
    assert said.endswith("\n  it runs on box, pid 7\n")

    assert "there is no job 4711" in console.sentence("show", "4711")


def test_show_of_a_failed_job_has_every_attempt_and_the_next_commands(console: Console) -> None:
    id = console.enqueue()
    (job,) = claim(console.app, "w", 1)
    settle(console.app, job, Retried(0, ErrorText("LookupError", "no van"), "timeout"))
    (job,) = claim(console.app, "w", 1)
    settle(console.app, job, BOOM)
    said = console("show", str(id))
    assert re.sub(AGO, "", said) == re.sub(AGO, "", console("show", str(id)))
    assert "\n\nerror\n  ValueError: no box\n  of that size\n\n" in said
    first = rf"\n\nhistory\n    1  {MOMENT}  failed: timeout: LookupError: no van\n"
    last = rf"\n    2  {MOMENT}  failed: ValueError: no box \(after [\d.]+ m?s,\s+on\s+worker\s+w\)\n"
    assert re.search(first, said), said
    assert re.search(last, said), said
    assert "\n\ntraceback\n  Traceback …\n    line 1\n  ValueError\n\n" in said
    retry, forget = said.partition("\n\nnext\n")[2].splitlines()
    assert re.fullmatch(f"  sqlq .*retry {id}.* a retry gives it all its attempts again", retry)
    assert re.fullmatch(f"  sqlq .*delete {id}.* or it is deleted", forget)


def test_show_names_the_callbacks_of_a_job(console: Console, engine: Engine) -> None:
    @console.app.task(name="shop.alarm", queue="ops")
    def alarm(ended: sqlq.JobOutcome) -> None: ...

    followed = console.enqueue(on_success=None, on_failure=alarm)
    said = console("show", str(followed))
    assert '\n  on failure    {"task": "shop.alarm", "queue": "ops"}\n' in said
    assert "on success" not in said
    assert console.json("show", str(followed))["on_failure"] == {"task": "shop.alarm", "queue": "ops"}
    execute(engine, "UPDATE jobs SET on_failure = 'sh\x1b[2J'")
    assert '\n  on failure    "sh' in console("show", str(followed))
    assert "\x1b" not in console("show", str(followed))


def test_show_prints_rows_of_other_programs(console: Console, engine: Engine) -> None:
    execute(
        engine,
        "INSERT INTO jobs (id, queue, task, payload, errors) VALUES (1, '', ' ', '{\x1b[2J', :e)",
        e='[{"at": "yesterday"}, 7, {"reason": null, "message": "a\\u001b[2Jb"}]',
    )
    said = console("show", "1")
    assert "\x1b" not in said
    assert "\n  queue         ''\n" in said
    assert "\n    –  ?  failed\n" in said
    assert "\n    –  ?  failed: a [2Jb\n" in said
    assert "''" in console("status")
    assert console.json("status")["queues"][0]["queue"] == ""


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


# -- result --------------------------------------------------------------------------------------------------


def test_the_result_of_a_job_is_printed(console: Console) -> None:
    returns = console.app.task(name="shop.price", max_attempts=1)(lambda n: {"total": n} if n else 1 / n)
    done, failed, later = (console.app.enqueue(returns.new(n)).id for n in (7, 0, 8))
    console.app.jobs.cancel([later])
    console.app.worker(drain=True).run()
    waits = console.app.enqueue(returns.new(7).set(delay="1h")).id
    assert json.loads(console("show", str(done), "--result", "--wait", "30s")) == {"total": 7}
    assert json.loads(console("show", str(done), "--result", "--wait", "none")) == {"total": 7}
    for id, says in (
        (failed, f"job {failed} (shop.price) failed after 1 attempt: ZeroDivisionError: division by zero"),
        (later, f"job {later} (shop.price) was cancelled: cancelled on request"),
        (waits, f"job {waits} is scheduled and has no result"),
        (
            4711,
            "there is no job 4711: it never was, or is kept no more, or its transaction has not been "
            "committed",
        ),
    ):
        with pytest.raises(sqlq.SqlqError) as raised:
            console("show", str(id), "--result")
        assert explain(raised.value, Context()) == says
    with pytest.raises(sqlq.WaitTimeoutError, match="and has no result after 10 ms"):
        console("show", str(waits), "--result", "--wait", "10ms")
    with pytest.raises(click.UsageError, match=r"^--wait is 'soon': write it as in"):
        console("show", str(waits), "--result", "--wait", "soon")


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


def test_a_batch_is_listed_counted_and_cancelled(console: Console) -> None:
    mine = [console.enqueue(n, batch="import-42") for n in range(2)]
    other = console.enqueue(7)
    assert [job["id"] for job in console.json("jobs", "--batch", "import-42")] == mine[::-1]
    assert console("jobs", "--batch", "import-42").endswith("\nbatch import-42: 2 available\n")
    assert console("jobs", "--batch", "none") == "no jobs of batch none\n\nbatch none: no jobs\n"
    assert "\n  batch         import-42\n" in console("show", str(mine[0]))
    assert console.json("cancel", "--batch", "import-42")["cancelled"] == mine
    assert console.app.jobs.get(other).state == "available"
