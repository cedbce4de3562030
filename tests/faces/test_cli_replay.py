"""`sqlq replay`, and the history that `sqlq show` prints."""

from __future__ import annotations

import re
from typing import Any

import sqlq
from sqlq.model.job import State
from tests.kit import needs, wait_until
from tests.kit.command import Command

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
    if job.attempt == 1:
        raise ValueError("no van\\nat all")
    if job.attempt == 2:
        os._exit(9)
    if not Path("snoozed").exists():
        Path("snoozed").touch()
        raise sqlq.Snooze("10ms")
    if not Path("mended").exists():
        raise sqlq.Retry("0s") if job.attempt < 5 else LookupError("no box")
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
    on = rf"\(after {SPAN}, on \S+ pid \d+\)"
    expected = [
        rf"    1  {MOMENT}  failed: ValueError: no van {on}\n",
        rf"    2  {MOMENT}  lost: sqlq\.errors\.WorkerLostError: .* \(after {SPAN}, on worker ",
        rf"    3  {MOMENT}  snoozed {on}\n",
        rf"    5  {MOMENT}  failed: LookupError: no box ",
        rf"    –  {MOMENT}  put back\n",
        rf"    3  {MOMENT}  finished \(after {SPAN}, on ",
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


def test_replay_by_id_names_the_original_in_show(sqlq_: Command, app: sqlq.App) -> None:
    old = ended(sqlq_, "shop.send", 7)
    assert sqlq_.ok("replay", str(old)) == f"replayed 1 job as {old + 1}\n"
    assert f"\n  replay of     job {old}\n" in sqlq_.ok("show", str(old + 1))
    sqlq_.work()
    assert app.jobs.get(old + 1).result == app.jobs.get(old).result
    again = sqlq_("replay", str(old), "--json").json()
    assert again == {"replayed": [{"id": old + 2, "replay_of": old}], "not_replayed": []}


def test_replay_by_task_says_how_many_became_which(sqlq_: Command) -> None:
    for n in range(3):
        sqlq_.shop("enqueue", "shop.send", str(n))
    sqlq_.work()
    said = sqlq_.ok("replay", "--task", "shop.send", "--since", "1h")
    assert said == "replayed 3 jobs of task shop.send since 1h as 4, 5, 6\n"
    assert sqlq_.ok("replay", "--queue", "nowhere") == "no jobs in queue nowhere replayed\n"


def test_replay_explains_each_id_that_it_leaves_out(sqlq_: Command) -> None:
    live: int = sqlq_.shop("enqueue", "shop.send", "7", "--json").json()["id"]
    done = sqlq_("replay", str(live), "4711")
    assert done.code == 1
    assert done.out == "no jobs replayed\n"
    assert done.err == (
        f"sqlq: job {live}: it is available: replay is for finished, failed, cancelled jobs\n"
        "sqlq: job 4711: there is no such job\n"
    )


def test_a_wrong_command_line_of_replay_is_reported_in_one_sentence(sqlq_: Command) -> None:
    assert "name the jobs, or give --task, --queue, --batch, --label" in sqlq_("replay").misuse()
    assert "--since is 'yesterday'" in sqlq_("replay", "--since", "yesterday").misuse()
    assert "has no time zone" in sqlq_("replay", "--since", "2026-01-01").misuse()


@needs("cheap")
def test_the_history_fits_a_narrow_terminal(sqlq_: Command, app: sqlq.App) -> None:
    id = ended(sqlq_, "shop.fail", "lift it")
    wait_until(lambda: "failed" in sqlq_.work().err or app.jobs.get(id).state == "failed")
    said = sqlq_("show", str(id), env={"COLUMNS": "60"}).out
    _, _, story = said.partition("\nhistory\n")
    assert max(len(line) for line in story.partition("\n\n")[0].splitlines()) <= 60, story
