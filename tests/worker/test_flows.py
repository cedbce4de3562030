"""Flows as workers run them: each step after what it waits for, whole or not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.store.blockers import FlowBlocker
from sqlq.store.flows import unblock
from sqlq.store.limits.admit import FreedJobs
from sqlq.testing import inline
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.maintain.services import Unblock
from tests.kit import count, execute, for_each, wait_until
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


@pytest.mark.each_database
def test_steps_go_on_behind_an_optional_one_that_fails(shop: Shop) -> None:
    shop.broken = {"translate"}

    @shop.app.task(name="send")
    def send(text: str, translated: str | None) -> str:
        shop.called.append((text, translated))
        return text

    flow = sqlq.Flow()
    text = flow.add(shop.note.new("text"))
    translated = flow.add(shop.note.new("translate"), after=[text], optional=True)
    sent = flow.add(send.new(text.result, translated.result))
    flow.add(shop.note.new("alarm"), after=[translated], when="failure")
    done = shop.app.enqueue(flow)
    assert sorted(map(str, shop.work())) == ["('text', None)", "alarm", "text", "translate"]
    assert shop.app.result(done.job(sent)) == "text"
    assert shop.app.result(done) == "text"
    assert shop.app.result(shop.app.flows.get(done.id)) == ["text", "alarm"]
    assert shop.app.flows.get(done.id).steps[2].after[done.job(translated).id] == "either"


@pytest.mark.each_database
@for_each("work", ["works", "is cancelled"])
def test_steps_behind_an_optional_one_wait_as_for_others(shop: Shop, work: str) -> None:
    flow = sqlq.Flow()
    first = flow.add(shop.note.new("first"))
    may_fail = flow.add(shop.note.new("may fail"), after=[first], optional=True)
    flow.add(shop.note.new("last"), after=[may_fail])
    done = shop.app.enqueue(flow)
    if work == "is cancelled":
        shop.app.jobs.cancel([done.job(first).id])
    expected = [] if work == "is cancelled" else ["first", "may fail", "last"]
    assert shop.work() == expected
    assert {str(job.state) for job in map(shop.app.jobs.get, done.jobs)} == {
        "finished" if expected else "cancelled"
    }


@pytest.mark.each_database
@for_each("value", [0, 1])
def test_a_falsy_result_skips_a_step_and_those_behind_it_alone(shop: Shop, value: int) -> None:
    @shop.app.task(name=f"join {value}")
    def join(a: str | None, b: str) -> list[str | None]:
        return [a, b]

    flow = sqlq.Flow()
    risk = flow.add(shop.note.new(value))
    checked = flow.add(shop.note.new("check"), only_if=risk.result)
    asked = flow.add(shop.note.new("ask"), after=[checked])
    both = flow.add(shop.note.new("both"), after=[checked, asked])
    other = flow.add(shop.note.new("other"))
    joined = flow.add(join.new(asked.result, other.result))
    cleaned = flow.add(shop.note.new("clean"), after=[asked], when="ended")
    failed = flow.add(shop.note.new("failed"), after={checked: "failure", other: "success"})
    done = shop.app.enqueue(flow)
    shop.work()
    jobs = {step: shop.app.jobs.get(done.job(step).id) for step in flow.steps}
    skipped = [step for step in jobs if jobs[step].reason == "not_needed"]
    assert skipped == ([] if value else [checked, asked, both])
    assert {str(jobs[step].state) for step in (risk, other, joined, cleaned)} == {"finished"}
    assert (jobs[failed].state, jobs[failed].reason) == ("cancelled", unblock.REASON)
    assert jobs[joined].result == ["ask" if value else None, "other"]
    assert shop.app.result(done) == ["both" if value else None, jobs[joined].result, "clean"]


def test_inline_skips_steps_and_passes_over_failed_ones_as_workers_do(shop: Shop) -> None:
    shop.broken = {"may fail"}
    flow = sqlq.Flow()
    no = flow.add(shop.note.new(0))
    may_fail = flow.add(shop.note.new("may fail"), optional=True)
    skipped = flow.add(shop.note.new("skipped"), only_if=no.result)
    flow.add(shop.note.new("behind"), after=[skipped])
    flow.add(shop.note.new("both"), after=[skipped, may_fail])
    flow.add(shop.note.new(skipped.result), after=[may_fail])
    with inline(shop.app) as kit, pytest.raises(ValueError, match="may fail is broken"):
        shop.app.enqueue(flow)
    states = [(str(job.state), job.reason) for job in kit.jobs]
    skip, ended = ("cancelled", "not_needed"), ("finished", None)
    assert states == [ended, ("failed", None), skip, skip, ended, ended]
    assert shop.called == [0, "may fail", "both", None]


@pytest.mark.each_database
def test_a_verdict_that_another_process_overtook_cancels_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlowBlocker, "free", lambda *_: FreedJobs())
    monkeypatch.setattr(FlowBlocker, "sweep", lambda *_: None)
    flow = sqlq.Flow()
    last = flow.add(shop.note.new("last"), after=[flow.add(shop.note.new("first"), optional=True)])
    done = shop.app.enqueue(flow)
    assert shop.work() == ["first"]
    id = done.job(last).id
    with shop.app.database.begin() as conn:
        judged = unblock._judge_on(conn, [id], are_ended=False)
        assert unblock._follow_up(conn, judged) == ([], [id])
        assert unblock._follow_up(conn, judged) == ([], [])
    assert unblock.after(shop.app.database, [done.jobs[0].id]).free == 1
