"""Unblocking by committed facts: each step once, whoever dies in between, and nobody waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.database.database import Database
from sqlq.database.schemas import in_schema
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Finished, Outcome
from sqlq.store.blockers import RECENT_MS, FlowBlocker
from sqlq.store.flows import unblock
from sqlq.store.jobs import operate
from sqlq.store.jobs import settle as settling
from sqlq.worker.maintain.services import Unblock
from tests.kit import BOOM, Hand, count, execute, locked, needs, received, span

pytestmark = pytest.mark.each_database


class Seam(Hand):
    """A worker's hand, and flows."""

    @property
    def claims(self) -> Database:
        return self.app.database.for_claims

    def flow(self, width: int, when: sqlq.model.flow.When = "success") -> tuple[list[int], int]:
        """Enqueue so many steps and one that waits for all; return their ids."""
        flow, step = sqlq.Flow(), self.tasks["send"]
        first = [flow.add(step.new(i)) for i in range(width)]
        flow.add(step.new(), after=first, when=when)
        done = self.app.enqueue(flow)
        return [job.id for job in done.jobs[:-1]], done.jobs[-1].id

    def end(self, outcome: Outcome | None = None) -> list[int]:
        return super().end(outcome or Finished())

    def state(self, id: int) -> str:
        return self.states([id])[0]


@pytest.fixture
def seam(app: sqlq.App) -> Seam:
    return Seam(app)


def make_old(engine: Engine) -> None:
    """Let what has ended have ended long ago."""
    for table, ended in (("finished_jobs", "finished_at"), ("failed_jobs", "failed_at")):
        execute(engine, f"UPDATE {table} SET {ended} = {ended} - {span(engine, 86_400)}")


def test_a_step_is_unblocked_after_its_last_parent(seam: Seam) -> None:
    parents, step = seam.flow(3)
    held = seam.claim()
    for job in held[:-1]:
        assert seam.settle(job, Finished())
        assert unblock.after(seam.claims, [job.id]) == unblock.Unblocked()
    assert seam.settle(held[-1:], Finished())
    assert seam.state(step) == "blocked", "a settle writes nothing of it"
    assert unblock.after(seam.claims, parents).free == 1
    assert seam.state(step) == "available"
    assert unblock.after(seam.claims, parents) == unblock.Unblocked(), "once"
    flow = sqlq.Flow()
    flow.add(seam.tasks["send"].new()).then(seam.tasks["send"].new().set(delay="1h"))
    first, second = seam.app.enqueue(flow).jobs
    seam.end()
    unblock.after(seam.claims, [first.id])
    details: Any = seam.app.jobs.get(second.id)
    assert details.state == "scheduled"
    assert 3500 < (details.available_at - details.created_at).total_seconds() <= 3601


def test_an_edge_unblocks_by_its_condition(seam: Seam) -> None:
    """The first state is that after a success, the second that after a failure."""
    states: dict[Any, tuple[str, str]] = {"success": ("available", "blocked")}
    states |= {"failure": ("cancelled", "available"), "ended": ("available", "available")}
    for when, (finished, failed) in states.items():
        outcomes: list[tuple[Outcome, str]] = [(Finished(), finished), (BOOM, failed)]
        for outcome, state in outcomes:
            parents, step = seam.flow(2, when)
            seam.end(outcome)
            unblock.after(seam.claims, parents)
            assert seam.state(step) == state, (when, outcome)
            seam.app.jobs.cancel([step])


def test_a_missing_parent_does_not_count_as_success(seam: Seam, engine: Engine) -> None:
    (parent,), step = seam.flow(1)
    (other,), ended = seam.flow(1, "ended")
    seam.end()
    execute(engine, "DELETE FROM finished_jobs")
    unblock.after(seam.claims, [parent, other])
    assert (seam.state(step), seam.state(ended)) == ("cancelled", "available")


def test_one_of_many_concurrent_settles_unblocks_the_step(seam: Seam) -> None:
    """Each looks after its own settle's commit, so the last sees all; the step's row lets one through."""
    width, rounds = 4, 12
    with ThreadPoolExecutor(width) as pool:
        for _ in range(rounds):
            _, step = seam.flow(width)
            held = seam.claim()
            together = threading.Barrier(width)

            def end(job: ClaimedJob, together: threading.Barrier = together) -> int:
                together.wait()
                assert seam.settle(job, Finished())
                return unblock.after(seam.claims, [job.id]).free

            assert sum(pool.map(end, held)) == 1
            assert seam.state(step) == "available"
            seam.end()


def test_many_steps_are_unblocked_or_cancelled(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unblock, "STEPS_AT_ONCE", 10)
    flow, step = sqlq.Flow(), seam.tasks["send"]
    done = seam.app.enqueue(sqlq.chain(step.new(), step.map(range(35)), step.new()))
    seam.end()
    assert unblock.after(seam.claims, [done.jobs[0].id]).free == 35
    assert unblock.after(seam.claims, seam.end()).free == 1
    monkeypatch.setattr(unblock, "STEPS_AT_ONCE", 3)
    first = flow.add(step.new())
    wide = flow.add(step.map(range(10)), after=[first], when="failure")
    flow.add(step.new(), after=[wide])
    done = seam.app.enqueue(flow)
    seam.end()
    assert len(unblock.after(seam.claims, [done.jobs[0].id]).cancelled) == 11
    assert {seam.state(job.id) for job in done.jobs[1:]} == {"cancelled"}


@needs("sessions")
def test_a_locked_or_completing_step_blocks_no_settle(seam: Seam, engine: Engine) -> None:
    parents, step = seam.flow(1)
    seam.end()
    with locked(engine, step):
        assert unblock.after(seam.claims, parents) == unblock.Unblocked()
    assert unblock.sweep_recent(seam.claims, RECENT_MS).free == 1
    seam.end()
    _, step = seam.flow(2)
    completing, other = seam.claim()
    with engine.connect() as conn, in_schema(conn, "public"):
        right = (completing.id, completing.lease_token)
        assert settling.complete(conn, right, Finished())
        assert seam.settle(other, Finished())
        assert unblock.after(seam.claims, [other.id]) == unblock.Unblocked()
        conn.commit()
    assert unblock.after(seam.claims, [completing.id]).free == 1
    assert seam.state(step) == "available"


def test_a_full_sweep_unblocks_old_steps_in_batches(seam: Seam, engine: Engine) -> None:
    steps = [seam.flow(2)[1] for _ in range(5)]
    seam.end()
    make_old(engine)
    assert unblock.sweep_recent(seam.claims, RECENT_MS) == unblock.Unblocked()
    place: Any = (0, 0)
    for turn in (1, 2, 3):
        _, place = unblock.sweep_all(seam.claims, place, 2)
        assert (place is None) is (turn == 3)
    assert {seam.state(step) for step in steps} == {"available"}


def test_the_unblock_service_sweeps_between_full_sweeps(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[None] = []
    service = Unblock(seam.app.database, FlowBlocker(), freed=lambda: freed.append(None))
    with received(seam.app.database.engine) as asked:
        assert service.run() > 40
    assert len([statement for statement, _ in asked if statement != "BEGIN"]) <= 1
    _, step = seam.flow(1)
    seam.end()
    assert service.run() < 10
    assert (seam.state(step), freed) == ("available", [None])
    monkeypatch.setattr(unblock, "sweep_all", lambda *_: (unblock.Unblocked(), None))
    _, step = seam.flow(1)
    seam.end()
    Unblock(seam.app.database, FlowBlocker()).run()
    assert seam.state(step) == "available"


def prune(seam: Seam) -> int:
    return seam.app.database.run(lambda conn: operate.prune(conn, older_than_ms=1_000, limit=100))


def test_prune_keeps_the_parents_of_a_live_step(seam: Seam, engine: Engine) -> None:
    parents, step = seam.flow(2)
    seam.end()
    seam.ended(outcome=Finished())
    make_old(engine)
    assert prune(seam) == 1, "jobs of no flow go as ever"
    unblock.after(seam.claims, parents)
    assert prune(seam) == 0, "the step may still take their results"
    assert seam.app.jobs.delete(parents) == []
    seam.end(BOOM)
    make_old(engine)
    assert prune(seam) == 0, "it may be retried"
    assert seam.app.jobs.retry([step]) == [step]
    seam.end()
    make_old(engine)
    assert count(engine, "sqlq_edges") == 2
    assert prune(seam) == 3
    assert [count(engine, table) for table in ("finished_jobs", "sqlq_edges", "sqlq_flows")] == [0, 0, 0]
    parents, _ = seam.flow(1, "ended")
    seam.end(BOOM)
    unblock.after(seam.claims, parents)
    seam.end()
    make_old(engine)
    assert prune(seam) == 1
    assert (count(engine, "sqlq_flows"), count(engine, "sqlq_edges")) == (1, 0)
    seam.app.jobs.delete(parents)
    assert count(engine, "sqlq_flows") == 0
