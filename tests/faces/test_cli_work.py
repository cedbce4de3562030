"""`sqlq work` as a process: what it runs, how it stops, what it logs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

import sqlq
from sqlq.model.job import State
from sqlq.store.workers import workers
from sqlq.worker.supervise.supervisor import touch
from tests.kit import needs, wait_until
from tests.kit.command import Command


def test_drain_runs_all_available_jobs_and_logs_a_summary(
    sqlq_: Command, app: sqlq.App, database_url: str
) -> None:
    done = sqlq_.enqueue("shop.send", "7", "true")
    failing = sqlq_.enqueue("shop.fail", "lift it", "--max-attempts", "1")
    here, later = sqlq_.enqueue("shop.where"), sqlq_.enqueue("shop.send", "8", "--delay", "1h")
    worked = sqlq_.work("-c", "3")
    assert worked.out == "", "logs go to stderr"
    lines = worked.err.splitlines()
    events = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (INFO   |WARNING|ERROR  ) ")
    first, *middle, last = [line for line in lines if events.match(line)]
    rest = [line for line in lines if not events.match(line)]
    assert rest[0].startswith("Traceback"), "that of the job that failed for good, and nothing else"
    assert rest[-2:] == ["ValueError: cannot lift it", "for several reasons"]
    place = database_url if database_url.startswith("sqlite") else database_url.rpartition("/")[2]
    for words in (place, "all queues", "3 slots", "4 tasks"):
        assert words in first
    assert len(middle) == 3
    assert any(f"job {done} shop.send (queue mail, attempt 1 of 2) finished" in line for line in middle)
    (bad,) = (
        line for line in middle if f"job {failing} shop.fail (queue mail, attempt 1 of 1) failed" in line
    )
    assert re.search("for good.*cannot lift it", bad)
    assert re.search(r"stopped: 2 finished, 1 failed in \d.* m?s \([\d.]+ a second\)$", last)
    assert app.jobs.get(done).result == "7 True "
    assert app.jobs.get(here).result == str(sqlq_.directory)
    assert app.jobs.get(failing).state is State.FAILED
    assert app.jobs.get(later).state is State.SCHEDULED


def test_work_serves_named_queues_warns_of_unknown_ones_and_ends_after_max_jobs(
    sqlq_: Command, app: sqlq.App
) -> None:
    mail = [sqlq_.enqueue("shop.send", str(n)) for n in range(2)]
    first, other = (sqlq_.enqueue("shop.send", "7", "--queue", queue) for queue in ("first", "other"))
    worked = sqlq_.work("-q", "first, mail", "-q", "mial", "--max-jobs", "2").err
    assert "queues first, mail, mial" in worked
    assert {app.jobs.get(id).state for id in (first, *mail)} == {State.FINISHED}
    assert app.jobs.get(other).state is State.AVAILABLE
    assert "it has had its number of jobs" in worked
    (told,) = (line for line in worked.splitlines() if "WARNING" in line)
    assert told.endswith("no task of this App, no job and no other worker names the queue mial")


@needs("cheap")
def test_unknown_queues_leave_out_those_that_other_workers_serve(app: sqlq.App) -> None:
    app.task(name="u", queue="task")(lambda: None)
    app.enqueue(app.task(name="t")(lambda: None).new().set(queue="holds"))
    app.queues.pause("paused")
    named = {"same": ("mial", "typo"), "wider": ("typo", "served")}
    with app.database.begin() as conn:
        for id, queues in named.items():
            workers.register(conn, id=id, host="h", pid=1, version="0", queues=queues, concurrency=1)
    assert app.queues._unknown(["holds", "paused", "served", "task", "no"], but_for_twins=True) == ["no"]
    assert app.queues._unknown(["typo", "mial"], but_for_twins=True) == ["mial"], "told the very same"


@needs("cheap")
def test_a_health_file_that_cannot_be_written_is_reported_in_one_sentence(sqlq_: Command) -> None:
    said = sqlq_.shop("work", "--drain", "--health-file", "none/alive").sentence()
    assert said.startswith("--health-file none/alive: No such file or directory")
    directory = sqlq_.directory / "later"
    directory.mkdir()
    with sqlq_.working("--health-file", "later/alive"):
        wait_until(lambda: "working on" in sqlq_.log(), timeout=60)
        shutil.rmtree(directory)
        wait_until(lambda: "the health file cannot be touched" in sqlq_.log())
        directory.mkdir()
        wait_until((directory / "alive").exists, what="it being touched again")
    assert sqlq_.log().count("WARNING the health file cannot be touched") == 1


def test_a_health_file_is_refused_when_it_is_a_symlink_or_a_pipe(tmp_path: Path) -> None:
    there, alive, pipe = tmp_path / "there", tmp_path / "alive", tmp_path / "pipe"
    alive.symlink_to(there)
    with pytest.raises(OSError, match="symbolic"):
        touch(alive)
    assert not there.exists()
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):
        touch(pipe)


def test_health_imports_neither_sqlalchemy_nor_asyncio(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    touch(alive)
    for arguments, code in (([], 0), (["--max-age", "0s"], 1)):
        asked = [sys.executable, "-X", "importtime", "-m", "sqlq", "health", str(alive), *arguments]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "sqlq.cli.root" in imported
        assert not imported & {"sqlalchemy", "asyncio", "psycopg", "alembic"}
        alive.touch()


def test_json_log_lines_have_the_fields_of_the_event(sqlq_: Command) -> None:
    done, failing = sqlq_.enqueue("shop.send", "7"), sqlq_.enqueue("shop.fail", "it")
    worked = [json.loads(line) for line in sqlq_.work("--log-format", "json").err.splitlines()]
    assert worked[0]["event"] == "started"
    assert worked[-1]["event"] == "stopped"
    events = {(line["event"], line["job_id"]): line for line in worked if "job_id" in line}
    line = events["finished", done]
    assert (line["task"], line["queue"], line["attempt"], line["level"]) == ("shop.send", "mail", 1, "info")
    assert line["duration_ms"] >= 0
    assert line["time"].endswith("+00:00")
    assert f"job {done} shop.send" in line["message"]
    assert events["retried", failing]["level"] == "warning"


@pytest.mark.variants
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_running_jobs_finish(
    sqlq_: Command, app: sqlq.App, number: signal.Signals
) -> None:
    running = sqlq_.enqueue("wait", "a")
    with sqlq_.working("-c", "1", anew=True) as worker:
        sqlq_.wait_for("a.started")
        waiting = sqlq_.enqueue("shop.send", "7")
        worker.send_signal(number)
        wait_until(lambda: "waiting up to" in sqlq_.log(), what="its process told to stop")
        assert worker.poll() is None
        sqlq_.touch("a.go")
        assert worker.wait(30) == 0
    assert [app.jobs.get(id).state for id in (running, waiting)] == [State.FINISHED, State.AVAILABLE]
    assert app.jobs.get(waiting).attempts == 0
    assert "stopped: 1 finished" in sqlq_.log()
    assert app.workers.list() == []


def test_a_job_with_one_attempt_fails_after_the_grace_time(sqlq_: Command, app: sqlq.App) -> None:
    running = sqlq_.enqueue("wait", "a")
    with app.database.begin() as conn:
        conn.execute(text("UPDATE jobs SET max_attempts = 1"))
    with sqlq_.working("--grace", "100ms", anew=True) as worker:
        sqlq_.wait_for("a.started")
        worker.terminate()
        assert worker.wait(30) == 0, "a handler that cannot be stopped must not keep the process"
    job = app.jobs.get(running)
    assert (job.state, job.reason, job.attempts, job.releases) == (State.FAILED, "worker_lost", 1, 0)


@pytest.mark.variants
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@needs("cheap")
def test_the_second_signal_leaves_at_once(
    sqlq_: Command, app: sqlq.App, number: signal.Signals, code: int
) -> None:
    running = sqlq_.enqueue("wait", "a")
    with sqlq_.working(anew=True) as worker:
        sqlq_.wait_for("a.started")
        worker.send_signal(number)
        wait_until(lambda: "stopping" in sqlq_.log())

        def asked_again() -> bool:
            worker.send_signal(number)
            return worker.poll() is not None

        wait_until(asked_again, what="it leaving, once the repeat is no part of the first request")
        assert worker.wait(30) == code
    assert app.jobs.get(running).state is State.AVAILABLE, "the supervisor has released it"
    assert "Traceback" not in sqlq_.log()


FAULTY = """
import re
import psycopg
import sqlq

app = sqlq.App()

@app.task(name="t")
def t() -> None:
    pass

execute = psycopg.Cursor.execute

def fails(self, query, *more, **options):
    if re.search({pattern!r}, str(query)):
        raise TypeError("Compiled.process() got multiple values for keyword argument 'ashint'")
    return execute(self, query, *more, **options)

psycopg.Cursor.execute = fails
"""
FAULTS = {
    "settle": "INSERT INTO public.finished_jobs",
    "settle and look": "INSERT INTO public.finished_jobs|SELECT public.finished_jobs.id",
    "claim": "SET reserved_at",
}


@pytest.mark.variants
@needs("postgresql")
@pytest.mark.parametrize("at", FAULTS)
def test_a_worker_ends_with_code_1_when_its_library_fails(sqlq_: Command, app: sqlq.App, at: str) -> None:
    (sqlq_.directory / "shop.py").write_text(FAULTY.format(pattern=FAULTS[at]))
    app.enqueue_many([app.task(name="t")(lambda: None).new()] * 3)
    with sqlq_.working("--grace", "1s") as worker:
        assert worker.wait(30) == 1
    said = sqlq_.log()
    assert "fails again and again, by no fault of the database: TypeError: Compiled.process()" in said
    assert said.count("Traceback") < 5, said
