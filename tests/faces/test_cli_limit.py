"""`sqlq limit`: what limits allow, and an operator's word about it."""

from __future__ import annotations

from contextlib import closing

import pytest
from sqlalchemy import text

import sqlq
from sqlq.admin.doctor.doctor import examine
from sqlq.admin.doctor.finding import Finding, Verdict
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from tests.kit import span
from tests.kit.command import Command


@pytest.fixture
def call(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="call", limit=sqlq.Limit("stripe", running=2))
    def call(n: int = 0) -> None: ...

    return call


def allowed(app: sqlq.App) -> list[str]:
    return [f"{each.key}: {each.says}" for each in app.limits.list()]


def test_limits_list_shows_capacity_running_and_waiting_jobs(
    app: sqlq.App, call: sqlq.Task[..., None]
) -> None:
    assert app.limits.list() == []
    app.enqueue_many([*(call.new(n) for n in range(5)), call.new(9).set(limit=sqlq.Serial("one"))])
    admit.look(app.database)
    one, stripe = app.limits.list()
    assert (stripe.key, stripe.says, stripe.running, stripe.waiting) == ("stripe", "2 running", 2, 3)
    assert stripe.oldest_due_at is not None
    assert (one.says, one.running, one.waiting, one.oldest_due_at) == ("in order", 1, 0, None)
    assert [each.key for each in app.limits.list("str")] == ["stripe"]


def test_an_operators_limit_counts_until_it_is_cleared(app: sqlq.App, call: sqlq.Task[..., None]) -> None:
    app.enqueue_many([call.new(n) for n in range(9)])
    assert admit.look(app.database).number == 2
    assert app.limits.set("stripe", running=4).running == 4  # at once, and two more
    assert admit.look(app.database).number == 0
    app.enqueue(call.new())  # a deploy with 2
    assert admit.look(app.database).number == 0
    assert allowed(app) == ["stripe: 4 running"]
    app.limits.clear("stripe")
    assert allowed(app) == ["stripe: 2 running"]
    app.limits.set("stripe", rate="10/1s")
    with closing(sqlq.App(app.url)) as without_the_code:
        without_the_code.limits.clear("stripe")
    assert allowed(app) == ["stripe: 10/1s"]
    app.enqueue(call.new())
    admit.look(app.database)
    assert allowed(app) == ["stripe: 2 running"]


def test_a_newer_deploy_changes_a_limit(app: sqlq.App, call: sqlq.Task[..., None], database_url: str) -> None:
    app.enqueue_many([call.new(n) for n in range(9)])
    assert admit.look(app.database).number == 2
    newer = sqlq.App(database_url)
    newer.enqueue(newer.task(name="call", limit=sqlq.Limit("stripe", running=5))(lambda: None).new())
    assert admit.look(app.database).number == 3
    newer.close()


def test_set_refuses_a_serial_key(app: sqlq.App) -> None:
    @app.task(name="book", limit=sqlq.Serial("account", on_failure="hold"))
    def book() -> None: ...

    app.enqueue(book.new())
    admit.look(app.database)
    with pytest.raises(sqlq.errors.ConfigurationError, match="run in order, one at a time"):
        app.limits.set("account", rate="5/1s")


def test_a_key_that_is_set_before_its_first_job_keeps_the_order(app: sqlq.App) -> None:
    app.limits.set("account", running=2, rate="5/1s")

    @app.task(name="book", limit=sqlq.Serial("account", on_failure="hold"))
    def book() -> None: ...

    app.enqueue_many([book.new() for _ in range(3)])
    assert admit.look(app.database).number == 1
    (found,) = app.limits.list(limit=10)
    assert found.says == "in order, held by failures"


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_the_list_shows_keys_of_blocked_jobs_before_any_worker_ran(
    sqlq_: Command, app: sqlq.App, call: sqlq.Task[..., None]
) -> None:
    keyed = app.task(name="keyed", limit=sqlq.Limit("key:{n}", running=1))(one_number)
    app.enqueue_many([keyed.new(n % 2) for n in range(3)])
    lines = sqlq_.ok("limits").splitlines()
    assert [line.split()[0] for line in lines] == ["key", "key:0", "key:1"]
    (line,) = sqlq_("limits", "--prefix", "key:1", "--json").json()
    assert (line["waiting"], line["running"], line["is_known"]) == (1, 0, False)
    admit.look(app.database)
    (line,) = sqlq_("limits", "--prefix", "key:1", "--json").json()
    assert (line["max_running"], line["is_known"]) == (1, True)


def one_number(n: int) -> None: ...


def test_the_doctor_names_stalled_waiting_lists(app: sqlq.App, call: sqlq.Task[..., None]) -> None:
    app.enqueue_many([call.new(n).set(queue="nowhere") for n in range(3)])
    admit.look(app.database)
    assert "no job has waited long for a limit" in said_of_limits(app)
    with app.database.begin() as conn:
        earlier = f"due_at - {span(conn, 3_600)}"
        conn.execute(text(f"UPDATE jobs SET due_at = {earlier} WHERE blocked_by = 'limit'"))
    (found,) = of_limits(app)
    assert "a job has been in line for the key 'stripe' since" in found.said
    assert "no worker serves its queue" in found.said
    assert found.verdict is Verdict.TO_DO
    assert "work -q nowhere" in str(found.remedy)


def of_limits(app: sqlq.App) -> list[Finding]:
    return [each for each in examine(app.database) if each.check == "limits"]


def said_of_limits(app: sqlq.App) -> str:
    return "\n".join(each.said for each in of_limits(app))


def make_late(app: sqlq.App) -> None:
    with app.database.begin() as conn:
        earlier = f"due_at - {span(conn, 3_600)}"
        conn.execute(text(f"UPDATE jobs SET due_at = {earlier} WHERE blocked_by = 'limit'"))


def test_the_doctor_names_the_reason_for_a_stalled_waiting_list(
    app: sqlq.App, call: sqlq.Task[..., None]
) -> None:
    app.enqueue(call.new().set(queue="nowhere"))
    with app.database.begin() as conn:
        workers.register(conn, id="one", host="here", pid=1, version="0", queues=["default"], concurrency=1)
    make_late(app)
    admit.look(app.database)
    assert "no worker serves its queue" in said_of_limits(app)
    app.queues.pause("nowhere")
    assert "its queue is paused" in said_of_limits(app)


def test_the_doctor_names_the_failed_job_that_holds_a_key(app: sqlq.App) -> None:
    def fail() -> None:
        raise ValueError("no")

    book = app.task(name="book", max_attempts=1, limit=sqlq.Serial("account", on_failure="hold"))(fail)
    first, _ = app.enqueue_many([book.new(), book.new()])
    app.worker(drain=True).run()
    make_late(app)
    assert f"it waits for job {first.id}, book, which is failed" in said_of_limits(app)
