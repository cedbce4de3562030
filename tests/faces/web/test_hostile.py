"""Rows are hostile: SQL may have written anything into any text, and no page may carry it out."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, String, Text, inspect, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.config.command_hint import STEERS
from sqlq.model.outcome import Finished
from sqlq.schema.tables import metadata
from sqlq.web.view import templates
from tests.kit import claim_on, end, failed
from tests.kit.visitor import Visitor

CANARY = "\"'><script>x</script><img src=x onerror=y>\x1b[2J\u202e{{7777*7777}}"
LONG = "A" * (1 << 18)
PIECES = (
    *(CANARY, "<canary canary=1>", "' canary=1 ", '" canary=1 ', "</pre></td></table>", "<!--", "]]>"),
    *("&lt;", "javascript:x", "//evil.example/", "\\", "{% raw %}", "%(x)s", "\x1b]0;x\x07", "\x00"),
    *("\x9b", "\r\n", "\u061c", "\u2028", "\u2066", "\ufffe", "'; DROP TABLE jobs; --", "1e999", "null"),
    "A" * 30_000,
)
HOSTILE = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    min_size=1,
    max_size=5,
).map("".join)
"""Markup, characters that steer, control characters, long lines, and whatever else there is."""
VALUES = st.one_of(
    HOSTILE,
    HOSTILE.map(json.dumps),
    HOSTILE.map(lambda said: json.dumps({said: [said, {"task": said}], "task": [said]})),
    HOSTILE.map(lambda said: json.dumps([said, {said: None}, [said, 1, -1e300]])),
)
"""Columns have texts, and JSON of whatever shape."""
ELEMENTS = {"script", "img", "iframe", "object", "embed", "base", "style", "canary"}
API = ("jobs", "queues", "failures", "workers", "flows", "schedules", "limits", "audit", "database")
PAGES = [*("/", "/?span=day", "/jobs?text=x", "/jobs?state=failed"), *(f"/{path}" for path in API)]


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
        assert not any(name.startswith(("on", "canary")) for name in attributes), (path, tag, attributes)
        href = attributes.get("href") or attributes.get("action") or ""
        assert not re.match(r"\s*(javascript:|data:|//|https?:)", href), (path, href)
    assert not re.search(rf"[\x00-\x08\x0b-\x1f{STEERS}]", page), path
    assert str(7777 * 7777) not in page, path
    assert len(page) < 1_000_000, (path, len(page))


@pytest.fixture
def hostile(app: sqlq.App, engine: Engine) -> sqlq.App:
    """Jobs in each state, a flow, a schedule, a limit, a worker and an audit."""
    send = app.task(name="send", max_attempts=1)(lambda n=0: None)
    flow = sqlq.Flow("f")
    first = flow.add(send.new())
    flow.add(send.new(), after=[first])
    app.enqueue_many([send.new(i) for i in range(4)])
    app.enqueue(send.new().set(delay="1h"))
    app.schedules.add("s", send.new(), sqlq.Schedule(every="1h"))
    app.limits.set("k", running=1)
    end(app, failed())
    end(app, Finished('"r"'))
    app.enqueue(flow)
    with app.database.begin() as conn:
        claim_on(conn, limit=1, owner="w", lease_ms=600_000)
    with engine.begin() as conn:
        names = "host, pid, version, concurrency, started_at, seen_at, state_at"
        values = "'h', 1, 'v', 1, max(created_at), max(created_at), max(created_at)"
        conn.execute(text(f"INSERT INTO sqlq_workers (id, {names}) SELECT 'w', {values} FROM jobs"))
    return app


RULED = {"blocked_by", "errors", "on_outcome", "outcome", "reason", "unique_until"}
RULED |= {"on_success", "on_failure", "headers", "backoff"}
"""The texts that a table's rule keeps to some values, or to a length."""


def plant(engine: Engine, values: list[str]) -> None:
    """Write the values into all texts, in turn."""
    given = itertools.cycle(values)
    with engine.begin() as conn:
        newest = conn.scalar(text("SELECT max(id) FROM jobs"))
        only = {"unique_key": f"id = {newest}", "reserved_by": "reserved_by IS NOT NULL"}
        there = inspect(conn).get_table_names()
        tables = [table for table in metadata.tables.values() if table.name in there]
        columns = [each for table in tables for each in table.columns]
        for column in (each for each in columns if isinstance(each.type, String | Text)):
            value = next(given) if column.name not in ("id", "reserved_by") else values[0]
            value = value[: getattr(column.type, "length", None)]
            if column.name == "fingerprint":
                value = value or "f"  # an error without one has no page
            # of the largest, one row takes long enough
            large = column.table.name == "jobs" and len(value) > len(LONG)
            where = f"id = {newest}" if large else only.get(column.name, "1 = 1")
            spot = conn.begin_nested()
            try:
                name = engine.dialect.identifier_preparer.quote(column.name)
                said = f"UPDATE {column.table.name} SET {name} = :value WHERE {where}"
                conn.execute(text(said), {"value": value})
            except DBAPIError as error:
                spot.rollback()
                # MariaDB's TEXT has 64 KiB
                allowed = column.name in RULED or "\x00" in value or "too long" in str(error.orig)
                assert allowed, (column, value[:200])
            else:
                spot.commit()


@seed(20_261_125)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUES, min_size=1, max_size=4))
@example([""])
@example([CANARY + LONG])
@example(['{"args": ' + "[" * 520 + "]" * 520 + "}"])
@example(['{"a":' * 990 + "1" + "}" * 990])
def test_no_row_injects_markup_into_a_page(hostile: sqlq.App, engine: Engine, values: list[str]) -> None:
    plant(engine, values)
    visitor = Visitor(hostile)
    visitor.site.reading.forget()
    seen: set[str] = set()
    ahead = list(PAGES)
    while ahead:
        path = ahead.pop(0)
        kind = re.sub("=[^&]*", "=", path)
        if kind in seen:
            continue
        seen.add(kind)
        answer = visitor.get(path)
        assert answer.status_code < 500, (path, answer.text[:2000])
        check(answer.text, path)
        ahead += [
            str(attributes["href"])
            for tag, attributes in Elements(answer.text).found
            if tag == "a" and re.match("/[^&]*$", str(attributes.get("href")))
        ]
    assert sum(path.startswith("/jobs/") for path in seen) >= 6
    assert any(path.startswith("/failures/") for path in seen)
    for path in (*API, *(path[1:] for path in seen if re.fullmatch(r"/(jobs|flows)/\d+", path))):
        answer = visitor.get(f"/api/v1/{path}")
        assert (answer.status_code, answer.mimetype) == (200, "application/json"), (path, answer.text[:2000])
        assert not re.search(f"[{STEERS}]", answer.text)


def test_a_text_that_is_joined_to_markup_steers_nothing() -> None:
    joined = templates().from_string("{% macro bold() %}<b>{% endmacro %}{{ bold() ~ said }}")
    page = joined.render(said=CANARY)
    assert page.startswith("<b>")
    check(page, "a joined text")
