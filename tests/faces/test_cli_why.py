"""`sqlq why`, and `app.jobs.why`: why a job does not run now, when it will, or what became of it."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import text

import sqlq
from sqlq.store import health
from sqlq.store.workers import workers
from sqlq.testing import drain
from tests.kit import claim_on, for_each, span
from tests.kit.command import Command


def enqueue(sqlq_: Command, *words: str) -> str:
    return str(sqlq_.shop("enqueue", *words, "--json").json()["id"])


def test_a_job_that_was_cancelled_before_its_time_was_not_due_ago(sqlq_: Command, app: sqlq.App) -> None:
    job = app.enqueue(app.named("shop.where").new().set(delay="1h"))
    app.jobs.cancel([job])
    (due,) = (line for line in sqlq_.ok("show", str(job.id)).splitlines() if " due " in f" {line}")
    assert "ago" not in due


def test_each_command_that_show_and_why_advise_for_an_ended_job_is_accepted(
    sqlq_: Command, app: sqlq.App
) -> None:
    send = app.named("shop.send")
    plain, step = app.enqueue(send.new(1)).id, app.enqueue(sqlq.chain(send.new(2), send.new(3))).jobs[0].id
    sqlq_.work()
    for id in (plain, step):
        advised = [
            each["command"].split(" -a ")[0] for each in sqlq_("why", str(id), "--json").json()["reasons"]
        ]
        assert advised
        for line in advised:
            assert line in sqlq_.ok("show", str(id))
            assert sqlq_.shop(*line.split()[1:]).code == 0, line


def test_why_reports_a_task_that_no_worker_knows(sqlq_: Command, app: sqlq.App) -> None:
    id = app.enqueue(app.named("elsewhere.send").new().set(queue="mail")).id
    sqlq_.work()
    reasons, found = sqlq_.ok("why", str(id)).split("\ndoctor\n")
    assert "the last worker that met it does not know its task, and it was put back: deploy it" in reasons
    assert "no worker takes jobs of the task elsewhere.send: 1 job was put back" in found
    other = app.enqueue(app.named("elsewhere.post").new().set(queue="mail")).id
    assert "elsewhere.send" not in sqlq_.ok("why", str(other)), "which is the trouble of another job"


def test_why_explains_a_job_by_name_whose_arguments_do_not_fit(sqlq_: Command, app: sqlq.App) -> None:
    id = sqlq_("enqueue", "shop.send", "many", "words", "too", "much", "--json").json()["id"]
    sqlq_.work()
    assert app.jobs.get(id).history[-1].reason == "bad_payload"
    told = "the handler of the last worker that met it does not take its arguments"
    assert told in sqlq_.ok("why", str(id))


def test_why_and_the_doctor_name_the_unknown_task_at_the_head_of_a_line(
    sqlq_: Command, app: sqlq.App
) -> None:
    pay = app.task(name="elsewhere.pay", limit=sqlq.Serial("account"))(lambda: None)
    first, later = app.enqueue(pay.new().set(queue="mail")).id, app.enqueue(pay.new().set(queue="mail")).id
    sqlq_.work()
    reasons, found = sqlq_.ok("why", str(first)).split("\ndoctor\n")
    assert "the last worker that met it does not know its task, and it was put back: deploy it" in reasons
    assert "its turn" not in reasons
    assert "no worker takes jobs of the task elsewhere.pay: 1 job was put back" in found
    reasons = sqlq_.ok("why", str(later))
    assert f"it waits for job {first}, elsewhere.pay, which is blocked, and before it" in reasons
    assert "in the line of account: the last worker that met it does not know its task" in reasons
    assert f"sqlq why {first}" in reasons
    doctor = " ".join(sqlq_("doctor").out.split())
    assert "no worker takes jobs of the task elsewhere.pay: 1 job was put back" in doctor
    with app.database.begin() as conn:
        conn.exec_driver_sql(f"UPDATE jobs SET due_at = created_at - {span(conn, 3_600)}")
    doctor = " ".join(sqlq_("doctor").out.split())
    assert "in line for the key 'account' since" in doctor
    assert "the last worker that met it does not know its task" in doctor
    assert f"→ sqlq why {first}" in doctor


def test_why_names_the_live_job_for_which_a_retry_is_refused(sqlq_: Command, app: sqlq.App) -> None:
    fail = app.task(name="shop.fail", max_attempts=1)(lambda: 1 / 0)
    failed = app.enqueue(fail.new().set(unique_key="k"))
    drain(app)
    assert f"sqlq retry {failed.id} " in sqlq_.ok("why", str(failed.id))
    live = app.enqueue(fail.new().set(unique_key="k", delay="1h"))
    said = sqlq_.ok("why", str(failed.id))
    assert f"job {live.id} has its unique key: a retry is refused until that ends" in said
    assert f"sqlq show {live.id}" in said
    assert f"sqlq retry {failed.id}" not in said


def _busy(app: sqlq.App) -> None:
    """Enter a worker with one slot, which is taken."""
    with app.database.begin() as conn:
        workers.register(conn, id="w", host="here", pid=1, version="0", queues=None, concurrency=1)
        assert claim_on(conn, ["mail"], limit=1, owner="w", lease_ms=60_000)


FORECASTS = {
    "ten have ended in the last minutes": (
        10,
        "",
        None,
        r"about \d.*: 4 before it, \d.* (a second|a minute)",
    ),
    "more are before it than are counted": (10, "", 3, r"more than \d.*: more than 3 before it, \d.*"),
    "too few have ended": (4, "", None, None),
    "they have ended long ago": (10, "finished_at = finished_at - {hour}", None, None),
    "newer ones were claimed first": (10, "available_at = available_at + {hour}", None, None),
    "others were of a larger priority": (
        10,
        "priority = 9, available_at = available_at + {hour}",
        None,
        "about",
    ),
}


@for_each("name", FORECASTS)
def test_why_forecasts_when_a_due_job_begins(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ended, change, most, said = FORECASTS[name]
    send = app.task(name=f"send: {name}", queue="mail")(lambda: None)
    with app.database.begin() as conn:
        for table in ("jobs", "finished_jobs", "sqlq_workers"):
            conn.execute(text(f"DELETE FROM {table}"))
    app.enqueue_many([send.new()] * ended)
    drain(app)
    with app.database.begin() as conn:
        if change:
            conn.execute(text(f"UPDATE finished_jobs SET {change.format(hour=span(conn, 3_600))}"))
    app.enqueue(send.new())
    _busy(app)
    app.enqueue_many([send.new().set(priority=5), send.new(), send.new(), send.new().set(priority=5)])
    job = app.enqueue(send.new())
    app.enqueue_many([send.new(), send.new().set(priority=-5), send.new().set(queue="other", priority=5)])
    monkeypatch.setattr(health, "COUNT_LIMIT", most or 10_000)
    first, *_ = app.jobs.why(job.id)
    taken = "the slot of its worker is taken"
    assert re.fullmatch(taken if said is None else f"{taken}; {said}.*", first)
