"""Commands that end or delete many jobs show how many, and want a yes: `sqlq cancel --all`, `sqlq delete`."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import Any

import sqlq
from tests.kit import drain
from tests.kit.command import Command


def on_terminal(run: Command, answer: str, *words: str) -> tuple[int, str]:
    """Run a command for a person who answers it; return its exit code, and what it printed."""
    lead, follow = pty.openpty()
    try:
        os.write(lead, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-m", "sqlq", *words],
            cwd=run.directory,
            env=run.environment,
            stdin=follow,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(lead)
        os.close(follow)
    return done.returncode, done.stdout + done.stderr


def states(app: sqlq.App) -> list[str]:
    return sorted(job.state for job in app.jobs.list())


def test_cancel_all_shows_the_number_and_needs_a_confirmation(sqlq_: Command, app: sqlq.App) -> None:
    send = app.task(name="send")(lambda: None)
    app.enqueue_many([send.new(), send.new().set(queue="mail"), send.new().set(delay="1h")])
    said = sqlq_("cancel", "--all").sentence()
    assert said == "nobody is here to confirm: cancel 3 jobs; nothing was done; --yes goes without"
    code, said = on_terminal(sqlq_, "n", "cancel", "--all")
    # Some releases of click move the blanks around their prompt.
    assert (code, said.replace(" ", "")) == (1, "cancel3jobs?[y/N]:sqlq:nothingwasdone\n")
    assert states(app) == ["available", "available", "scheduled"]
    code, said = on_terminal(sqlq_, "y", "cancel", "--all")
    assert code == 0
    assert "cancelled 3 jobs: " in said
    assert sqlq_.ok("cancel", "--all") == "no jobs cancelled\n", "where nothing is to be confirmed"


def test_cancel_all_with_yes_cancels_waiting_and_requests_running_jobs(sqlq_: Command, app: sqlq.App) -> None:
    waiting = app.enqueue(app.named("send").new()).id
    running = sqlq_.shop("enqueue", "wait", "a", "--priority", "9", "--json").json()["id"]
    with sqlq_.working("-c", "1", "-q", "default"):
        sqlq_.wait_for("a.started")
        done = sqlq_("cancel", "--all", "--yes", "--json").json()
        assert (done["cancelled"], done["requested"]) == ([waiting], [running])
        sqlq_.touch("a.go")
    assert app.audit.list()[0].target.startswith("cancel --all")


def fail(app: sqlq.App, task: str, queue: str, number: int) -> list[int]:
    def break_down() -> None:
        raise LookupError(task)

    new = app.task(name=task, max_attempts=1)(break_down).new().set(queue=queue)
    return [job.id for job in app.enqueue_many([new] * number)]


def test_delete_needs_a_confirmation_unless_ids_are_given(sqlq_: Command, app: sqlq.App) -> None:
    mails, exports = fail(app, "send", "mail", 2), fail(app, "export", "exports", 3)
    drain(app)
    (fingerprint,) = {each.fingerprint for each in app.jobs.failures()[0] if each.task == "export"}
    asked: dict[tuple[str, ...], str] = {
        ("--queue", "mail"): "delete 2 failed jobs in queue mail",
        ("--task", "export"): "delete 3 failed jobs of task export",
        ("--all",): "delete 5 failed jobs",
        ("--error", fingerprint): f"delete 3 failed jobs with the error {fingerprint}",
    }
    for words, action in asked.items():
        said = sqlq_("delete", *words).sentence()
        assert said == f"nobody is here to confirm: {action}; nothing was done; --yes goes without"
    assert len(app.jobs.list(state="failed")) == 5
    assert on_terminal(sqlq_, "n", "delete", "--queue", "mail")[0] == 1
    code, said = on_terminal(sqlq_, "y", "delete", "--queue", "mail")
    assert code == 0
    assert f"deleted 2 jobs in queue mail: {mails[0]}, {mails[1]}\n" in said
    assert sqlq_.ok("delete", str(exports[0])) == f"deleted 1 job: {exports[0]}\n"
    answer: Any = sqlq_("delete", "--all", "-y", "--json").json()
    assert answer == {"deleted": exports[1:], "not_deleted": []}
    assert sqlq_.ok("delete", "--queue", "mail") == "no jobs in queue mail deleted\n"
