"""Workers at the hands of their operators: signals, `sqlq workers pause` and the like."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import psutil
import pytest
from sqlalchemy import make_url

import sqlq
from sqlq.admin.doctor.doctor import examine
from sqlq.admin.doctor.finding import Finding, Verdict
from sqlq.model.job import State
from tests.kit import needs, wait_until
from tests.kit.command import Command


def _pids(app: sqlq.App) -> set[int]:
    return {worker.pid for worker in app.workers.list()}


@pytest.fixture
def becomes(app: sqlq.App) -> Callable[..., None]:
    def becomes(*states: str) -> None:
        wait_until(lambda: sorted(each.state for each in app.workers.list()) == sorted(states))

    return becomes


@needs("cheap")
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTSTP])
def test_a_signal_pauses_a_worker_and_replacements_of_its_children(
    sqlq_: Command, app: sqlq.App, becomes: Callable[..., None], number: signal.Signals
) -> None:
    running = sqlq_.enqueue("wait", "a")
    with sqlq_.working("-c", "2") as worker:
        sqlq_.wait_for("a.started")
        worker.send_signal(number)
        becomes("paused")
        waiting = sqlq_.enqueue("shop.send", "7")
        sqlq_.touch("a.go")
        wait_until(lambda: app.jobs.get(running).state is State.FINISHED, what="what ran going on")
        (pid,) = _pids(app)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _pids(app) - {pid}, what="another process")
        becomes("paused")
        assert app.jobs.get(waiting).state is State.AVAILABLE
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: app.jobs.get(waiting).state is State.FINISHED)
        worker.terminate()
        assert worker.wait(30) == 0
    assert sqlq_.log().count("paused: this worker claims nothing") == 1
    assert sqlq_.log().count("resumed: this worker claims again") == 1


@needs("cheap")
def test_a_job_that_runs_is_cancelled_by_force_and_its_worker_goes_on(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_.shop("enqueue", "wait", "a", "--json").json()["id"]
    with sqlq_.working("-c", "1") as worker:
        sqlq_.wait_for("a.started")
        (found,) = sqlq_("workers", "--json").json()
        assert found["pid"] != worker.pid, "that is the supervisor"
        assert [(job["id"], job["task"], job["queue"]) for job in found["jobs"]] == [(id, "wait", "default")]
        assert sqlq_.ok("cancel", str(id), "--force") == f"cancelled 1 job: {id}\n"
        sqlq_.touch("a.go")
        next_id = sqlq_.enqueue("shop.send", "7")
        wait_until(lambda: app.jobs.get(next_id).state == "finished", timeout=60, what="the next job")
        worker.terminate()
        assert worker.wait(60) == 0
    assert app.jobs.get(id).state == "cancelled"
    assert "silent" not in sqlq_.ok("workers")


def test_workers_pause_resume_restart_and_stop_by_command(
    sqlq_: Command, app: sqlq.App, becomes: Callable[..., None]
) -> None:
    with sqlq_.working("-p", "2", "-c", "1", "--name", "mail-1") as worker:
        becomes("idle", "idle")
        assert "mail-1: working on" in sqlq_.log()
        (first,) = {shown["name"] for shown in sqlq_.shop("workers", "--json").json()}
        assert first == "mail-1"
        assert "mail-1 on " in sqlq_.ok("workers")
        one = next(iter(_pids(app)))
        host = app.workers.list()[0].host
        said = sqlq_.ok("workers", "pause", f"{host}:{one}")
        assert "2 workers will be paused within 2 seconds; what runs may finish" in said
        becomes("paused", "paused")
        assert f"mail-1 on {host} pid {one}  paused" in sqlq_.ok("workers")
        assert f"mail-1 on {host} pid {one}  paused  all " in sqlq_.ok("status")
        waiting = sqlq_.enqueue("wait", "a")
        assert len(sqlq_("workers", "resume", "mail-1", "--json").json()) == 2
        sqlq_.wait_for("a.started")
        before = _pids(app)
        assert "asked mail-1 on " in sqlq_.ok("workers", "restart", "--all")
        wait_until(lambda: len(_pids(app) - before) == 2, what="the replacement of the busy one, too")
        becomes("idle", "idle", "stopping")
        sqlq_.touch("a.go")
        wait_until(lambda: not _pids(app) & before, what="the busy one gone")
        assert app.jobs.get(waiting).state is State.FINISHED
        becomes("idle", "idle")
        assert "will be stopped" in sqlq_.ok("workers", "stop", "--all")
        assert worker.wait(30) == 0
    assert "an operator restarts it" in sqlq_.log()
    assert "stopping: an operator stops this worker; what runs may finish" in sqlq_.log()
    assert app.workers.list(silent=True) == []
    assert sqlq_.ok("workers", "restart", "--all") == "no worker is running\n"


def test_a_broken_deploy_ends_no_worker_until_a_mended_one_works(
    sqlq_: Command, app: sqlq.App, becomes: Callable[..., None]
) -> None:
    def imports() -> Finding:
        return next(row for row in examine(app.database) if row.check == "imports")

    shop = sqlq_.directory / "shop.py"
    whole = shop.read_text()
    with sqlq_.working("-p", "2", "-c", "1") as worker:
        becomes("idle", "idle")
        running = sqlq_.enqueue("wait", "a")
        sqlq_.wait_for("a.started")
        before = _pids(app)
        shop.write_text(f"import nowhere\n{whole}")
        app.workers.restart(all=True)
        wait_until(lambda: imports().verdict is Verdict.TO_DO, what="the finding")
        assert re.fullmatch(
            "1 of 1 host cannot start a new worker: the App's module 'shop' cannot be imported: "
            r"ModuleNotFoundError: No module named 'nowhere' \(.*shop\.py, line 1\)",
            imports().said,
        )
        becomes("idle", "busy")
        assert _pids(app) == before
        assert sqlq_.log().count("the restart is given up: a new worker process exited with code 1") == 1
        shop.write_text(whole)
        quick = sqlq_.enqueue("shop.send", "7")
        wait_until(lambda: app.jobs.get(quick).state is State.FINISHED, what="the old ones at work")
        app.workers.restart(all=True)
        wait_until(lambda: len(_pids(app) - before) == 2, what="two new ones: a busy one keeps none")
        becomes("idle", "idle", "stopping")
        assert app.jobs.get(running).state is State.RUNNING
        sqlq_.touch("a.go")
        wait_until(lambda: not _pids(app) & before, what="the busy one gone")
        assert (app.jobs.get(running).state, app.jobs.get(running).attempts) == (State.FINISHED, 1)
        assert imports().verdict is Verdict.OK
        worker.terminate()
        assert worker.wait(30) == 0
    order = re.findall(r"is at work|ends \(an operator", sqlq_.log())
    assert order == ["is at work", "ends (an operator"] * 2, "one after the other, the new one first"


@needs("cheap")
def test_a_worker_that_is_replaced_meanwhile_can_be_stopped(
    sqlq_: Command, app: sqlq.App, becomes: Callable[..., None]
) -> None:
    shop = sqlq_.directory / "shop.py"
    with sqlq_.working() as worker:
        becomes("idle")
        shop.write_text(
            f"{shop.read_text()}\nPath('begin.started').touch()\nPath('begin.go').open().read(1)\n"
        )
        os.mkfifo(sqlq_.directory / "begin.go")
        go = os.open(sqlq_.directory / "begin.go", os.O_RDWR)  # which waits for no reader
        app.workers.restart(all=True)
        sqlq_.wait_for("begin.started")
        app.workers.stop(all=True)
        becomes()
        os.write(go, b".")
        assert worker.wait(30) == 0
    os.close(go)
    assert app.workers.list(silent=True) == []


@needs("cheap")
def test_an_idle_worker_exits_after_max_idle(sqlq_: Command, app: sqlq.App) -> None:
    done = sqlq_.enqueue("shop.send", "7")
    with sqlq_.working("--max-idle", "1s") as worker:
        assert worker.wait(60) == 0
    assert app.jobs.get(done).state is State.FINISHED
    assert sqlq_.log().count("nothing has come for 1 s") == 1
    assert "stopped: 1 finished" in sqlq_.log()


@pytest.mark.integration
@needs("cheap")
def test_a_worker_process_that_has_grown_is_replaced_after_its_jobs(sqlq_: Command, app: sqlq.App) -> None:
    with (sqlq_.directory / "shop.py").open("a") as shop:
        shop.write(
            "kept = []\n@app.task(queue='mail')\ndef grow(megabytes: int) -> int:\n"
            "    kept.append(b'.' * (megabytes * 1_000_000))\n    return os.getpid()\n"
        )
    with sqlq_.working("-c", "1", "--max-rss", "400MB", anew=True):
        grown, next_one = sqlq_.enqueue("shop.grow", "400"), sqlq_.enqueue("shop.grow", "0")
        wait_until(lambda: app.jobs.get(next_one).ended_at, what="the job after the one that took memory")
        said = r"ends \(it has \d+ MB in use, more than 400 MB\); another takes its place"
        wait_until(lambda: re.search(said, sqlq_.log()), what="the process replaced")
    assert (app.jobs.get(grown).state, app.jobs.get(next_one).state) == (State.FINISHED, State.FINISHED)


@needs("postgresql")
@pytest.mark.parametrize("titled", [True, False])
def test_titles_of_processes_show_their_roles_and_never_the_url(
    sqlq_: Command, app: sqlq.App, titled: bool
) -> None:
    if not titled:
        (sqlq_.directory / "setproctitle.py").write_text("raise ModuleNotFoundError('setproctitle')\n")
    url = make_url(app.url).set(password="geheim-7").render_as_string(hide_password=False)
    with sqlq_.working("-d", url, "--isolate", "--name", "mail-1", anew=True) as worker:
        wait_until(lambda: "working on" in sqlq_.log(), timeout=60)
        first = psutil.Process(worker.pid)
        lines = [" ".join(each.cmdline()).strip() for each in (first, *first.children(recursive=True))]
    assert len(lines) > 2
    assert "geheim" not in str(lines)
    assert ({"sqlq: mail-1 supervisor", "sqlq: mail-1 worker"} <= {*lines}) is titled
    assert sqlq_.log().count("WARNING -d has a password") == 1
