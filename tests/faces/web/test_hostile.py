"""Rows are hostile: SQL may have written anything into any text, and no page may carry it out."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from sqlalchemy import Connection, Engine, String, Text, inspect, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.schema.tables import metadata
from tests.faces.web.visitor import Completed, Visitor, end, failed

CANARY = "\"'><script>x</script><img src=x onerror=y>\x1b[2J\u202e{{7*7}}"
LONG = "A" * (1 << 20)
ELEMENTS = {"script", "img", "iframe", "object", "embed", "base", "style"}
PAGES = [
    *(
        "/",
        "/?span=day",
        "/jobs",
        "/failures",
        "/queues",
        "/workers",
        "/flows",
        "/schedules",
        "/limits",
        "/database",
    ),
    *("/jobs?text=x", "/jobs?state=failed"),
]


class Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def check(page: str, path: str) -> None:
    """Nothing on the page acts, leads elsewhere, steers, or is longer than a person reads."""
    for tag, attributes in Elements(page).found:
        if tag in ELEMENTS:
            assert tag == "script", (path, tag)
            assert str(attributes.get("src")).endswith("/static/live.js"), path
        assert not any(name.startswith("on") for name in attributes), (path, tag, attributes)
        href = attributes.get("href") or attributes.get("action") or ""
        assert not re.match(r"\s*(javascript:|data:|//|https?:)", href), (path, href)
    assert "\x1b" not in page, path
    assert "\u202e" not in page, path
    assert len(page) < 3_000_000, (path, len(page))


@pytest.fixture
def hostile(app: sqlq.App, engine: Engine) -> sqlq.App:
    """Jobs in each state, a flow, a schedule, a limit and a worker, with the canary in each text."""
    send = app.task(name="send", max_attempts=1)(lambda n=0: None)
    flow = sqlq.Flow("f")
    first = flow.add(send.new())
    flow.add(send.new(), after=[first])
    app.enqueue_many([send.new(i) for i in range(4)])
    app.enqueue(send.new().set(delay="1h"))
    app.schedules.add("s", send.new(), sqlq.Schedule(every="1h"))
    app.limits.set("k", running=1)
    end(app, failed())
    end(app, Completed('"r"'))
    app.enqueue(flow)
    with engine.begin() as conn:
        names = "host, pid, version, concurrency, started_at, seen_at, state_at"
        values = "'h', 1, 'v', 1, max(created_at), max(created_at), max(created_at)"
        conn.execute(text(f"INSERT INTO sqlq_workers (id, {names}) SELECT 'w', {values} FROM jobs"))
        plant(conn)
    return app


def plant(conn: Connection) -> None:
    """Write the canary into each text. A rule of its table may refuse one."""
    there = inspect(conn).get_table_names()
    for table in metadata.tables.values():
        if table.name not in there:
            continue
        for column in table.columns:
            if not isinstance(column.type, String | Text) or column.name in ("id", "reserved_by", "queues"):
                continue
            most = getattr(column.type, "length", None)
            value = CANARY[:most] if most else CANARY + LONG
            spot = conn.begin_nested()
            try:
                conn.execute(text(f"UPDATE {table.name} SET {column.name} = :value"), {"value": value})
            except DBAPIError:
                spot.rollback()
            else:
                spot.commit()


def test_no_row_carries_anything_out(hostile: sqlq.App) -> None:
    visitor = Visitor(hostile)
    seen: set[str] = set()
    ahead = list(PAGES)
    while ahead and len(seen) < 100:
        path = ahead.pop(0)
        if path in seen:
            continue
        seen.add(path)
        answer = visitor.get(path)
        assert answer.status_code < 500, (path, answer.text[:2000])
        check(answer.text, path)
        ahead += [
            str(attributes["href"])
            for tag, attributes in Elements(answer.text).found
            if tag == "a" and str(attributes.get("href")).startswith("/")
        ]
    assert sum(path.startswith("/jobs/") for path in seen) >= 6
    assert any(path.startswith("/failures/") for path in seen)


def test_no_row_breaks_the_api(hostile: sqlq.App) -> None:
    for path in ("jobs", "queues", "failures", "workers", "flows", "schedules", "limits"):
        answer = Visitor(hostile).get(f"/api/v1/{path}")
        assert (answer.status_code, answer.mimetype) == (200, "application/json")
        assert answer.text.isascii()
