"""The pages of a job, of a flow and of a failure: what they show."""

from __future__ import annotations

import html
import re
from contextlib import closing
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from sqlalchemy import Engine, make_url, text

import sqlq
from sqlq.model.flow import StepDetails
from sqlq.model.job import State
from sqlq.model.outcome import Finished
from sqlq.store import rights
from sqlq.store.workers import workers
from sqlq.testing import drain
from sqlq.web import Role
from sqlq.web.outline import outline
from tests.kit import end, execute, failed, needs
from tests.kit.visitor import Visitor


def boom(number: int, *before: object, **options: object) -> dict[str, object]:
    if number == 77:
        raise ValueError(f"chunk {number} has no header")
    return {"rows": number, "password": "hunter2"}


@pytest.fixture
def shop(app: sqlq.App) -> sqlq.App:
    app.task(name="convert", max_attempts=1)(boom)
    return app


def page_of(app: sqlq.App, path: str) -> str:
    return html.unescape(Visitor(app).page(path))


def rows_of(page: str, name: str) -> str:
    """The text of a row of the list about a job."""
    (row,) = re.findall(rf"<dt>{name}</dt><dd>(.*?)</dd>", page)
    return re.sub("<.*?>", "", row)


def test_the_page_of_a_failed_job_begins_with_its_error_and_its_group(shop: sqlq.App) -> None:
    shop.enqueue_many([shop.named("convert").new(n) for n in range(3)])
    ids = [end(shop, failed(f"no box {n}", "Traceback:\n"))[0] for n in range(3)]
    page = page_of(shop, f"/jobs/{ids[0]}")
    assert page.index("ValueError: no box") < page.index("it has failed for good") < page.index("Arguments")
    (link,) = re.findall(r'href="(/failures/\w+)">2 others have this error<', page)
    assert "no box" in page_of(shop, link)


def test_a_cancelled_job_shows_its_reason_first(shop: sqlq.App) -> None:
    id = shop.enqueue(shop.named("convert").new(1)).id
    shop.jobs.cancel([id], reason="the order is void")
    page = page_of(shop, f"/jobs/{id}")
    assert page.index("the order is void") < page.index("it has ended")


def test_a_step_shows_the_results_that_its_handler_gets(shop: sqlq.App) -> None:
    convert, flow = shop.named("convert"), sqlq.Flow()
    first = flow.add(convert.new(5))
    flow.add(convert.new(6, first.result))
    a, b = shop.enqueue(flow).jobs
    assert f"(the result of job {a.id}, not there)" in page_of(shop, f"/jobs/{b.id}")
    drain(shop)
    page = page_of(shop, f"/jobs/{b.id}")
    arguments = page[page.index("Arguments") : page.index("Result")]
    assert '"rows": 5' in arguments
    assert '"password": "(hidden)"' in arguments
    assert "hunter2" not in page
    assert '"results"' not in page
    hidden = html.unescape(Visitor(shop, "viewer", hide_from_viewers=True).page(f"/jobs/{b.id}"))
    assert '"rows": 5' not in hidden


def test_the_page_of_a_job_names_what_enqueued_it(shop: sqlq.App) -> None:
    convert, at = shop.named("convert"), datetime(2026, 11, 27, 3, tzinfo=UTC)
    shop.schedules.add("nightly", convert.new(3), sqlq.Schedule(cron="0 3 * * *"))
    with shop.acting_as("grace"):
        run = shop.schedules.run("nightly").id
    assert (
        rows_of(page_of(shop, f"/jobs/{run}"), "enqueued by") == "grace, by a run now of the schedule nightly"
    )
    with shop.database.begin() as conn:
        conn.execute(text("UPDATE jobs SET scheduled_for = :at").bindparams(at=_stored(shop, at)))
    assert "the schedule nightly, for 2026-11-27 03:00:00" in rows_of(
        page_of(shop, f"/jobs/{run}"), "enqueued by"
    )
    end(shop, Finished())
    (replay,) = shop.jobs.replay(run).values()
    page = page_of(shop, f"/jobs/{replay}")
    assert rows_of(page, "enqueued by") == f"a replay of job {run}"
    assert f'href="/jobs/{run}"' in page
    flow = sqlq.Flow()
    flow.add(convert.new(1))
    made = shop.enqueue(flow)
    assert rows_of(page_of(shop, f"/jobs/{made.jobs[0].id}"), "enqueued by") == f"the flow {made.id}"


def _stored(app: sqlq.App, at: datetime) -> object:
    """A time as the column of the database has it."""
    return round(at.timestamp() * 1000) if app.url.get_backend_name() == "sqlite" else at


def test_the_last_attempt_names_its_worker_and_its_duration(shop: sqlq.App) -> None:
    with shop.database.begin() as conn:
        workers.register(
            conn, id="w", host="vm", pid=7, name="mail-1", version="1", queues=None, concurrency=1
        )
    shop.enqueue(shop.named("convert").new(1))
    (id,) = end(shop, failed())
    attempts = page_of(shop, f"/jobs/{id}").partition("<h2>Attempts</h2>")[2]
    assert re.search(r"attempt 1 after [\d.]+ ", attempts)
    assert '<span title="w">mail-1 on vm pid 7</span>' in attempts
    with shop.database.begin() as conn:
        workers.leave(conn, "w")
    assert '<span title="w">a worker that has ended</span>' in page_of(shop, f"/jobs/{id}")


def test_a_finished_flow_offers_no_retry_and_no_cancel(shop: sqlq.App) -> None:
    convert, flow = shop.named("convert"), sqlq.Flow()
    flow.add(convert.new(2), after=[flow.add(convert.new(77))])
    made = shop.enqueue(flow)
    buttons = {name: f"/act/{name}" for name in ("retry", "cancel")}

    def offered() -> set[str]:
        page = page_of(shop, f"/flows/{made.id}")
        return {name for name, action in buttons.items() if action in page}

    assert offered() == {"cancel"}
    drain(shop)
    assert offered() == {"retry", "cancel"}
    shop.flows.skip(made.jobs[0].id)
    drain(shop)
    assert offered() == set()


# -- folding -------------------------------------------------------------------------------------------------


def steps(*states: tuple[str, list[int]]) -> list[StepDetails]:
    return [
        StepDetails(id, "t", "q", None, State(state), 1, dict.fromkeys(after, "success"))
        for id, (state, after) in enumerate(states, 1)
    ]


def drawn(flow: list[StepDetails], at: int | None = None) -> dict[str, tuple[int, set[str]]]:
    """The boxes of a flow, each with its column and those before it."""
    boxes = outline(flow, at)
    names = [
        str(box.steps[0].id) if len(box.steps) == 1 else f"{len(box.steps)} {box.steps[0].state}"
        for box in boxes
    ]
    return {name: (box.column, {names[n] for n in box.after}) for name, box in zip(names, boxes, strict=True)}


def test_a_fan_of_finished_steps_is_one_box() -> None:
    middle = [("finished", [1])] * 198
    flow = steps(("finished", []), *middle, ("finished", list(range(2, 200))))
    assert drawn(flow) == {"1": (0, set()), "198 finished": (1, {"1"}), "200": (2, {"198 finished"})}
    flow[76] = flow[76].__class__(77, "t", "q", None, State.FAILED, 1, {1: "success"})
    boxes = drawn(flow)
    assert list(boxes) == ["77", "1", "200", "197 finished"]
    assert boxes["200"] == (2, {"77", "197 finished"})
    assert list(drawn(flow, at=200)) == ["200", "77", "197 finished"]


def test_a_long_chain_shows_the_failed_step_and_its_neighbours() -> None:
    states = ["finished"] * 76 + ["failed"] + ["blocked"] * 123
    boxes = drawn(steps(*((state, [n] if n else []) for n, state in enumerate(states))))
    assert list(boxes)[:3] == ["77", "78", "76"]
    assert {name: boxes[name][0] for name in ("75 finished", "76", "77", "78")} == {
        "75 finished": 0,
        "76": 1,
        "77": 2,
        "78": 3,
    }
    assert sum(int(name.partition(" ")[0]) if " " in name else 1 for name in boxes) == 200
    assert len(boxes) < 20


def test_a_job_is_drawn_with_its_parents_and_children() -> None:
    states = ["finished"] * 76 + ["failed"] + ["blocked"] * 123
    chain = steps(*((state, [n] if n else []) for n, state in enumerate(states)))
    assert drawn(chain, at=100) == {"100": (1, {"99"}), "99": (0, set()), "101": (2, {"100"})}


def test_a_folded_flow_unfolds_by_its_count(shop: sqlq.App) -> None:
    convert, flow = shop.named("convert"), sqlq.Flow()
    first = flow.add(convert.new(0))
    for n in range(1, 40):
        flow.add(convert.new(n), after=[first])
    id = shop.enqueue(flow).id
    drain(shop)
    page = page_of(shop, f"/flows/{id}")
    assert page.count('<g class="step') == 2
    (link,) = set(re.findall(r'href="([^"]+)">39 finished steps<', page))
    assert page_of(shop, link).count('<g class="step') == 40


# -- roles of the database -----------------------------------------------------------------------------------


@needs("roles")
def test_a_page_names_the_grant_that_its_role_lacks(shop: sqlq.App, engine: Engine) -> None:
    shop.enqueue(shop.named("convert").new(77))
    (id,) = end(shop, failed())
    role = f"web_{uuid4().hex[:12]}"
    url = make_url(str(shop.url)).set(username=role, password=None)
    execute(engine, f"CREATE ROLE {role} LOGIN; GRANT SELECT ON sqlq_version TO {role}")
    try:
        with closing(sqlq.App(url)) as poor:
            kinds: dict[Role, str] = {"viewer": "reader", "operator": "operator"}
            for user, kind in kinds.items():
                page = html.unescape(Visitor(poor, user).page("/jobs", 503))
                assert "did not answer" not in page
                assert "ermission denied for table" in page
                assert f"sqlq grants {role} --as {kind}" in page
            with engine.begin() as conn:
                rights.apply(conn, "reader", role, "public")
            operator = Visitor(poor, "operator")
            assert "convert" in operator.page(f"/jobs/{id}")
            page = html.unescape(operator.send("retry", id=str(id)).text)
            assert f"sqlq grants {role} --as operator" in page
    finally:
        execute(engine, f"DROP OWNED BY {role}; DROP ROLE {role}")
