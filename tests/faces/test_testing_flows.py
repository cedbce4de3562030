"""Flows in inline and eager mode: in order, at once, with nothing written."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.testing import inline
from tests.kit.flows import Shop


@pytest.fixture
def shop(app: sqlq.App) -> Shop:
    return Shop(app)


def test_a_flow_runs_inline_in_order(shop: Shop) -> None:
    with inline(shop.app) as ran:
        shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note, shop.note.map([2, 3]), shop.total))
    assert shop.called == [1, 1, 2, 3, [2, 3]]
    assert {job.state for job in ran.jobs} == {"finished"}
    assert shop.app.jobs.list() == []


def test_steps_after_a_failed_step_stay_blocked(shop: Shop) -> None:
    shop.broken.add("pay")
    flow = sqlq.Flow()
    paid = flow.add(shop.note.new("pay"))
    paid.then(shop.note.new("ship"))
    paid.catch(shop.note.new("alarm")).catch(shop.note.new("never"))
    flow.add(shop.note.new("pack"))
    with inline(shop.app) as ran, pytest.raises(ValueError, match="pay is broken"):
        shop.app.enqueue(flow)
    assert shop.called == ["pay", "alarm", "pack"]
    assert [str(job.state) for job in ran.jobs] == ["failed", "blocked", "finished", "cancelled", "finished"]


def test_a_step_that_takes_a_result_that_is_not_there_fails_alone(shop: Shop) -> None:
    lost = shop.app.task(name="lost")(lambda: {1})
    flow = sqlq.Flow()
    taking: Any = flow.add(shop.note.new(flow.add(lost.new()).result))
    taking.catch(shop.note.new("alarm"))
    flow.add(shop.note.new("pack"))
    refusal = "note takes a result that is not there: its result is not JSON"
    with inline(shop.app) as ran, pytest.raises(sqlq.NoResultError, match=refusal):
        shop.app.enqueue(flow)
    assert shop.called == ["alarm", "pack"]
    assert [str(job.state) for job in ran.jobs] == ["finished", "failed", "finished", "finished"]
    with pytest.raises(sqlq.NoResultError, match=refusal):
        shop.app.enqueue(flow, eager=True)
    assert shop.called == ["alarm", "pack"] * 2


def test_a_flow_runs_when_its_transaction_commits(shop: Shop, engine: Engine) -> None:
    with inline(shop.app, at="commit"):
        with Session(engine) as session:
            shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note), session=session)
            session.rollback()
        with Session(engine) as session, session.begin():
            done = shop.app.enqueue(sqlq.chain(shop.note.new(2), shop.note), session=session)
            assert shop.called == []
    assert [job.state for job in done.jobs] == ["available", "blocked"]
    assert shop.called == [2, 2]


def test_a_flow_grows_inline(shop: Shop, engine: Engine) -> None:
    @shop.app.task(name="split")
    def split(n: int) -> None:
        job = sqlq.current_job()
        assert job.results == [n]
        with job.completing(engine):
            job.flow.add(shop.note.map(range(n)).then(shop.total))

    with inline(shop.app):
        shop.app.enqueue(sqlq.chain(shop.note.new(3), split))
    assert shop.called == [3, 0, 1, 2, [0, 1, 2]]


def test_steps_that_are_added_without_completing_are_no_growth(shop: Shop) -> None:
    @shop.app.task(name="split")
    def split() -> None:
        sqlq.current_job().flow.add(shop.note.new(1))

    with inline(shop.app), pytest.raises(sqlq.SqlqError, match="the job was not completed in a transaction"):
        shop.app.enqueue(sqlq.chain(split.new()))


async def _aenqueue(app: sqlq.App, flow: Any) -> None:
    await app.aenqueue(flow)


def test_a_flow_is_awaited(shop: Shop) -> None:
    import asyncio

    @shop.app.task(name="slow")
    async def slow(n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    with inline(shop.app):
        asyncio.run(_aenqueue(shop.app, sqlq.chain(slow.new(1), slow, shop.note)))
    assert shop.called == [3]


def test_an_eager_flow_runs_at_once(shop: Shop) -> None:
    shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note), eager=True)
    assert shop.called == [1, 1]
    assert shop.app.jobs.list() == []


def test_a_flow_is_enqueued_by_asynchronous_code(shop: Shop) -> None:
    import asyncio

    asyncio.run(_aenqueue(shop.app, sqlq.chain(shop.note.new(1), shop.note)))
    assert shop.work() == [1, 1]
