"""`sqlq reschedule` and `sqlq change`."""

from __future__ import annotations

from sqlalchemy import Engine, text

import sqlq
from tests.kit import needs
from tests.kit.command import Command


def test_reschedule_moves_jobs_and_explains_the_others(sqlq_: Command, app: sqlq.App, engine: Engine) -> None:
    send = app.task(name="send")(lambda: None)
    first, second, third = (app.enqueue(send.new()).id for _ in range(3))
    assert sqlq_.ok("reschedule", str(first), "--delay", "1h") == f"rescheduled 1 job: {first}\n"
    assert app.jobs.get(first).state == "scheduled"
    assert sqlq_.ok("reschedule", "--task", "send", "--available-at", "2030-01-31T08:00:00Z") == (
        f"rescheduled 3 jobs of task send: {first}, {second}, {third}\n"
    )
    app.jobs.cancel([third])
    with engine.begin() as conn:
        reserved = "reserved_at = created_at, reserved_by = 'w', lease_expires_at = created_at"
        conn.execute(text(f"UPDATE jobs SET {reserved} WHERE id = {second}"))
    done = sqlq_("reschedule", str(first), str(second), str(third), "4711")
    assert (done.code, done.out) == (1, f"rescheduled 1 job: {first}\n")
    assert done.err.splitlines() == [
        f"sqlq: job {second}: it is running: reschedule is for blocked, scheduled, available jobs",
        f"sqlq: job {third}: it is cancelled: reschedule is for blocked, scheduled, available jobs",
        "sqlq: job 4711: there is no such job",
    ]
    assert sqlq_("reschedule", "--all", "--json").json() == {"rescheduled": [first], "not_rescheduled": []}
    assert sqlq_.ok("reschedule", "--queue", "nowhere") == "no jobs in queue nowhere rescheduled\n"


@needs("cheap")
def test_reschedule_refuses_a_wrong_command_line(sqlq_: Command) -> None:
    assert "name the jobs" in sqlq_("reschedule").misuse()
    both = sqlq_("reschedule", "1", "--delay", "1h", "--available-at", "2030-01-01T00:00:00Z")
    assert "a time and a delay both say when" in both.sentence()
    assert "--delay is 'soon'" in sqlq_("reschedule", "1", "--delay", "soon").misuse()


def test_change_moves_jobs_to_a_queue_and_explains_the_others(sqlq_: Command, app: sqlq.App) -> None:
    send = app.task(name="send")(lambda: None)
    app.enqueue(send.new().set(queue="bulk", unique_key="k"))
    met, plain = (job.id for job in app.enqueue_many([send.new().set(unique_key="k"), send.new()]))
    done = sqlq_(
        "change", str(met), str(plain), "4711", "--queue", "bulk", "--priority", "-10", "--delay", "1h"
    )
    assert (done.code, done.out) == (1, f"changed 1 job: {plain}\n")
    assert done.err.splitlines() == [
        f"sqlq: job {met}: another job holds its unique key in that queue",
        "sqlq: job 4711: there is no such job",
    ]
    changed = app.jobs.get(plain)
    assert (changed.queue, changed.priority, changed.state) == ("bulk", -10, "scheduled")
    assert sqlq_("change", str(plain), "--priority", "1", "--json").json() == {str(plain): "changed"}
    number, target = app.audit.list()[1].number, app.audit.list()[1].target
    assert (number, target) == (1, f"change {met} {plain} 4711 --queue bulk --priority -10 --delay 1h")


@needs("cheap")
def test_change_refuses_a_wrong_command_line(sqlq_: Command) -> None:
    assert "Missing argument 'IDS...'" in sqlq_("change", "--queue", "bulk").misuse()
    assert "nothing is to change" in sqlq_("change", "1").sentence()
    assert "--priority is 101" in sqlq_("change", "1", "--priority", "101").misuse()
    both = sqlq_("change", "1", "--delay", "1h", "--available-at", "2030-01-01T00:00:00Z")
    assert "a time and a delay both say when" in both.sentence()
