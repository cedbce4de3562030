"""Flows as workers run them: each step after what it waits for, whole or not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.store.flows import unblock
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.maintain.services import Unblock
from tests.kit import count, execute, wait_until
from tests.kit.flows import Shop


@pytest.fixture
def shop(app: sqlq.App) -> Shop:
    return Shop(app)


def test_a_step_runs_after_its_parents(shop: Shop) -> None:
    flow = sqlq.Flow("order 7")
    first = flow.add(shop.note.new("pay"))
    second = flow.add(shop.note.new("pack"), after=[first])
    flow.add(shop.note.new("ship"), after=[first, second])
    done = shop.app.enqueue(flow)
    assert [job.state for job in done.jobs] == ["available", "blocked", "blocked"]
    assert shop.app.jobs.get(done.job(second).id).blocked_by == "flow"
    assert shop.app.jobs.get(done.job(second).id).available_at is None
    assert shop.work() == ["pay", "pack", "ship"]
    assert set(shop.states().values()) == {"finished"}


def test_chains_and_groups_nest(shop: Shop) -> None:
    """An empty group finishes at once."""
    shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note.map([]), shop.total))
    assert shop.work() == [1, []]
    inner = sqlq.chain(shop.note.new(1), sqlq.group(shop.note.new(2), shop.note.new(3)), shop.total)
    flow = sqlq.group(inner, shop.note.new(10), sqlq.group(), shop.note.map([30, 20])).then(shop.total)
    shop.app.enqueue(flow)
    called = shop.work(concurrency=2)
    assert called.index([2, 3]) > max(called.index(2), called.index(3)) > called.index(1)
    assert called[-1] == [5, 10, 30, 20]


def test_a_draining_worker_awaits_jobs_that_a_service_unblocks(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(name="step")(lambda: None)
    begun, claimed, again = threading.Event(), threading.Event(), threading.Event()
    claim = Claimer.claim

    def frees(service: Unblock) -> float:
        if not begun.is_set():
            begun.set()
            assert claimed.wait(30)
            again.wait(0.5)  # a worker that does not wait leaves meanwhile
            app.enqueue(task.new())
        return 60.0

    def claims(claimer: Claimer, limit: int, *, quiet: bool = False) -> list[Any]:
        assert begun.wait(30)
        found = claim(claimer, limit, quiet=quiet)
        if claimed.is_set():
            again.set()
        claimed.set()
        return found

    monkeypatch.setattr(Unblock, "run", frees)
    monkeypatch.setattr(Claimer, "claim", claims)
    assert app.worker(drain=True).run().finished == 1


def test_a_draining_worker_awaits_the_steps_it_unblocks(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that takes longer than a claim that finds nothing."""
    unblock_after, claims, ended = unblock.after, list[object](), threading.Event()

    def slowly(*args: Any) -> unblock.Unblocked:
        claims.clear()
        ended.clear()
        ended.wait(1.0)
        return unblock_after(*args)

    claim = Claimer.claim

    def claim_and_say(*args: Any, **options: Any) -> Any:
        found = claim(*args, **options)
        claims.append(found)
        if claims[-2:] == [[], []]:  # a drain ends after the second one
            ended.set()
        return found

    monkeypatch.setattr(unblock, "after", slowly)
    monkeypatch.setattr(Claimer, "claim", claim_and_say)
    shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note, shop.note))
    assert shop.work() == [1, 1, 1]


def test_followers_of_a_failed_step_wait_for_its_retry(shop: Shop) -> None:
    shop.broken.add("pay")
    flow = sqlq.Flow()
    paid = flow.add(shop.note.new("pay"))
    flow.add(shop.note.new("ship"), after=[paid])
    paid.catch(shop.note.new("alarm"))
    paid.then(shop.note.new("thank"))
    flow.add(shop.note.new("file"), after=[paid], when="ended")
    shop.app.enqueue(flow)
    called = shop.work()
    assert (called[0], sorted(called[1:])) == ("pay", ["alarm", "file"])
    waits, done = dict.fromkeys(("ship", "thank"), "blocked"), dict.fromkeys(("alarm", "file"), "finished")
    assert shop.states() == {"pay": "failed", **waits, **done}
    shop.broken.clear()
    assert len(shop.app.jobs.retry(all=True)) == 1
    called = shop.work()
    assert (called[0], sorted(called[1:])) == ("pay", ["ship", "thank"]), "nothing runs twice"


def test_a_cancelled_or_deleted_step_cancels_steps_that_need_it(shop: Shop) -> None:
    flow = sqlq.Flow()
    paid = flow.add(shop.note.new("pay"))
    paid.then(shop.note.new("ship"))
    paid.catch(shop.note.new("alarm"))
    flow.add(shop.note.new("file"), after=[paid], when="ended")
    done = shop.app.enqueue(flow)
    shop.app.jobs.cancel([done.job(paid).id])
    states = {**dict.fromkeys(("pay", "ship", "alarm"), "cancelled"), "file": "available"}
    assert shop.states() == states
    assert shop.work() == ["file"]
    shop.broken.add("bill")
    done = shop.app.enqueue(sqlq.chain(shop.note.new("bill"), shop.note.new("send")))
    shop.work()
    shop.app.jobs.delete([done.jobs[0].id])
    assert shop.states() == {**states, "file": "finished", "send": "cancelled"}


def test_a_missing_result_fails_the_step_with_one_error(shop: Shop, engine: Engine) -> None:
    first, second = shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note)).jobs
    shop.work(max_jobs=1)
    wait_until(lambda: shop.app.jobs.get(second.id).state == "available", what="the second step being free")
    execute(engine, "DELETE FROM finished_jobs")
    assert shop.work() == []
    failed = shop.app.jobs.get(second.id)
    assert (failed.reason, failed.error) == (
        "bad_payload",
        "sqlq.errors.NoResultError: it takes a result that is not there: there is no finished job "
        f"{first.id}: it failed, or its row was pruned",
    )


def test_a_flow_exists_if_its_transaction_commits(shop: Shop, engine: Engine) -> None:
    with Session(engine) as session:
        shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note), session=session)
        session.rollback()
    assert shop.app.jobs.list() == []
    assert [count(engine, table) for table in ("sqlq_flows", "sqlq_edges")] == [0, 0]
    with Session(engine) as session, session.begin():
        shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note), session=session)
    assert shop.work() == [1, 1]


def test_a_step_adds_steps_in_the_transaction_that_completes_it(shop: Shop, engine: Engine) -> None:
    @shop.app.task(name="split")
    def split(n: int) -> int:
        job = sqlq.current_job()
        with job.completing(engine, result=n) as session:
            session.execute(text("SELECT 1"))
            parts = sqlq.group(*[shop.note.new(i) for i in range(n)])
            job.flow.add(sqlq.chain(parts, shop.total))
            job.flow.add(shop.note.new(job.flow.step.result))
        return n

    done = shop.app.enqueue(sqlq.chain(split.new(3), shop.note))
    called = shop.work()
    assert sorted(map(str, called)) == ["0", "1", "2", "3", "3", "[0, 1, 2]"]
    assert {job.flow_id for job in shop.app.jobs.list()} == {done.id}


def test_added_steps_exist_after_the_commit_that_completes_their_job(shop: Shop, engine: Engine) -> None:
    """Without a completion the attempt fails, and after a rollback there are none."""

    @shop.app.task(name="adds", max_attempts=1)
    def adds() -> None:
        sqlq.current_job().flow.add(shop.note.new(1))

    @shop.app.task(name="split", max_attempts=2, backoff="0s")
    def split() -> None:
        job = sqlq.current_job()
        with job.completing(engine):
            job.flow.add(shop.note.new(job.attempt))
            if job.attempt == 1:
                raise ValueError("no")

    done = shop.app.enqueue(sqlq.chain(adds.new()))
    assert shop.work() == []
    says = "were added to the flow, but the job was not completed"
    assert says in str(shop.app.jobs.get(done.jobs[0].id).error)
    shop.app.enqueue(sqlq.chain(split.new()))
    assert shop.work() == [2]


def test_expiry_of_a_queue_or_app_does_not_count_for_steps(database_url: str) -> None:
    """A step waits for others, for as long as they take."""
    app = sqlq.App(database_url, defaults={"start_within": "1h"}, queues={"mail": {"start_within": "1m"}})
    task = app.task(name="plain")(lambda: None)
    own = app.task(name="own", start_within="5s")(lambda: None)
    assert app.jobs.get(app.enqueue(task.new()).id).start_by is not None
    flow = app.enqueue(sqlq.chain(task.new(), task.new().set(queue="mail")))
    assert [app.jobs.get(job.id).start_by for job in flow.jobs] == [None, None]
    for said in (own.new(), task.new().set(start_within="90s")):
        with pytest.raises(sqlq.EnqueueError, match="has a time by which it has to start"):
            app.enqueue(sqlq.chain(task.new(), said))
    assert app.enqueue(sqlq.chain(own.new().set(start_within=None))).jobs
    app.close()
