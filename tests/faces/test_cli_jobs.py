"""`sqlq jobs`, `show`, `status`, why and limits; and all commands that look, for those who may only look."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

import sqlq
from sqlq.model.outcome import ErrorText, Failed
from sqlq.store import health
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from sqlq.testing import drain
from tests.kit import claim_on, for_each, needs, span
from tests.kit.command import Command, Console, obey_permissions

BOOM = Failed("error", ErrorText("ValueError", "no box\nof that size", "Traceback …\n  line 1\nValueError"))


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
        insert = "INSERT INTO jobs (task, queue, unique_key, payload) VALUES ('t', :text, :text, :payload)"
        conn.execute(text(insert), {"text": steering, "payload": payload})
    (line,) = console("jobs").splitlines()[1:]
    id = line.split()[0]
    assert "work -q 'q\\u001b[31m\\r\\n\\u009b2J\\u202e\\u2028q' " in console("show", id)
    for shown in (console("jobs"), console("show", id), console("status"), console("show", id, "--json")):
        assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []
    found = json.loads(console("show", id, "--json"), parse_constant=pytest.fail)
    assert found["queue"] == steering
    assert found["payload"] == {"args": [steering, "\ud800", "nan"], "kwargs": {"\ud801": 1}}


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


LOOKS = (
    *("status", "status --exact", "jobs", "jobs --state failed", "show {id}", "why {id}", "workers --all"),
    *("schedules", "failed", "doctor", "migrate --check"),
)


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
    looks = [each.format(id=id).split() for each in LOOKS]
    script = (
        "import sys\nfrom sqlq.cli.context import Context\nfrom sqlq.cli.root import sqlq\n"
        f"for arguments in {looks!r}:\n"
        "    try:\n"
        f"        sqlq.main([*{which!r}, *arguments], standalone_mode=False, obj=Context())\n"
        "    except SystemExit as ended:\n"
        "        if ended.code and arguments != ['doctor']: raise\n"
    )
    file.chmod(0o444)
    done = runner.process(sys.executable, "-c", script, preexec_fn=obey_permissions)
    assert done.code == 0, done.err
    assert f"job {id}: failed" in done.out
    if way == "by its permissions":
        assert "may only be read" in done.out


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
    done = sqlq_.process("bash", "-c", f"set -o pipefail; {sys.executable} -m sqlq {words} | head -n 1")
    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)


def _fail_strangely(app: sqlq.App) -> None:
    @app.task(name="strange \ufffd", max_attempts=1)
    def strange() -> None:
        raise ValueError("\ufffd and more\n" * 5_000)

    app.enqueue(strange.new())
    assert drain(app).failed == 1


LATER = "available_at = available_at + {hour}"
FORECASTS = {
    "ten have ended in the last minutes": (10, "", None, r"about \d.*: 4 before it, \d.* a (second|minute)"),
    "more are before it than are counted": (10, "", 3, r"more than \d.*: more than 3 before it, \d.*"),
    "too few have ended": (4, "", None, None),
    "they have ended long ago": (10, "finished_at = finished_at - {hour}", None, None),
    "newer ones were claimed first": (10, LATER, None, None),
    "others were of a larger priority": (10, f"priority = 9, {LATER}", None, "about"),
}


@for_each("name", FORECASTS)
def test_why_forecasts_when_a_due_job_begins(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ended, change, most, said = FORECASTS[name]
    send = app.task(name=f"send: {name}", queue="mail")(lambda: None)
    with app.database.begin() as conn:
        for table in ("jobs", "finished_jobs", "sqlq_workers"):
            conn.execute(text(f"DELETE FROM {table}"))
    app.enqueue_many([send.new()] * ended)
    drain(app)
    with app.database.begin() as conn:
        if change:
            conn.execute(text(f"UPDATE finished_jobs SET {change.format(hour=span(conn, 3_600))}"))
    app.enqueue(send.new())
    with app.database.begin() as conn:
        workers.register(conn, id="w", host="here", pid=1, version="0", queues=None, concurrency=1)
        assert claim_on(conn, ["mail"], limit=1, owner="w", lease_ms=60_000)
    app.enqueue_many([send.new().set(priority=5), send.new(), send.new(), send.new().set(priority=5)])
    job = app.enqueue(send.new())
    app.enqueue_many([send.new(), send.new().set(priority=-5), send.new().set(queue="other", priority=5)])
    monkeypatch.setattr(health, "COUNT_LIMIT", most or 10_000)
    first, *_ = app.jobs.why(job.id)
    taken = "the slot of its worker is taken"
    assert re.fullmatch(taken if said is None else f"{taken}; {said}.*", first)


def allowed(app: sqlq.App) -> list[str]:
    return [f"{each.key}: {each.says}" for each in app.limits.list()]


def test_an_operators_limit_counts_until_it_is_cleared(app: sqlq.App) -> None:
    call = app.task(name="call", limit=sqlq.Limit("stripe", running=2))(lambda n=0: None)
    app.enqueue_many([call.new(n) for n in range(9)])
    assert admit.look(app.database).number == 2
    assert app.limits.set("stripe", running=4).running == 4  # at once, and two more
    assert admit.look(app.database).number == 0
    app.enqueue(call.new())  # a deploy with 2
    assert admit.look(app.database).number == 0
    assert allowed(app) == ["stripe: 4 running"]
    app.limits.clear("stripe")
    assert allowed(app) == ["stripe: 2 running"]
    app.limits.set("stripe", rate="10/1s")
    with closing(sqlq.App(app.url)) as without_the_code:
        without_the_code.limits.clear("stripe")
    assert allowed(app) == ["stripe: 10/1s"]
    app.enqueue(call.new())
    admit.look(app.database)
    assert allowed(app) == ["stripe: 2 running"]


def test_a_key_that_is_set_before_its_first_job_keeps_the_order(app: sqlq.App) -> None:
    app.limits.set("account", running=2, rate="5/1s")

    book = app.task(name="book", limit=sqlq.Serial("account", on_failure="hold"))(lambda: None)
    app.enqueue_many([book.new() for _ in range(3)])
    assert admit.look(app.database).number == 1
    (found,) = app.limits.list(limit=10)
    assert found.says == "in order, held by failures"
