"""The contents of the pages, and their errors."""

from __future__ import annotations

import html
import json
import re
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.exc import OperationalError

import sqlq
from sqlq.admin import jobs
from sqlq.admin.doctor.finding import check, to_do
from sqlq.admin.jobs import Jobs
from sqlq.admin.queues import Queues
from sqlq.model.outcome import Finished
from sqlq.schema.tables import finished_jobs
from sqlq.store.limits import admit
from sqlq.web import Role, pages
from tests.kit import end, execute, failed, needs, wait_until
from tests.kit.command import Command
from tests.kit.visitor import Visitor


@pytest.fixture
def shop(app: sqlq.App) -> sqlq.App:
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    app.task(name="pack", queue="packing")(lambda n=0: None)
    return app


def ids(page: str) -> list[int]:
    """The jobs of a list."""
    return [
        int(id) for id in re.findall(r'<td class="number title" data-label="id"><a href="/jobs/(\d+)">', page)
    ]


def test_the_overview_shows_queues_and_their_pace(shop: sqlq.App) -> None:
    shop.enqueue_many([shop.named("send").new(i) for i in range(3)])
    end(shop, Finished())
    end(shop, failed())
    with shop.database.begin() as conn:
        a_while_ago = datetime.now(UTC) - timedelta(minutes=5)
        conn.execute(update(finished_jobs).values(finished_at=a_while_ago))
    page = Visitor(shop).page()
    assert "No worker is running" in page
    assert re.search(
        r'class="plot bars "[^>]*>.*?<title>\d\d:\d\d to \d\d:\d\d: 0.5 a minute</title>', page, re.DOTALL
    ), "a bar for the job that has finished"
    assert re.search(r'href="/jobs\?state=failed&amp;queue=default">1<', page)


def test_the_pace_has_whole_parts_alone(shop: sqlq.App) -> None:
    shop.enqueue(shop.named("send").new())
    end(shop, Finished())
    parts = shop.jobs.pace("1h", 30).parts
    assert len(parts) == 30
    assert all(part.since.timestamp() % 120 == 0 for part in parts)
    assert parts[-1].since + timedelta(minutes=2) <= datetime.now(UTC)
    assert sum(part.finished for part in parts) in (0, 1 / 120), "it is in a part as soon as that is over"


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
    assert re.search(r"The server was examined .*, the queues just now\.</p>", page)
    del rows[:7]
    page = Visitor(shop).page()
    assert "<summary>7 to check" not in page, "the worst colour is not folded"
    assert page.count('<li class="check"><strong>paused</strong> amber') == 7
    del rows[:]
    assert "The doctor finds nothing to do." in Visitor(shop).page()


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
    visitor, seen, path = Visitor(shop), list[int](), "/jobs"
    while True:
        page = visitor.page(path)
        seen += ids(page)
        older = re.search(r'href="(/jobs\?before=\d+)" rel="next"', page)
        if older is None:
            break
        path = older[1]
    assert seen == sorted(made, reverse=True)


def test_the_page_of_a_job_shows_its_attempts_and_actions(shop: sqlq.App) -> None:
    shop.enqueue(shop.named("send").new(7))
    trace = (
        'Traceback (most recent call last):\n  File "/srv/shop/mail.py", line 3, in send\nValueError: boom'
    )
    (id,) = end(shop, failed("boom", trace))
    page = html.unescape(Visitor(shop).page(f"/jobs/{id}"))
    for said in (
        "ValueError: boom",
        "shop/mail.py",
        f"sqlq retry {id}",
        f"WHERE id = {id}",
        "attempt 1",
        "Delete…",
    ):
        assert said in page
    assert "Cancel…" not in page


@pytest.mark.parametrize(
    ("paused", "said"), [(True, "its queue is paused"), (False, "no worker serves its queue")]
)
def test_the_page_of_a_job_names_the_reason_why_it_waits(shop: sqlq.App, paused: bool, said: str) -> None:
    id = shop.enqueue(shop.named("send").new()).id
    if paused:
        shop.queues.pause("default")
    assert said in Visitor(shop).page(f"/jobs/{id}")


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


def test_a_known_queue_without_jobs_can_be_paused(shop: sqlq.App) -> None:
    visitor = Visitor(shop)
    assert '<option value="packing">' in visitor.page("/queues")
    assert "paused packing for 10m" in visitor.done("queues pause", name="packing", duration="10m")
    assert visitor.done("queues pause", all="true") == "paused all queues."
    assert visitor.done("queues resume", all="true") == "resumed all queues."
    refused = visitor.send("queues pause", name="packing", duration="soon", back="/queues").text
    assert '<a href="/queues">Back to the form</a>' in refused
    refused = html.unescape(refused)
    assert 'duration is \'soon\': write it as in "30s", "10m"' in refused


def test_failures_are_grouped_by_error_and_place(shop: sqlq.App) -> None:
    trace = (
        'Traceback:\n  File "/srv/shop/mail.py", line {}, in send\n'
        '  File "/x/site-packages/smtp.py", line 9, in go\n'
    )
    for number in range(4):
        shop.enqueue(shop.named("send").new())
        end(shop, failed(f"order {number} of 'c{number}' has no box", trace.format(number)))
    shop.enqueue(shop.named("send").new())
    end(shop, failed("order 4 of 'c4' has no box", trace.replace("send", "resend")))
    visitor = Visitor(shop)
    page = visitor.page("/failures")
    assert re.findall(r'<div class="many">(\d+)</div>', page) == ["4", "1"]
    assert "shop/mail.py in send" in page
    groups, complete = shop.jobs.failures()
    assert complete
    detail = visitor.page(f"/failures/{groups[0].fingerprint}")
    assert f"sqlq retry --error {groups[0].fingerprint}" in detail
    assert re.search(r'<div class="axes">.*<title>\d\d:\d\d to \d\d:\d\d: [1-4]</title>', detail, re.DOTALL)
    assert shop.jobs._counts(["failed"], error=groups[0].fingerprint) == {"failed": 4}


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
    sqlq_.shop("enqueue", "wait", "w")
    assert {f"/api/v1/{path}" for path in SAME} == pages.API.keys()
    with closing(sqlq.App(shop.url)) as without_code, sqlq_.working("-q", "default", "-c", "1"):
        sqlq_.wait_for("w.started")
        visitor = Visitor(without_code, redact="nothing")
        for path, command in SAME.items():

            def are_the_same(path: str = path, command: list[str] = command) -> bool:
                answer = visitor.get(f"/api/v1/{path.replace('<int:id>', '1')}")
                assert answer.status_code == 200, path
                assert answer.json, path
                return _still(answer.text) == _still(sqlq_.ok(*command, "--json"))

            wait_until(are_the_same, what=path)  # the worker goes on meanwhile


def test_the_api_reports_an_incomplete_search_in_a_header(
    shop: sqlq.App, monkeypatch: pytest.MonkeyPatch
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


def test_the_api_answers_in_json_whatever_sql_has_stored(shop: sqlq.App, engine: Engine) -> None:
    execute(engine, "INSERT INTO jobs (queue, task, payload) VALUES ('q', 't', '{\"args\": [NaN]}')")
    answer = Visitor(shop).get("/api/v1/jobs/1")
    assert json.loads(answer.text, parse_constant=pytest.fail)["payload"] == {"args": ["nan"]}


# -- mistakes ------------------------------------------------------------------------------------------------


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
        (
            "/jobs?since=2026-11-26T12:00:00",
            400,
            "since is 2026-11-26T12:00:00, which has no time zone: write it as in 2026-11-26T12:00:00Z",
        ),
        ("/jobs?until=9999-01-01T00:00:00Z", 400, "until is 9999-01-01 00:00:00+00:00: it must lie"),
        ("/api/v1/jobs?since=2026-11-26T12:00:00", 400, "which has no time zone"),
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


def test_a_page_names_migrate_without_tables(empty_database_url: str) -> None:
    with closing(sqlq.App(empty_database_url)) as empty:
        page = Visitor(empty).page("/", 503)
    assert "sqlq migrate" in page


@needs("postgresql")
def test_a_page_reloads_itself_while_the_database_is_away(app: sqlq.App) -> None:
    with closing(sqlq.App("postgresql+psycopg://nobody@127.0.0.1:9/nowhere")) as away:
        page = Visitor(away).page("/queues", 503)
    assert "The database did not answer" in page
    assert "data-again" in page


@needs("postgresql")
def test_a_slow_query_leaves_the_rest_of_the_page(shop: sqlq.App, engine: Engine) -> None:
    shop.enqueue(shop.named("send").new())
    visitor = Visitor(shop)
    visitor.page()
    with engine.begin() as conn:
        conn.execute(text("LOCK TABLE finished_jobs IN ACCESS EXCLUSIVE MODE"))
        visitor.site.reading.forget()
        began = datetime.now(UTC)
        page = visitor.page()
        assert datetime.now(UTC) - began < timedelta(seconds=30)
    assert "too slow to count" in page
    assert 'href="/jobs?queue=default"' in page


def test_a_query_that_was_too_slow_is_not_repeated_by_each_viewer(
    shop: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor, tries = Visitor(shop), list[int]()

    def slow(*given: Any, **how: Any) -> Any:
        tries.append(1)
        raise OperationalError("SELECT", None, Exception("canceling statement due to statement timeout"))

    monkeypatch.setattr(Jobs, "pace", slow)
    for _ in range(3):
        assert "too slow to count" in visitor.page()
    assert tries == [1]


def test_viewers_share_one_query(shop: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = Visitor(shop)
    monkeypatch.setattr("sqlq.web.reading.time", SimpleNamespace(monotonic=lambda: 0.0))
    visitor.page("/queues")
    looks: list[int] = []
    status = Queues.list

    def counted(queues: Queues, **how: Any) -> Any:
        looks.append(1)
        return status(queues, **how)

    monkeypatch.setattr(Queues, "list", counted)
    for _ in range(5):
        visitor.page("/queues")
    assert looks == []
    visitor.site.reading.forget()
    visitor.page("/queues")
    assert looks == [1, 1], "that of the page, and that of the line on top of every page"
    visitor.page("/jobs")
    assert looks == [1, 1]


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


def test_pages_read_from_the_replica_and_forms_act_on_the_database(shop: sqlq.App, tmp_path: Path) -> None:
    with closing(sqlq.App(f"sqlite:///{tmp_path / 'replica.db'}")) as replica:
        replica.migrate()
        replica.enqueue(replica.named("send").new().set(queue="seen"))
        visitor = Visitor(shop, read_url=str(replica.url))
        assert "/jobs?queue=seen" in visitor.page("/queues")
        assert "paused seen" in visitor.done("queues pause", name="seen")
        assert "seen" in shop.queues.pauses().named
        assert replica.queues.pauses().named == {}
