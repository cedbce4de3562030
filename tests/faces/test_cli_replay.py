"""`sqlq replay`, and the history that `sqlq show` prints."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.model.job import State
from tests.faces.command import Command
from tests.waiting import wait_until

MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"
SPAN = r"[\d.]+ m?s"

ODD = """
import os
from pathlib import Path

import sqlq

app = sqlq.App()

@app.task(max_attempts=5, backoff="10ms")
def odd() -> str:
    job = sqlq.current_job()
    if job.attempts == 1:
        raise ValueError("no van\\nat all")
    if job.attempts == 2:
        os._exit(9)
    if not Path("snoozed").exists():
        Path("snoozed").touch()
        raise sqlq.Snooze("10ms")
    if not Path("mended").exists():
        raise sqlq.Retry("0s") if job.attempts < 5 else LookupError("no box")
    return "sent"
"""


def ended(sqlq_: Command, *args: Any) -> int:
    """Run a job of the shop to its end and return its id."""
    id: int = sqlq_.shop("enqueue", *map(str, args), "--json").json()["id"]
    sqlq_.work()
    return id


# -- the history ---------------------------------------------------------------------------------------------


def test_show_prints_every_attempt_of_a_jobs_history(sqlq_: Command, app: sqlq.App) -> None:
    """Attempts fail, kill their process and snooze. Then the job fails for good, an operator retries it, and
    it finishes."""
    (sqlq_.directory / "odd.py").write_text(ODD)
    id: int = sqlq_("-a", "odd:app", "enqueue", "odd.odd", "--json").json()["id"]

    def work() -> State:
        assert sqlq_("-a", "odd:app", "work", "--drain").code == 0
        return app.jobs.get(id).state

    wait_until(lambda: work() == "failed")
    assert sqlq_.ok("retry", str(id))
    sqlq_.touch("mended")
    # its first attempts are as odd again
    wait_until(lambda: work() == "finished")
    outcomes = [line.outcome for line in app.jobs.get(id).history]
    assert outcomes == [
        *("failed", "lost", "snoozed", "failed", "failed", "failed", "put_back"),
        *("failed", "lost", "finished"),
    ]
    said = sqlq_.ok("show", str(id))
    _, heading, story = said.partition("\nhistory\n")
    assert heading, said
    on = rf"claimed {MOMENT}, started after {SPAN}, ran {SPAN}, on \S+ pid \d+"
    expected = [
        rf"    1  {MOMENT}  failed: ValueError: no van\n       {on}\n",
        rf"    2  {MOMENT}  lost: sqlq\.errors\.WorkerLostError: .*\n       claimed {MOMENT}, ended after ",
        rf"    3  {MOMENT}  snoozed, uncounted\n       {on}\n",
        rf"    5  {MOMENT}  failed: LookupError: no box\n",
        rf"    –  {MOMENT}  put back by an operator\n",
        rf"    3  {MOMENT}  finished\n       claimed {MOMENT}, started after {SPAN}, ran {SPAN}, (on|by) ",
    ]
    places = [re.search(line, story) for line in expected]
    assert all(places), story
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)
    found = sqlq_("show", str(id), "--json").json()["history"]
    assert [line["outcome"] for line in found] == outcomes


def test_show_prints_no_history_of_a_job_that_finished_at_once(sqlq_: Command) -> None:
    assert "\nhistory" not in sqlq_.ok("show", str(ended(sqlq_, "shop.send", 7)))


# -- replay --------------------------------------------------------------------------------------------------


def test_replay_by_id_names_both_jobs_in_show(sqlq_: Command, app: sqlq.App) -> None:
    old = ended(sqlq_, "shop.send", 7)
    assert sqlq_.ok("replay", str(old)) == f"replayed job {old} as job {old + 1}\n"
    assert f"\n  replay of     job {old}\n" in sqlq_.ok("show", str(old + 1))
    assert f"\n  replayed as   job {old + 1}\n" in sqlq_.ok("show", str(old))
    sqlq_.work()
    assert app.jobs.get(old + 1).result == app.jobs.get(old).result
    assert f"job {old} has been replayed as job {old + 1} already" in sqlq_("replay", str(old)).sentence()
    again = sqlq_("replay", str(old), "--again", "--json").json()
    assert again == {"replayed": [{"id": old + 2, "replay_of": old}], "already": 0, "steps": 0}


def test_replay_with_other_arguments(sqlq_: Command, app: sqlq.App) -> None:
    old = ended(sqlq_, "shop.send", 7)
    done = sqlq_.shop("replay", str(old), "--args", "[8]", "--kwargs", '{"copy": true}')
    assert done.code == 0, done
    assert app.jobs.get(old + 1).payload == {"args": [8], "kwargs": {"copy": True}}
    assert "too many" in sqlq_.shop("replay", str(old), "--again", "--args", "[1,2,3,4]").sentence()
    assert "not JSON" in sqlq_.shop("replay", str(old), "--args", "[").misuse()
    assert "not a JSON array" in sqlq_.shop("replay", str(old), "--args", "7").misuse()
    assert "not a JSON object" in sqlq_.shop("replay", str(old), "--kwargs", "7").misuse()
    assert "for one job only" in sqlq_.shop("replay", "--task", "shop.send", "--args", "[7]").sentence()


def test_a_dry_run_counts_and_shows_the_first_few(sqlq_: Command, app: sqlq.App) -> None:
    for n in range(7):
        sqlq_.shop("enqueue", "shop.send", str(n))
    sqlq_.work()
    said = sqlq_.ok("replay", "--task", "shop.send", "--from", "1h", "--dry-run")
    head, _, table = said.partition("\n\n")
    assert head == "7 jobs of task shop.send would be replayed; nothing was written"
    rows = table.splitlines()
    assert rows[0].split() == ["id", "state", "queue", "task", "attempts", "ended", "arguments"]
    assert re.fullmatch(
        rf" *\d+  finished  mail +shop\.send +1/2  {SPAN} ago +\{{\"args\": \[0\]\}}", rows[1]
    )
    assert (len(rows), rows[-1]) == (7, "… and 2 more")
    said = sqlq_.ok("replay", "--task", "shop.send", "--dry-run", "--rate", "1/10s")
    assert said.startswith("7 jobs of task shop.send would be replayed over 60 s; nothing was written")
    found = sqlq_("replay", "--task", "shop.send", "--dry-run", "--json").json()
    assert (found["number"], len(found["first"]), found["already"]) == (7, 5, 0)
    assert {str(job.state) for job in app.jobs.list()} == {"finished"}

    assert sqlq_.ok("replay", "--task", "shop.send", "--rate", "1/1h").startswith(
        "replayed 7 jobs of task shop.send as "
    )
    assert len(app.jobs.list(state="scheduled")) == 6
    said = sqlq_.ok("replay", "--task", "shop.send")
    assert said.startswith("no jobs of task shop.send to replay\nleft out: 7 jobs were replayed before")
    assert sqlq_.ok("replay", "--queue", "nowhere", "--dry-run") == "no jobs in queue nowhere to replay\n"


def test_a_wrong_command_line_of_replay_is_reported_in_one_sentence(sqlq_: Command) -> None:
    assert "name the jobs: by id, --task, --queue, --group, --from or --to" in sqlq_("replay").misuse()
    assert "neither a time like" in sqlq_("replay", "--from", "yesterday").misuse()
    assert "has no time zone" in sqlq_("replay", "--from", "2026-01-01").misuse()
    assert "--rate is 'fast'" in sqlq_("replay", "--task", "t", "--rate", "fast").misuse()
    assert "there is no job 4711 to replay" in sqlq_("replay", "4711").sentence()
    live: int = sqlq_.shop("enqueue", "shop.send", "7", "--json").json()["id"]
    assert f"job {live} has not ended" in sqlq_("replay", str(live)).sentence()
    assert "is not after since" in sqlq_("replay", "--from", "1h", "--to", "2h").sentence()


SLOW = """
import sys
import time
from pathlib import Path

from sqlq.store.jobs import replay

replay.BATCH = 2
whole = replay.replay

def slowly(*args, **kwargs):
    done = whole(*args, **kwargs)
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return done

from sqlq.admin import replay as policy
policy.replaying.replay = slowly
from sqlq.cli.root import run
run()
"""


@pytest.mark.integration
def test_an_interrupted_replay_continues_when_it_is_repeated(sqlq_: Command, app: sqlq.App) -> None:
    for n in range(5):
        sqlq_.shop("enqueue", "shop.send", str(n))
    sqlq_.work()
    (sqlq_.directory / "slow.py").write_text(SLOW)
    with subprocess.Popen(
        [sys.executable, "slow.py", "replay", "--task", "shop.send"],
        cwd=sqlq_.directory,
        env=sqlq_.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        sqlq_.wait_for("begun")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "interrupted: 0 jobs had been replayed; the same command goes on with the others" in err
    before = len([job for job in app.jobs.list() if job.replay_of is not None])
    assert before in (0, 2), "a batch is whole or not there"
    sqlq_.ok("replay", "--task", "shop.send")
    origins = [job.replay_of for job in app.jobs.list() if job.replay_of is not None]
    assert sorted(origins) == [1, 2, 3, 4, 5], "each once"
    assert Path(sqlq_.directory / "begun").exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_history_fits_a_narrow_terminal(sqlq_: Command, app: sqlq.App) -> None:
    id = ended(sqlq_, "shop.fail", "lift it")
    wait_until(lambda: "failed" in sqlq_.work().err or app.jobs.get(id).state == "failed")
    said = sqlq_("show", str(id), env={"COLUMNS": "60"}).out
    _, _, story = said.partition("\nhistory\n")
    assert max(len(line) for line in story.partition("\n\n")[0].splitlines()) <= 60, story
