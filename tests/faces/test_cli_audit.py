"""`sqlq audit`, and who acts by the command line."""

from __future__ import annotations

import os
import pwd
import socket

import sqlq
from tests.kit.command import Command


def test_commands_are_recorded_as_their_users(sqlq_: Command, app: sqlq.App) -> None:
    assert sqlq_.ok("audit") == "no actions recorded\n"
    id = app.enqueue(app.task(name="t")(lambda: None).new()).id
    sqlq_.ok("queues", "pause", "mail", "--duration", "10m")
    sqlq_.ok("cancel", str(id), env={"LOGNAME": "ceo", "USER": "ceo"})
    sqlq_.ok("status")
    rows = sqlq_("audit", "--json").json()
    who = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    assert [(row["actor"], row["action"], row["number"]) for row in rows] == [
        (who, "cancel", 1),
        (who, "queues pause", 1),
    ]
    assert f"cancel {id}" in sqlq_.ok("audit", "--limit", "1")
    assert sqlq_.ok("prune", "--audit", "90d") == "pruned 0 recorded actions\n"
    assert sqlq_.ok("prune", "--audit", "0s") == "pruned 2 recorded actions\n"
    assert "--audit is for the record alone" in sqlq_("prune", "--audit", "1d", "--failed", "1d").misuse()
