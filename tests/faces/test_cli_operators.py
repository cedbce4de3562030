"""`sqlq cancel`, `pause`, `resume`, `prune`, `workers` and `doctor`, and their errors for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sqlalchemy import Engine, make_url, text

import sqlq
from tests.kit import needs, wait_until
from tests.kit.command import SEARCH, Command


def _enqueue(app: sqlq.App, count: int = 1, task: str = "shop.send", queue: str = "mail") -> list[int]:
    new = (app.tasks[task] if task in app.tasks else app.task(name=task)(lambda n=0: None)).new
    return [app.enqueue(new(i).set(queue=queue)).id for i in range(count)]


# -- cancel --------------------------------------------------------------------------------------------------


def test_cancel_prints_an_outcome_for_each_job(sqlq_: Command, app: sqlq.App, engine: Engine) -> None:
    a, b, c, d = _enqueue(app, 4)
    assert sqlq_.ok("cancel", str(a)) == f"cancelled 1 job: {a}\n"
    with engine.begin() as conn:
        reserve = (
            "UPDATE jobs SET reserved_at = created_at, reserved_by = 'w', lease_expires_at = "
            "created_at WHERE id = :id"
        )
        conn.execute(text(reserve), {"id": b})
    done = sqlq_("cancel", str(a), str(b), str(c), "4711")
    assert done.code == 1
    assert f"cancelled 1 job: {c}\n" in done.out
    assert f"asked 1 running job to stop: {b}; its worker sees it within 2 seconds" in done.out
    assert (
        f"sqlq: job {a}: it is cancelled: cancel is for blocked, scheduled, available, running jobs\n"
        in done.err
    )
    assert "sqlq: job 4711: there is no such job\n" in done.err
    done = sqlq_("cancel", str(b), "--queue", "other")
    assert (done.code, done.out) == (1, "no jobs in queue other cancelled\n")
    assert f"job {b}: it is running, but not of those named, or locked by another transaction" in done.err
    nothing: dict[str, list[int]] = {
        "requested": [],
        "ended": [],
        "unknown": [],
        "passed_over": [],
        "locked": [],
    }
    assert sqlq_("cancel", "--queue", "mail", "--task", "shop.send", "--force", "--json").json() == {
        "cancelled": [b, d],
        **nothing,
    }
    assert sqlq_.ok("cancel", "--queue", "mail") == "no jobs in queue mail cancelled\n"
    assert {job.state for job in app.jobs.list()} == {"cancelled"}


@needs("cheap")
def test_cancel_counts_the_refusals_beyond_twenty(sqlq_: Command, app: sqlq.App) -> None:
    ids = _enqueue(app, 25)
    app.jobs.cancel(ids[-3:])
    done = sqlq_("cancel", "--queue", "other", *map(str, ids), "4711")
    assert (done.code, done.out) == (1, "no jobs in queue other cancelled\n")
    assert done.err.splitlines()[20:] == ["sqlq: 6 more jobs not changed"]


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


@needs("cheap")
def test_workers_reports_silent_workers(sqlq_: Command, app: sqlq.App, engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(
            text(
                "INSERT INTO sqlq_workers (id, host, pid, version, concurrency) VALUES ('w', 'box', 1234, "
                "'0.1', 3)"
            )
        )
        conn.execute(text("UPDATE sqlq_workers SET seen_at = seen_at - 600000"))
    said = sqlq_.ok("workers")
    assert "no worker is running" in said
    assert "1 worker fell silent within the last day without signing off: sqlq workers --all shows" in said
    said = sqlq_.ok("workers", "--all")
    assert re.search(r"^box pid 1234 +silent +all +3 +0 +10[.\d]* min ago +0\.1$", said, re.MULTILINE)
    assert [worker["alive"] for worker in sqlq_("workers", "--all", "--json").json()] == [False]


# -- pause, resume, prune ------------------------------------------------------------------------------------


def test_pause_and_resume(sqlq_: Command, app: sqlq.App) -> None:
    (id,) = _enqueue(app)
    said = sqlq_.ok("queues", "pause", "mail", "nope")
    assert (
        said
        == "paused mail\npaused nope\nnothing else is known of nope: no job, worker or task names such a "
        "queue\n"
    )
    assert sqlq_.shop("queues", "pause", "mail", "empty").out.count("nothing else is known") == 1
    (sqlq_.directory / "other.py").write_text(
        "import sqlq\napp = sqlq.App(queues={'slow': {}})\n\n@app.task(queue='bulk')\ndef t(): ...\n"
    )
    assert (
        sqlq_.ok("-a", "other", "queues", "pause", "slow", "bulk", "--duration", "1m")
        == "paused bulk for 1m\npaused slow for 1m\n"
    )
    sqlq_.ok("queues", "resume", "slow", "bulk", "empty")
    assert sqlq_("queues", "pause", "mail", "--json").json() == [
        {"queue": "mail", "paused": False, "known": True}
    ]
    sqlq_.work("-q", "mail")
    assert app.jobs.get(id).state == "available"
    rows = sqlq_.ok("status").split("\n\n")[1].splitlines()[1:]
    assert [row.split()[0] for row in rows[:2]] == ["mail", "nope"]
    assert all(row.rstrip().endswith("paused") for row in rows[:2])
    assert "\ncheck: nope is paused, since " in sqlq_.ok("queues")
    assert sqlq_.ok("queues", "resume", "mail", "other") == (
        "resumed mail\nother is not paused\n"
        "nothing else is known of other: no job, worker or task names such a queue\n"
    )
    sqlq_.work("-q", "mail")
    assert app.jobs.get(id).state == "finished"


def test_prune(sqlq_: Command, app: sqlq.App) -> None:
    sqlq_.shop("enqueue", "shop.send", "1")
    wait_until(lambda: "1 finished" in sqlq_.work().err or app.jobs.list(state="finished"), timeout=60)
    assert (
        sqlq_.ok("prune", "--finished", "1d", "--failed", "1d")
        == "pruned 0 finished jobs and 0 failed jobs\n"
    )
    assert sqlq_("prune", "--finished", "0s", "--json").json() == {"finished": 1, "failed": 0}
    assert sqlq_.ok("prune", "--failed", "0s") == "pruned 0 failed jobs\n"
    assert app.jobs.list() == []


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


def test_a_wrong_url_is_reported_in_one_sentence(bare: Command) -> None:
    for command in (*COMMANDS, ("doctor",)):
        assert "the database URL cannot be read" in bare("-d", "somewhere", *command).sentence(), command


@needs("file")
def test_a_file_that_may_not_be_written_is_reported_in_one_sentence(bare: Command, engine: Engine) -> None:
    read_only = f"sqlite:///file:{engine.url.database}?mode=ro&uri=true"
    said = bare("-d", read_only, "queues", "pause", "mail").sentence()
    assert "attempt to write a readonly database; make the file, and its directory, ones that you may" in said


@needs("cheap")
def test_bad_input_is_one_sentence_and_changes_nothing(sqlq_: Command, app: sqlq.App) -> None:
    _enqueue(app, 2)
    for arguments, complaint in (
        (("queues", "pause", "mail", " "), "name is ' '"),
        (("queues", "resume", "x" * 256), "name has 256 characters"),
    ):
        assert complaint in sqlq_(*arguments).sentence(), arguments
    misuses: list[tuple[tuple[str, ...], str]] = [
        (("cancel",), f"name the jobs, or give {SEARCH}, --state, --flow, --all"),
        (("cancel", "--force"), f"name the jobs, or give {SEARCH}, --state, --flow, --all"),
        (("cancel", "--queue", ""), "--queue is ''"),
        (("cancel", "--task", "x" * 300), "--task has 300 characters"),
        (("prune", "--finished", "7"), "--finished is '7': write it as in"),
        (("prune", "--finished", "0s", "--failed", "soon"), "--failed is 'soon': write it as in"),
    ]
    for misused, complaint in misuses:
        assert complaint in sqlq_(*misused).misuse(), misused
    for unreadable in (
        ("cancel", "x"),
        ("cancel", "1.5"),
        ("queues", "pause"),
        ("prune", "--finished"),
        ("workers", "x"),
        ("doctor", "--no"),
    ):
        done = sqlq_(*unreadable)
        assert done.code == 2, done
        assert not done.out
    assert f"job {2**63}: there is no such job" in sqlq_("cancel", str(2**63)).err
    assert {job.state for job in app.jobs.list()} == {"available"}
    assert not any(queue.paused for queue in app.queues.list())
