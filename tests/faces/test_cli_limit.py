"""`sqlq limit`: what limits allow, and an operator's word about it."""

from __future__ import annotations

from contextlib import closing

import sqlq
from sqlq.store.limits import admit


def allowed(app: sqlq.App) -> list[str]:
    return [f"{each.key}: {each.says}" for each in app.limits.list()]


def test_an_operators_limit_counts_until_it_is_cleared(app: sqlq.App) -> None:
    call = app.task(name="call", limit=sqlq.Limit("stripe", running=2))(lambda n=0: None)
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


def test_a_key_that_is_set_before_its_first_job_keeps_the_order(app: sqlq.App) -> None:
    app.limits.set("account", running=2, rate="5/1s")

    book = app.task(name="book", limit=sqlq.Serial("account", on_failure="hold"))(lambda: None)
    app.enqueue_many([book.new() for _ in range(3)])
    assert admit.look(app.database).number == 1
    (found,) = app.limits.list(limit=10)
    assert found.says == "in order, held by failures"
