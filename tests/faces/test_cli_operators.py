"""`sqlq cancel`, `pause`, `resume`, `prune`, `workers` and `doctor`, and their errors for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sqlalchemy import Engine, make_url

import sqlq
from tests.kit import needs, wait_until
from tests.kit.command import Command


def _enqueue(app: sqlq.App, count: int = 1, task: str = "shop.send", queue: str = "mail") -> list[int]:
    new = (app.tasks[task] if task in app.tasks else app.task(name=task)(lambda n=0: None)).new
    return [app.enqueue(new(i).set(queue=queue)).id for i in range(count)]


# -- cancel --------------------------------------------------------------------------------------------------


@needs("cheap")
def test_a_job_that_runs_is_cancelled_by_force_and_its_worker_goes_on(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_.shop("enqueue", "wait", "a", "--json").json()["id"]
    with sqlq_.working("-c", "1") as worker:
        sqlq_.wait_for("a.started")
        (found,) = sqlq_("workers", "--json").json()
        assert (found["version"], found["queues"], found["concurrency"], found["alive"]) == (
            sqlq.__version__,
            None,
            1,
            True,
        )
        assert Path(f"/proc/{found['pid']}").exists() or not Path("/proc/1").exists(), (
            "it is the process that runs the jobs"
        )
        assert [(job["id"], job["task"], job["queue"]) for job in found["jobs"]] == [(id, "wait", "default")]
        assert found["silent_seconds"] < 60
        row = sqlq_.ok("workers").splitlines()[1]
        pattern = (
            rf".* pid {found['pid']} +busy +all +1 +1 +.* ?(ago|just now) +{re.escape(sqlq.__version__)}"
        )
        assert re.fullmatch(pattern, row)
        assert re.fullmatch(
            rf" *{id}  wait  default  .*(s ago|just now)", sqlq_.ok("workers").splitlines()[-1]
        )
        assert sqlq_.ok("cancel", str(id), "--force") == f"cancelled 1 job: {id}\n"
        sqlq_.touch("a.go")
        (next_id,) = _enqueue(app)
        wait_until(lambda: app.jobs.get(next_id).state == "finished", timeout=60, what="the next job")
        worker.terminate()
        assert worker.wait(60) == 0
    assert app.jobs.get(id).state == "cancelled"
    assert "silent" not in sqlq_.ok("workers")


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor(sqlq_: Command, app: sqlq.App, engine: Engine) -> None:
    _enqueue(app)
    done = sqlq_("doctor")
    assert done.code == 1
    assert not done.err
    header, *rows = done.out.splitlines()
    assert header.split() == ["verdict", "about", "found"]
    (row,) = (row for row in rows if row.split()[:3] == ["to", "do", "workers"])
    assert row.rstrip().endswith(
        "no worker is alive, and 1 job is due → start one with sqlq work -a module:attribute"
    )
    app.jobs.cancel(queue="mail")
    done = sqlq_("doctor", "--json")
    found = json.loads(done.out)
    to_mend = [finding["check"] for finding in found["findings"] if finding["verdict"] == "to do"]
    # the tests' own PostgreSQL runs without fsync
    assert to_mend == (["durability"] if engine.dialect.name == "postgresql" else [])
    assert (done.code, found["well"]) == (1, False) if to_mend else (0, True)
    assert all(finding.keys() == {"check", "verdict", "said", "remedy"} for finding in found["findings"])


@needs("cheap")
def test_doctor_on_a_large_table_and_a_narrow_terminal(sqlq_: Command) -> None:
    narrow = sqlq_.ok("doctor", env={"COLUMNS": "60"}).splitlines()
    assert max(map(len, narrow)) <= 60


def test_doctor_reports_a_missing_database_or_tables(bare: Command, empty_database_url: str) -> None:
    done = bare("-d", empty_database_url, "doctor")
    assert done.code == 1
    assert "sqlq migrate" in done.out or "migrate" in done.out
    url = make_url(empty_database_url)
    if url.get_backend_name() == "postgresql":
        gone = url.set(port=1, password="secret").render_as_string(hide_password=False)
        done = bare("-d", gone, "doctor", "--json")
        assert done.code == 1
        (finding,) = json.loads(done.out)["findings"]
        assert (finding["check"], finding["verdict"]) == ("connection", "to do")
        assert "start the server" in finding["said"]
        assert "secret" not in done.out


# -- bad input -----------------------------------------------------------------------------------------------

COMMANDS = (
    ("cancel", "1"),
    ("queues", "pause", "mail"),
    ("queues", "resume", "mail"),
    ("prune", "--failed", "1d"),
    ("workers",),
)


def test_an_unmigrated_database_is_reported_in_one_sentence(bare: Command, empty_database_url: str) -> None:
    for command in COMMANDS:
        assert "migrate" in bare("-d", empty_database_url, *command).sentence(), command


@needs("file")
def test_a_file_that_may_not_be_written_is_reported_in_one_sentence(bare: Command, engine: Engine) -> None:
    read_only = f"sqlite:///file:{engine.url.database}?mode=ro&uri=true"
    said = bare("-d", read_only, "queues", "pause", "mail").sentence()
    assert "attempt to write a readonly database; make the file, and its directory, ones that you may" in said
