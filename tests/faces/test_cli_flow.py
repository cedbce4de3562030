"""`sqlq flows`, and the details of `app.flows.get`."""

from __future__ import annotations

import pytest
from sqlalchemy import text

import sqlq
from sqlq.admin.doctor.doctor import examine
from sqlq.admin.flows import SKIPPED
from sqlq.errors import JobNotFoundError
from tests.kit import span
from tests.kit.flows import Shop


@pytest.fixture
def shop(app: sqlq.App) -> Shop:
    return Shop(app)


def order(shop: Shop) -> tuple[sqlq.EnqueuedFlow, list[int]]:
    """Enqueue an order whose payment is broken, and run what can run."""
    shop.broken.add("pay")
    flow = sqlq.Flow("order 7")
    paid, packed = flow.add(shop.note.new("pay")), flow.add(shop.note.new("pack").set(label="two boxes"))
    flow.add(shop.note.new("ship"), after=[paid, packed])
    flow.add(shop.note.new("alarm"), after=[paid], when="failure")
    done = shop.app.enqueue(flow)
    shop.work()
    return done, [job.id for job in done.jobs]


def test_flows_get_returns_states_results_and_edges(shop: Shop) -> None:
    done, (pay, pack, ship, alarm) = order(shop)
    found = shop.app.flows.get(done.id)
    assert (found.name, found.state) == ("order 7", "failed")
    assert found.counts == {"failed": 1, "finished": 2, "blocked": 1}
    assert found.progress == sqlq.Progress(2, 4)
    assert found.results == {pack: "pack", alarm: "alarm"}
    assert {step.id: dict(step.after) for step in found.steps} == {
        pay: {},
        pack: {},
        ship: {pay: "success", pack: "success"},
        alarm: {pay: "failure"},
    }
    assert found.step(pay).error == "ValueError: pay is broken"
    with pytest.raises(JobNotFoundError, match="there is no flow 77"):
        shop.app.flows.get(77)


def test_a_flow_is_retried(shop: Shop) -> None:
    done, (pay, *_) = order(shop)
    shop.broken.clear()
    assert shop.app.flows.retry(done.id) == [pay]
    assert shop.work() == ["pay", "ship"]
    assert shop.app.flows.get(done.id).state == "finished"
    assert shop.app.flows.retry(done.id) == []


def test_a_failed_step_is_skipped_and_has_no_result(shop: Shop) -> None:
    done, (pay, _, ship, _) = order(shop)
    found = shop.app.flows.skip(pay)
    assert (found.id, found.state) == (done.id, "running")
    assert shop.work() == ["ship"]
    assert shop.app.jobs.get(pay).reason == SKIPPED
    assert shop.app.jobs.get(ship).state == "finished"
    with pytest.raises(sqlq.NoResultError, match="has finished, but it was skipped by an operator"):
        shop.app.result(pay)


def test_a_step_that_needs_a_skipped_result_fails_with_the_reason(shop: Shop) -> None:
    shop.broken.add("pay")
    done = shop.app.enqueue(sqlq.chain(shop.note.new("pay"), shop.note))
    shop.work()
    shop.app.flows.skip(done.jobs[0].id)
    assert shop.work() == []
    assert str(shop.app.jobs.get(done.jobs[1].id).error).endswith(
        f"a result that is not there: of job {done.jobs[0].id} (note): {SKIPPED}"
    )


def test_a_step_that_waits_is_skipped(shop: Shop) -> None:
    done = shop.app.enqueue(sqlq.group(shop.note.new(1)).then(shop.note.new(2)))
    first, second = done.jobs
    shop.app.flows.skip(second.id)
    shop.app.flows.skip(first.id)
    assert shop.work() == []
    assert shop.app.flows.get(done.id).counts == {"finished": 2}


def test_skip_refuses_jobs_without_a_flow_and_finished_steps(shop: Shop) -> None:
    job = shop.app.enqueue(shop.note.new(1))
    with pytest.raises(JobNotFoundError, match="is a step of no flow"):
        shop.app.flows.skip(job.id)
    done = shop.app.enqueue(sqlq.chain(shop.note.new(1)))
    shop.work()
    with pytest.raises(JobNotFoundError, match="is finished: only a step that waits or has failed"):
        shop.app.flows.skip(done.jobs[0].id)


def test_a_flow_is_cancelled(shop: Shop) -> None:
    done, (pay, _, ship, _) = order(shop)
    assert shop.app.flows.cancel(done.id) == {ship: "cancelled"}
    assert shop.app.jobs.get(pay).state == "failed"
    assert shop.app.flows.cancel(done.id) == {}


# -- the command line ----------------------------------------------------------------------------------------


def test_the_doctor_names_a_flow_behind_a_failed_step(app: sqlq.App) -> None:
    def fail() -> None:
        raise ValueError("no")

    task = app.task(name="step", max_attempts=1)(fail)
    flow = sqlq.Flow("order 7")
    first = flow.add(task.new())
    for _ in range(2):
        flow.add(task.new(), after=[first])
    done = app.enqueue(flow)
    alone = app.enqueue(sqlq.chain(task.new()))
    app.worker(drain=True).run()

    def said() -> str:
        return "\n".join(each.said for each in examine(app.database) if each.check == "flows")

    assert said() == "no flow is blocked by a failed step"
    with app.database.begin() as conn:
        conn.execute(text(f"UPDATE failed_jobs SET failed_at = failed_at - {span(conn, 3_600)}"))
    assert f"flow {done.id} (order 7) is blocked: its step {done.jobs[0].id} (step) failed" in said()
    assert "2 steps wait for it" in said()
    assert f"flow {alone.id}" not in said(), "nothing waits there"
