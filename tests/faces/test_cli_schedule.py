"""`sqlq schedules`, and its errors for bad input."""

from __future__ import annotations

from sqlalchemy import Engine, text

import sqlq
from tests.kit import span
from tests.kit.command import Command


def test_the_list_and_the_doctor_show_failing_schedules(
    sqlq_: Command, app: sqlq.App, engine: Engine
) -> None:
    task = app.task(name="shop.send")(lambda: None)
    app.schedules.add("broken", task.new(), every="1h")
    app.schedules.add("unknown", task.new(), every="1h")
    assert "none is late, and none fails" in sqlq_("doctor").out
    job = app.schedules.run("unknown")
    with engine.begin() as conn:
        conn.execute(
            text("UPDATE sqlq_schedules SET error = 'it broke', error_at = created_at WHERE name = 'broken'")
        )
        conn.execute(text("UPDATE sqlq_schedules SET next_at = created_at WHERE name = 'unknown'"))
        columns = (
            "id, queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases"
        )
        conn.execute(
            text(
                f"INSERT INTO failed_jobs ({columns}, created_at, schedule, reason) "
                f"SELECT {columns}, created_at, schedule, 'unknown_task' FROM jobs WHERE id = :id"
            ),
            {"id": job.id},
        )
        conn.execute(text("DELETE FROM jobs"))
        hour = span(conn, 3_600)
        conn.execute(text(f"UPDATE sqlq_schedules SET next_at = next_at - {hour} WHERE name = 'unknown'"))
    said = sqlq_("doctor").out
    assert "the schedule broken cannot be ticked: it broke" in said
    assert "1 schedule is due for more than 60 s" in said
    listed = sqlq_.ok("schedules")
    assert "failing" in listed
    assert "error: it broke" in listed
    assert f"{job.id} failed: unknown_task" in listed
