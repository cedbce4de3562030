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


# -- replay --------------------------------------------------------------------------------------------------


@needs("cheap")
def test_the_history_fits_a_narrow_terminal(sqlq_: Command, app: sqlq.App) -> None:
    id = ended(sqlq_, "shop.fail", "lift it")
    wait_until(lambda: "failed" in sqlq_.work().err or app.jobs.get(id).state == "failed")
    said = sqlq_("show", str(id), env={"COLUMNS": "60"}).out
    _, _, story = said.partition("\nhistory\n")
    assert max(len(line) for line in story.partition("\n\n")[0].splitlines()) <= 60, story
