"""The errors of a flow where it is written, and its jobs and edges."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import ArgumentsError, EnqueueError
from sqlq.model import flow as flows
from sqlq.model.flow import Edge
from tests.kit import for_each

app = sqlq.App("sqlite:///flows.db")


@app.task(name="count")
def count(n: int) -> int:
    return n


@app.task(name="say")
def say(text: str) -> None: ...


@app.task(name="total")
def total(numbers: list[int], *, by: str = "") -> int:
    return sum(numbers)


@app.task(name="nothing")
def nothing() -> None: ...


untyped: Any = {"count": count, "say": say, "total": total}
"""The same tasks without types, for mistakes that type checkers would refuse, too."""


COUNT, SAY = count.new(1), say.new("a")


def taking(step: Any) -> Any:
    """A job that takes a step's result."""
    return count.new(step.result)


def grown() -> sqlq.Flow:
    """The flow of a running job."""
    return flows.Growth(7, COUNT)


REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda f, s: f.add(count), "flow.add takes a job, a chain or a group, not the Task"),
    (lambda f, s: f.add(sqlq.Flow("b")), "not the flow 'b': write flow.add"),
    (lambda f, s: f.add(COUNT, only_if=s), "only_if is the Step .*: it is the result of a step before"),
    (
        lambda f, s: f.add(sqlq.chain(COUNT), optional=True),
        "optional and only_if are of one job, not of the C",
    ),
    (lambda f, s: f.add(sqlq.chain(COUNT), only_if=s.result), "optional and only_if are of one job"),
    (lambda f, s: f.add(COUNT, after=7), "after is the int 7: it is a list of steps"),
    (lambda f, s: f.add(COUNT, after=[7]), "after holds the int 7: it lists steps"),
    (lambda f, s: f.add(COUNT, after=[sqlq.Flow().add(COUNT)]), "is a step of another flow"),
    (lambda f, s: f.add(taking(sqlq.Flow().add(COUNT))), "is a step of another flow"),
    (lambda f, s: f.add(COUNT, after=[s], when="sucess"), "when is 'sucess': it is \"success\""),
    (lambda f, s: f.add(COUNT, after={s: "never"}), "when is 'never'"),
    (lambda f, s: f.add(COUNT, when="never"), "when is 'never'"),
    (lambda f, s: f.add(COUNT, when="failure"), 'when is "failure", and after names no steps'),
    (lambda f, s: f.add(COUNT, after=[], when="ended"), 'when is "ended", and after names no steps'),
    (lambda f, s: f.add(taking(s), when="failure"), 'when is "failure", and after names no steps'),
    (lambda f, s: f.add(count.map([1]), when="failure"), 'when is "failure", and after names no steps'),
    (lambda f, s: f.add(SAY, after=f.add(sqlq.group()), when="failure"), "and after names no steps"),
    (lambda f, s: f.add(SAY, after={s: "ended"}, when="failure"), "and after names no steps of which"),
    (lambda f, s: grown().add(SAY, when="failure"), 'when is "failure", and after names no steps'),
    (lambda f, s: f.add(COUNT.set(unique_key="k")), "has the unique key 'k': a step of a flow cannot"),
    (lambda f, s: f.add(taking(s), after=[s], when="failure"), 'for it with when="failure": only a step'),
    (lambda f, s: f.add(taking(s), after=[s], when="ended"), 'waits for it with when="ended": only a step'),
    (lambda f, s: f.add(total.new(sqlq.group(COUNT).results)), "a group that does not come before it"),
    (lambda f, s: sqlq.chain(COUNT, 7), "the int 7 is no part of a chain or group"),
    (lambda f, s: sqlq.group([COUNT]), "the list .* is no part of a chain or group"),
    (lambda f, s: sqlq.Flow(""), "the flow's name is ''"),
    (lambda f, s: flows.plan_of(sqlq.Flow("b")), "the flow 'b' has no steps"),
    (lambda f, s: app.enqueue(taking(s)), "argument of count is the result of step 1 .count., and the job"),
    (lambda f, s: app.enqueue(sqlq.group()), "a flow has no steps"),
]


@for_each(("wrong", "says"), REFUSED)
def test_an_impossible_flow_is_refused_in_a_sentence(wrong: Callable[[Any, Any], Any], says: str) -> None:
    flow = sqlq.Flow("a")
    with pytest.raises(EnqueueError, match=says):
        wrong(flow, flow.add(count.new(1)))


CHAINED = r"a task gets the result of the part before it, .* write nothing\.new\(…\) where"


@for_each(
    ("wrong", "says"),
    [
        (lambda s: untyped["total"].new([1], by={"a": s.result}), "which is not JSON"),
        (lambda s: total.new([1, s.result]), "which is not JSON"),
        (lambda s: untyped["count"].new(s.result, 2), "too many positional arguments"),
        (lambda s: sqlq.Flow().add(sqlq.chain(COUNT, nothing)), f"too many positional arguments; {CHAINED}"),
    ],
)
def test_a_result_in_a_wrong_place_is_refused(wrong: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(ArgumentsError, match=says):
        wrong(sqlq.Flow().add(COUNT))


@for_each("text", [lambda result: f"{result:>9}", str, "of %s".__mod__])
def test_a_result_is_no_part_of_a_text(text: Callable[[Any], str]) -> None:
    """The stored text would not have the value."""
    step: Any = sqlq.Flow().add(count.new(1))
    with pytest.raises(EnqueueError, match=r"the result of step 1 \(count\) is not known yet"):
        say.new(text(step.result))


def test_a_flow_is_written_as_jobs_and_edges() -> None:
    flow = sqlq.Flow("a")
    one, two = flow.add(count.new(1)), flow.add(count.new(2))
    three = flow.add(total.new([two.result, one.result]), after={two: "success"})
    flow.add(say.new("x"), after=[three, one], when="failure")
    plan = flows.plan_of(flow)
    assert plan.edges == [
        *(Edge(2, 1, "success", 0), Edge(2, 0, "success", 1)),
        *(Edge(3, 2, "failure", 0), Edge(3, 0, "failure", 1)),
    ]
    assert json.loads(plan.jobs[2].payload) == {"args": [None], "results": [[0, [0, 1]]]}
    other = sqlq.Flow()
    one = other.add(count.new(1))
    other.add(say.new("a"), after={one: "ended"})
    other.add(say.new("a"), after=[])
    one.catch(say.new("a"))
    assert [edge.when for edge in flows.plan_of(other).edges] == ["ended", "failure"]


def test_a_flow_is_enqueued_once_and_takes_no_steps_after_that(app_here: sqlq.App) -> None:
    def laid() -> tuple[sqlq.Flow, sqlq.Step[Any]]:
        flow = sqlq.Flow("a")
        return flow, flow.add(count.new(1))

    engine = app_here.database.engine
    ways: list[Callable[[sqlq.Flow], Any]] = [
        app_here.enqueue,
        lambda flow: asyncio.run(app_here.aenqueue(flow)),
        lambda flow: app_here.enqueue(flow, eager=True),
        lambda flow: _rolled_back(app_here, flow),
    ]
    for enqueue in ways:
        flow, step = laid()
        with pytest.raises(EnqueueError):
            app_here.enqueue(flow, session=engine)  # type: ignore[arg-type]
        enqueue(flow)
        for late in (step.then, step.catch, flow.add):
            with pytest.raises(EnqueueError, match="say is added to the flow 'a', which takes no more steps"):
                late(say.new("a"))
        for again in (flow, copy.copy(flow), copy.deepcopy(flow)):
            with pytest.raises(EnqueueError, match="which takes no more steps"):
                again.add(sqlq.chain(say.new("a")))
            for way in ways:
                with pytest.raises(EnqueueError, match="the flow 'a' is enqueued already, and a second time"):
                    way(again)
        assert len(flow.steps) == 1
    assert len(app_here.flows.list()) == 2
    nightly = sqlq.chain(count.new(1), count)  # no flow yet
    assert app_here.enqueue(nightly).id != app_here.enqueue(nightly).id


def _rolled_back(app: sqlq.App, flow: sqlq.Flow) -> None:
    with Session(app.database.engine) as session:
        app.enqueue(flow, session=session)
        session.rollback()


@pytest.fixture
def app_here(tmp_path: Path) -> Iterator[sqlq.App]:
    """An App with a database."""
    here = sqlq.App(f"sqlite:///{tmp_path}/flows.db")
    here.migrate()
    for task in (count, say):
        here.task(name=task.name)(task.handler)
    yield here
    here.close()


def test_a_flow_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "STEPS_LIMIT", 3)
    with pytest.raises(EnqueueError, match="has 3 steps, which is the most"):
        sqlq.Flow().add(count.map(range(4)))
    monkeypatch.setattr(flows, "STEPS_LIMIT", 100)
    monkeypatch.setattr(flows, "EDGES_LIMIT", 10)
    with pytest.raises(EnqueueError, match="between two wide groups put one step"):
        sqlq.Flow().add(sqlq.chain(count.map(range(4)), sqlq.group(*[say.new("a")] * 4)))
    monkeypatch.setattr(flows, "PAYLOAD_BYTES", 60)
    with pytest.raises(EnqueueError, match="it takes the results of too many steps"):
        sqlq.Flow().add(count.map(range(40)).then(total))
