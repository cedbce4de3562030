"""Verbs on all jobs that match, in batches, are interrupted and go on; the audit names the operator."""

from __future__ import annotations

import os
import pwd
import socket
from collections import Counter

import pytest
from sqlalchemy import text

import sqlq
from sqlq.model.outcome import Failed, Finished
from tests.kit import end, failed, span
from tests.kit.command import Command, Done

SECOND_BATCH = """
import os, signal, sys
from sqlq.cli import main
from sqlq.store import audit

advance, batches = audit.advance, []

def interrupted(conn, id, number):
    batches.append(number)
    if len(batches) == 2:
        os.kill(os.getpid(), {signal})
    return advance(conn, id, number)

audit.advance = interrupted
sys.argv = ["sqlq", *sys.argv[1:]]
main()
"""


def interrupted(run: Command, signal: str, *words: str) -> Done:
    """Run `sqlq`, which gets a signal when it has done its second batch, and has not recorded it."""
    return run.python("-c", SECOND_BATCH.format(signal=f"signal.{signal}"), *words)


def enqueue(app: sqlq.App, number: int, outcome: Failed | Finished | None = None) -> None:
    app.enqueue_many([app.named("send").new()] * number)
    if outcome is not None:
        assert len(end(app, outcome, number)) == number


@pytest.mark.parametrize(
    ("verb", "outcome", "batch", "state"),
    [
        ("retry", failed(), 100, "available"),
        ("delete", failed(), 1_000, None),
        ("cancel", None, 500, "cancelled"),
        ("replay", Finished(), 1_000, "available"),
    ],
)
def test_an_action_goes_on_by_the_same_command_when_it_was_killed(
    sqlq_: Command, app: sqlq.App, verb: str, outcome: Failed | Finished | None, batch: int, state: str | None
) -> None:
    number = 2 * batch + 50
    enqueue(app, number, outcome)
    words = [verb, "--task", "send", *(["--yes"] if verb == "delete" else [])]
    assert interrupted(sqlq_, "SIGKILL", *words).code == -9
    (row,) = app.audit.list()
    assert (row.target, row.number) == (f"{verb} --task send", batch)
    assert (row.state, row.ended_at) == ("running", None)
    with app.database.begin() as conn:
        conn.execute(text(f"UPDATE sqlq_audit SET seen_at = seen_at - {span(app.database.engine, 90)}"))
    assert app.audit.list()[0].state == "interrupted"
    sqlq_.ok(*words)
    again = app.audit.list()[0]
    assert (again.target, again.number, again.state) == (row.target, number - 2 * batch, "ended")
    jobs = [job for job in app.jobs.list(limit=3 * number) if state is None or job.state == state]
    assert len(jobs) == (0 if state is None else number)
    if verb == "replay":
        assert {*Counter(job.replay_of for job in jobs).values()} == {1}, "nothing is copied twice"
        assert sqlq_.ok(*words).startswith("no jobs of task send replayed")


def test_ctrl_c_ends_an_action_after_its_batch(sqlq_: Command, app: sqlq.App) -> None:
    enqueue(app, 600, failed())
    done = interrupted(sqlq_, "SIGINT", "retry", "--all")
    assert done.code == 130
    assert done.out.startswith("retried 300 jobs: ")
    assert done.err == "sqlq: stopped after this batch: the same command goes on with the rest\n"
    assert len(app.jobs.list(state="failed", limit=600)) == 300
    assert "retried 300 jobs" in sqlq_.ok("retry", "--all")


def test_commands_are_recorded_as_their_users(sqlq_: Command, app: sqlq.App) -> None:
    id = app.enqueue(app.named("t").new()).id
    sqlq_.ok("cancel", str(id), env={"LOGNAME": "ceo", "USER": "ceo"})
    (row,) = app.audit.list()
    who = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    assert (row.actor, row.action, row.number) == (who, "cancel", 1)
