"""`sqlq limit`: what limits allow, and an operator's word about it."""

from __future__ import annotations

from contextlib import closing

import pytest

import sqlq
from sqlq.store.limits import admit
from tests.kit.command import Command


@pytest.fixture
def call(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="call", limit=sqlq.Limit("stripe", running=2))
    def call(n: int = 0) -> None: ...

    return call


def allowed(app: sqlq.App) -> list[str]:
    return [f"{each.key}: {each.says}" for each in app.limits.list()]


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
    keyed = app.task(name="keyed", limit=sqlq.Limit("key:{n}", running=1))(lambda n: None)
    app.enqueue_many([keyed.new(n % 2) for n in range(3)])
    lines = sqlq_.ok("limits").splitlines()
    assert [line.split()[0] for line in lines] == ["key", "key:0", "key:1"]
    (line,) = sqlq_("limits", "--prefix", "key:1", "--json").json()
    assert (line["waiting"], line["running"], line["is_known"]) == (1, 0, False)
    admit.look(app.database)
    (line,) = sqlq_("limits", "--prefix", "key:1", "--json").json()
    assert (line["max_running"], line["is_known"]) == (1, True)


def one_number(n: int) -> None: ...
