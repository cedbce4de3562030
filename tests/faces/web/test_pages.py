"""The contents of the pages, and their errors."""

from __future__ import annotations

import html
import json
import re
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, make_url, text, update
from sqlalchemy.exc import OperationalError

import sqlq
from sqlq.admin import jobs
from sqlq.admin.doctor.finding import check, to_do
from sqlq.admin.jobs import Jobs
from sqlq.model.flow import StepDetails
from sqlq.model.job import State
from sqlq.model.outcome import Finished
from sqlq.schema import tables
from sqlq.store import rights
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from sqlq.testing import drain
from sqlq.web import Role, pages
from sqlq.web.outline import outline
from tests.kit import claim_on, end, execute, failed, needs, received
from tests.kit.command import Command
from tests.kit.visitor import Visitor


def boom(number: int, *before: object, **options: object) -> dict[str, object]:
    if number == 77:
        raise ValueError(f"chunk {number} has no header")
    return {"rows": number, "password": "hunter2"}


@pytest.fixture
def shop(app: sqlq.App) -> sqlq.App:
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    app.task(name="pack", queue="packing")(lambda n=0: None)
    app.task(name="convert", max_attempts=1)(boom)
    return app


def ids(page: str) -> list[int]:
    """The jobs of a list."""
    cell = r'<td class="number title" data-label="id"><a href="/jobs/(\d+)">'
    return [int(id) for id in re.findall(cell, page)]


def test_the_overview_shows_queues_and_their_pace(shop: sqlq.App) -> None:
    shop.enqueue_many([shop.named("send").new(i) for i in range(3)])
    end(shop, Finished())
    end(shop, failed())
    with shop.database.begin() as conn:
        a_while_ago = datetime.now(UTC) - timedelta(minutes=5)
        conn.execute(update(tables.finished_jobs).values(finished_at=a_while_ago))
    page = Visitor(shop).page()
    assert "No worker is running" in page
    bar = r'class="plot bars "[^>]*>.*?<title>\d\d:\d\d to \d\d:\d\d: 0.5 a minute</title>'
    assert re.search(bar, page, re.DOTALL), "a bar for the job that has finished"
    assert re.search(r'href="/jobs\?state=failed&amp;queue=default">1<', page)


def test_the_overview_shows_all_findings_of_the_worst_colour_and_folds_the_others(
    shop: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [to_do(f"red {number}", check="workers") for number in range(7)]
    rows += [check(f"amber {number}", "mend it", check="paused") for number in range(7)]
    monkeypatch.setattr(pages, "examine_server", lambda database: rows[::2])
    monkeypatch.setattr(pages, "examine_queue", lambda database, **known: rows[1::2])
    page = Visitor(shop).page()
    head, folded = page.split("<details><summary>7 to check: paused</summary>")
    assert [f"red {number}" in head for number in range(7)] == [True] * 7
    assert "amber" not in head
    assert [f"amber {number}" in folded for number in range(7)] == [True] * 7
    del rows[:7]
    assert "<summary>7 to check" not in Visitor(shop).page(), "the worst colour is not folded"


def test_jobs_are_filtered_by_the_address(shop: sqlq.App) -> None:
    send, pack = shop.named("send"), shop.named("pack")
    one = shop.enqueue(send.new(4711).set(label="red", headers={"tenant": "seven"})).id
    two = shop.enqueue(pack.new("needle_%").set(unique_key="k", delay="1h")).id
    visitor = Visitor(shop)
    for query, found in {
        "": [two, one],
        "task=send": [one],
        "queue=packing": [two],
        "label=red": [one],
        "header=tenant": [one],
        "header=tenant%3Dseven": [one],
        "header=tenant%3Dother": [],
        "key=k": [two],
        "text=needle_%25": [two],
        "text=needlex%25": [],
        "text=4711": [one],
        "state=scheduled": [two],
        "since=1h": [two, one],
        "until=1h": [],
        "state=available&task=pack": [],
        "task=nope": [],
    }.items():
        assert ids(visitor.page(f"/jobs?{query}")) == found, query


def test_pages_of_jobs_follow_each_other_without_a_gap(shop: sqlq.App) -> None:
    made = [job.id for job in shop.enqueue_many([shop.named("send").new(i) for i in range(120)])]
    end(shop, Finished(), 40)
    end(shop, failed(), 30)
    visitor, seen, ahead = Visitor(shop), list[int](), ["/jobs"]
    while ahead:
        page = visitor.page(ahead.pop())
        seen += ids(page)
        ahead += re.findall(r'href="(/jobs\?before=\d+)" rel="next"', page)
    assert seen == sorted(made, reverse=True)


def test_a_part_of_a_name_finds_the_task(shop: sqlq.App) -> None:
    for name in ("shop.send", "shop.resend", "pack.all"):
        shop.task(name=name, max_attempts=1)(lambda: None)
    made = {name: shop.enqueue(shop.named(name).new()).id for name in ("send", "shop.send", "pack.all")}
    visitor = Visitor(shop)
    for part, name in (("send", "send"), ("ACK.A", "pack.all"), ("p.send", "shop.send")):
        page = visitor.page(f"/jobs?task={part}")
        assert ids(page) == [made[name]], part
        assert f'name="task" value="{name}"' in page
    for path in ("/jobs", "/failures"):
        page = html.unescape(visitor.page(f"{path}?task=shop"))
        alike = set(re.findall(rf'<li><a href="{path}\?task=([\w.]+)"', page))
        assert alike == {"shop.resend", "shop.send"}
    assert "No job matches" in visitor.page("/jobs?task=nope")


def test_every_page_has_the_counts_on_top_and_jobs_have_them_on_their_tabs(shop: sqlq.App) -> None:
    shop.enqueue_many([shop.named("send").new(i) for i in range(5)])
    shop.enqueue(shop.named("pack").new().set(delay="1h"))
    end(shop, failed())
    visitor = Visitor(shop)
    for path in pages.PAGES["jobs"][0], "/limits", "/jobs/1", "/schedules":
        line = re.search(r'<div id="summary".*?</div>', visitor.page(path), re.DOTALL)
        assert line is not None, path
        text = " ".join(re.sub(r"<[^>]*>", "", line[0]).split())
        assert text == "5 waiting 0 running 1 failed 0 workers", path

    def tabs(query: str) -> list[str]:
        return re.findall(r'<span class="count [a-z]*">([^<]*)</span>', visitor.page(f"/jobs{query}"))

    assert sorted(tabs("")) == ["0", "0", "1", "1", "4"]
    assert sorted(tabs("?queue=packing&state=failed")) == ["0", "0", "0", "0", "1"]
    assert tabs("?task=send") == [], "no count without a scan"


def test_failures_are_grouped_by_error_and_place(shop: sqlq.App) -> None:
    own, other = '"/srv/shop/mail.py", line {}, in send\n', '"/x/site-packages/smtp.py", line 9, in go\n'
    trace = f"Traceback:\n  File {own}  File {other}"
    for number in range(4):
        shop.enqueue(shop.named("send").new())
        end(shop, failed(f"order {number} of 'c{number}' has no box", trace.format(number)))
    shop.enqueue(shop.named("send").new())
    end(shop, failed("order 4 of 'c4' has no box", trace.replace("send", "resend")))
    visitor = Visitor(shop)
    page = visitor.page("/failures")
    assert re.findall(r'<div class="many">(\d+)</div>', page) == ["4", "1"]
    assert "shop/mail.py in send" in page
    fingerprint = shop.jobs.failures()[0][0].fingerprint
    detail = visitor.page(f"/failures/{fingerprint}")
    assert f"sqlq retry --error {fingerprint}" in detail
    assert re.search(r'<div class="axes">.*<title>\d\d:\d\d to \d\d:\d\d: [1-4]</title>', detail, re.DOTALL)


SAME = {
    "queues": ["queues"],
    "jobs": ["jobs"],
    "jobs/<int:id>": ["show", "1"],
    "failures": ["failed"],
    "workers": ["workers", "--all"],
    "flows": ["flows"],
    "flows/<int:id>": ["flows", "show", "1"],
    "schedules": ["schedules"],
    "limits": ["limits"],
    "audit": ["audit"],
    "database": ["doctor", "--sizes"],
}
"""Each path of the API, and the command that prints the same objects."""


def _still(text: str) -> str:
    """Return an answer without what differs from one look to the next."""
    return re.sub(r'("(?:\w*_seconds|dead_rows|number|value)": )[^\n]*', r"\1?", text)


def test_the_api_and_the_commands_return_the_same_bytes(shop: sqlq.App, sqlq_: Command) -> None:
    send = shop.named("send")
    flow = sqlq.Flow("parcel")
    flow.add(send.new(2), after=[flow.add(send.new(1))])
    shop.enqueue(flow)
    shop.enqueue(send.new(3).set(limit=sqlq.Limit("stripe", running=2), label="red", batch="g"))
    admit.look(shop.database)
    end(shop, Finished('{"token": 1}'))
    end(shop, failed())
    shop.schedules.add("nightly", send.new(7), sqlq.Schedule(cron="0 3 * * *"))
    with shop.acting_as("ada"):
        shop.queues.pause("packing")
    with shop.database.begin() as conn:
        workers.register(conn, id="w", host="box", pid=7, version="0", queues=None, concurrency=1)
        claim_on(conn, limit=1, owner="w", lease_ms=600_000)
    assert {f"/api/v1/{path}" for path in SAME} == pages.API.keys()
    with closing(sqlq.App(shop.url)) as without_code:
        visitor = Visitor(without_code, redact="nothing")
        for path, command in SAME.items():
            answer = visitor.get(f"/api/v1/{path.replace('<int:id>', '1')}")
            assert answer.status_code == 200, path
            assert answer.json, path
            assert _still(answer.text) == _still(sqlq_.ok(*command, "--json")), path


def test_the_api_answers_in_json_and_reports_an_incomplete_search_in_a_header(
    shop: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, _ = [job.id for job in shop.enqueue_many([shop.named("send").new(7), shop.named("pack").new(8)])]
    visitor = Visitor(shop)
    assert visitor.read(f"jobs/{id}")["payload"] == {"args": [7]}
    answer = visitor.get("/api/v1/jobs?task=send&limit=5")
    (found,) = json.loads(answer.text)
    assert found["id"] == id
    assert not found.keys() & {"payload", "result", "traceback"}
    assert "Sqlq-Complete" not in answer.headers
    monkeypatch.setattr(jobs, "TEXT_SEARCH_LIMIT", 1)
    answer = visitor.get("/api/v1/jobs?text=7")
    assert (answer.json, answer.headers["Sqlq-Complete"]) == ([], "no")
    assert visitor.get("/api/v1/jobs?limit=5000").status_code == 400
    execute(engine, "UPDATE jobs SET payload = '{\"args\": [NaN]}'")
    answer = visitor.get(f"/api/v1/jobs/{id}")
    assert json.loads(answer.text, parse_constant=pytest.fail)["payload"] == {"args": ["nan"]}


def page_of(app: sqlq.App, path: str) -> str:
    return html.unescape(Visitor(app).page(path))


def test_the_page_of_a_job_begins_with_its_error_or_reason(shop: sqlq.App) -> None:
    shop.enqueue_many([shop.named("convert").new(n) for n in range(3)])
    trace = 'Traceback:\n  File "/srv/shop/mail.py", line 3, in send\nValueError: boom'
    ids = [end(shop, failed(f"no box {n}", trace))[0] for n in range(3)]
    page = page_of(shop, f"/jobs/{ids[0]}")
    assert page.index("ValueError: no box") < page.index("it has failed for good") < page.index("Arguments")
    for said in ("shop/mail.py", f"sqlq retry {ids[0]}", f"WHERE id = {ids[0]}", "attempt 1", "Delete…"):
        assert said in page
    assert "Cancel…" not in page
    (link,) = re.findall(r'href="(/failures/\w+)">2 others have this error<', page)
    assert "no box" in page_of(shop, link)
    shop.queues.pause("default")
    waiting = shop.enqueue(shop.named("convert").new(1)).id
    assert "its queue is paused" in page_of(shop, f"/jobs/{waiting}")
    shop.jobs.cancel([waiting], reason="the order is void")
    page = page_of(shop, f"/jobs/{waiting}")
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
    def enqueued_by(id: int) -> str:
        (row,) = re.findall("<dt>enqueued by</dt><dd>(.*?)</dd>", page_of(shop, f"/jobs/{id}"))
        return re.sub("<.*?>", "", row)

    convert, at = shop.named("convert"), datetime(2026, 11, 27, 3, tzinfo=UTC)
    shop.schedules.add("nightly", convert.new(3), sqlq.Schedule(cron="0 3 * * *"))
    with shop.acting_as("grace"):
        run = shop.schedules.run("nightly").id
    assert enqueued_by(run) == "grace, by a run now of the schedule nightly"
    with shop.database.begin() as conn:
        conn.execute(update(tables.jobs).values(scheduled_for=at))
    assert "the schedule nightly, for 2026-11-27 03:00:00" in enqueued_by(run)
    end(shop, Finished())
    (replay,) = shop.jobs.replay(run).values()
    assert enqueued_by(replay) == f"a replay of job {run}"
    flow = sqlq.Flow()
    flow.add(convert.new(1))
    made = shop.enqueue(flow)
    assert enqueued_by(made.jobs[0].id) == f"the flow {made.id}"


def steps(*states: tuple[str, list[int]]) -> list[StepDetails]:
    return [
        StepDetails(id, "t", "q", None, State(state), 1, dict.fromkeys(after, "success"))
        for id, (state, after) in enumerate(states, 1)
    ]


def drawn(flow: list[StepDetails], at: int | None = None) -> dict[str, tuple[int, set[str]]]:
    """The boxes of a flow, each with its column and those before it."""
    boxes = outline(flow, at)
    firsts = [(box.steps[0], len(box.steps)) for box in boxes]
    names = [str(first.id) if many == 1 else f"{many} {first.state}" for first, many in firsts]
    return {name: (box.column, {names[n] for n in box.after}) for name, box in zip(names, boxes, strict=True)}


def test_a_fan_of_finished_steps_is_one_box_and_a_failed_step_has_its_neighbours() -> None:
    middle = [("finished", [1])] * 198
    flow = steps(("finished", []), *middle, ("finished", list(range(2, 200))))
    assert drawn(flow) == {"1": (0, set()), "198 finished": (1, {"1"}), "200": (2, {"198 finished"})}
    flow[76] = flow[76].__class__(77, "t", "q", None, State.FAILED, 1, {1: "success"})
    boxes = drawn(flow)
    assert list(boxes) == ["77", "1", "200", "197 finished"]
    assert boxes["200"] == (2, {"77", "197 finished"})
    assert list(drawn(flow, at=200)) == ["200", "77", "197 finished"]
    states = ["finished"] * 76 + ["failed"] + ["blocked"] * 123
    chain = steps(*((state, [n] if n else []) for n, state in enumerate(states)))
    boxes = drawn(chain)
    assert list(boxes)[:3] == ["77", "78", "76"]
    assert [boxes[name][0] for name in ("75 finished", "76", "77", "78")] == [0, 1, 2, 3]
    assert sum(int(name.partition(" ")[0]) if " " in name else 1 for name in boxes) == 200
    assert len(boxes) < 20
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


NOON = "2026-11-26T12:00:00"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/jobs/999999", 404, "no job 999999"),
        ("/jobs/99999999999999999999999", 404, "no job"),
        ("/jobs/x", 404, ""),
        ("/flows/77", 404, "no flow 77"),
        ("/schedules/nope", 400, "nope"),
        ("/failures/nope", 404, "no failed job has this error"),
        ("/jobs?before=x", 400, "before is 'x': give a whole number"),
        ("/jobs?since=yesterday", 400, 'since is \'yesterday\': write it as in "30s", "10m"'),
        (f"/jobs?since={NOON}", 400, f"since is {NOON}, which has no time zone: write it as in {NOON}Z"),
        ("/jobs?until=9999-01-01T00:00:00Z", 400, "until is 9999-01-01 00:00:00+00:00: it must lie"),
        (f"/api/v1/jobs?since={NOON}", 400, "which has no time zone"),
        ("/api/v1/jobs?limit=0", 400, "limit is 0"),
        ("/jobs?state=lost", 400, "state is 'lost'"),
        ("/api/v1/jobs?state=lost", 400, "state is 'lost'"),
        ("/nowhere", 404, ""),
    ],
)
def test_a_wrong_address_is_reported_in_one_sentence(
    app: sqlq.App, path: str, status: int, said: str
) -> None:
    page = html.unescape(Visitor(app).page(path, status))
    assert said in page
    assert "Traceback" not in page


@needs("postgresql", empty=True)
def test_a_page_names_migrate_without_tables_and_reloads_while_the_database_is_away(
    empty_database_url: str,
) -> None:
    with closing(sqlq.App(empty_database_url)) as empty:
        assert "sqlq migrate" in Visitor(empty).page("/", 503)
    with closing(sqlq.App("postgresql+psycopg://nobody@127.0.0.1:9/nowhere")) as away:
        page = Visitor(away).page("/queues", 503)
    assert "The database did not answer" in page
    assert "data-again" in page


def test_a_query_that_was_too_slow_is_not_repeated_by_each_viewer(
    shop: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.enqueue(shop.named("send").new())
    visitor, tries = Visitor(shop), list[int]()

    def slow(*given: Any, **how: Any) -> Any:
        tries.append(1)
        raise OperationalError("SELECT", None, Exception("canceling statement due to statement timeout"))

    monkeypatch.setattr(Jobs, "pace", slow)
    for _ in range(3):
        page = visitor.page()
        assert "too slow to count" in page
        assert 'href="/jobs?queue=default"' in page, "the rest of the page is there"
    assert tries == [1]


def test_viewers_share_one_query(shop: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = Visitor(shop)
    monkeypatch.setattr("sqlq.web.reading.time", SimpleNamespace(monotonic=lambda: 0.0))
    visitor.page("/queues")
    with received(visitor.site.reading.app.database.engine) as asked:
        for _ in range(5):
            visitor.page("/queues")
        assert asked == []
        visitor.site.reading.forget()
        visitor.page("/queues")
        number = len(asked)
        visitor.page("/queues")
    assert len(asked) == number > 0


@needs("sessions")
def test_statements_of_other_sessions_are_shown_to_operators_alone(app: sqlq.App, engine: Engine) -> None:
    with engine.connect() as conn:
        conn.execute(text("CREATE TABLE kept (id int)"))
        conn.execute(text("SELECT 'canary'"))
        roles: dict[Role, bool] = {"viewer": False, "operator": True}
        for role, seen in roles.items():
            visitor = Visitor(app, role)
            for path in ("/database", "/api/v1/database"):
                page = visitor.page(path)
                assert "oldest transaction" in page
                assert ("canary" in page) is seen, (role, path)


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
