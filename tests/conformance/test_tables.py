"""SQL of users themselves: joins with `sqlq.tables`, and the INSERT of `app.statement`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, Table, create_engine, inspect, make_url, select, update
from sqlalchemy.dialects.postgresql import DOMAIN
from sqlalchemy.exc import DBAPIError

import sqlq
import sqlq.alembic
from sqlq import tables
from sqlq.schema import tables as ended_tables
from sqlq.schema.types import Moment
from sqlq.testing import drain
from tests.kit import for_each, needs
from tests.kit.callers import MODES

pytestmark = pytest.mark.each_database

EVERY = [getattr(tables, name) for name in tables.__all__]


@for_each("table", EVERY)
def test_the_tables_have_the_columns_of_the_database(engine: Engine, app: sqlq.App, table: Table) -> None:
    there = {column["name"]: column for column in inspect(engine).get_columns(table.name)}
    if engine.dialect.name == "mariadb":
        for name in ("unblocks_at", "sampled"):  # for indexes; SELECT * does not show them
            there.pop(name, None)
    names = [column.name for column in table.columns]
    ordered: Callable[[Any], list[str]] = sorted if table is tables.job_states else list
    assert ordered(there) == ordered(names)
    if engine.dialect.name == "postgresql":
        compiled = {c.name: c.type.compile(engine.dialect).partition("(")[0] for c in table.columns}
        types = {name: column["type"] for name, column in there.items()}
        plain = {name: t.data_type if isinstance(t, DOMAIN) else t for name, t in types.items()}
        found = {name: re.split(r"\(| COLLATE", t.compile(engine.dialect))[0] for name, t in plain.items()}
        texts = {name for name in found if {found[name], compiled[name]} <= {"VARCHAR", "TEXT"}}
        floats = {name for name in found if (found[name], compiled[name]) == ("DOUBLE PRECISION", "FLOAT")}
        assert {n: t for n, t in compiled.items() if n not in texts | floats} == {
            n: t for n, t in found.items() if n not in texts | floats
        }


def test_times_are_read_and_compared(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t", max_attempts=1)(lambda: 1 / 0)
    job = app.enqueue(task.new())
    drain(app)
    app.enqueue(task.new())
    moment = datetime.now(UTC)
    states, stats = tables.job_states, tables.queue_stats
    with engine.connect() as conn:
        ended = conn.scalars(select(states.c.ended_at).where(states.c.state == "failed")).one()
        assert abs(ended - moment) < timedelta(minutes=1)
        assert ended.utcoffset() == timedelta(0) or engine.dialect.name == "postgresql"
        for since, ids in ((moment - timedelta(hours=1), [job.id]), (moment + timedelta(hours=1), [])):
            assert list(conn.scalars(select(states.c.id).where(states.c.ended_at > since))) == ids
        row = conn.execute(select(stats)).one()
        assert (row.queue, row.available, row.failed, row.paused) == ("default", 1, 1, 0)
        assert abs(row.oldest_available_at - moment) < timedelta(minutes=1)
        failed = conn.execute(select(tables.failed_jobs)).one()
        assert (failed.id, failed.exception, failed.failed_at) == (job.id, "ZeroDivisionError", ended)


@needs("sessions")
def test_times_of_jobs_are_in_utc_in_any_session_time_zone(database_url: str) -> None:
    """In a zone with daylight saving time, sums and comparisons would be of its wall clock."""
    engine = create_engine(database_url, connect_args={"options": "-c TimeZone=Europe/Berlin"})
    app = sqlq.App(engine=engine)
    moment = datetime(2030, 10, 27, 1, 30, tzinfo=UTC)
    job = app.enqueue(app.task(name="t")(lambda: None).new().set(available_at=moment))
    found: Any = app.jobs.get(job.id).available_at
    assert found + timedelta(minutes=10) == moment + timedelta(minutes=10)
    app.jobs.cancel([job.id])
    with engine.connect() as conn:  # the caller's, in the zone of the caller
        shown: Any = conn.scalar(select(tables.finished_jobs.c.available_at))
    assert shown + timedelta(minutes=10) == moment + timedelta(minutes=10)
    app.close()
    engine.dispose()


@pytest.mark.parametrize("ended", ["finished", "failed"])
def test_ended_jobs_have_no_times_that_python_cannot_read(app: sqlq.App, engine: Engine, ended: str) -> None:
    """One such row would stop every listing."""
    job = app.enqueue(app.task(name="t", max_attempts=1)(lambda: ended == "finished" or 1 / 0).new())
    drain(app)
    table = ended_tables.metadata.tables[f"__sqlq__.{ended}_jobs"]
    columns = [c for c in table.columns if isinstance(c.type, Moment) and c.name != "expires_at"]
    assert len(columns) == 6
    century = timedelta(days=36_600) // timedelta(milliseconds=1)
    late: dict[str, Any] = {f"{ended}_at": datetime(9998, 1, 1, tzinfo=UTC), "retention_ms": century}
    years = [datetime(year, 1, 1, tzinfo=UTC) for year in (1969, 9999)]
    here = engine.execution_options(schema_translate_map={"__sqlq__": None})
    for values in [*({c.name: moment} for c in columns for moment in years), late]:
        with pytest.raises(DBAPIError, match=r"(?i)constraint|overflow"), here.begin() as conn:
            conn.execute(update(table).values(values))
    assert [each.id for each in app.jobs.list()] == [job.id]


OPTIONS: list[dict[str, Any]] = [
    *({}, {"delay": "1h"}, {"available_at": datetime(2030, 1, 31, 8, tzinfo=UTC)}),
    {"priority": 9, "timeout": "1m", "max_attempts": 7, "queue": "other"},
    {"unique_key": "k", "unique_until": "start"},
    {"unique_key": "l", "delay": "1h", "priority": -3},
]


def run(url: str, style: str | None, sql: str, parameters: Any) -> list[tuple[Any, ...]]:
    """Run a statement as a driver of that style does."""
    kind = make_url(url).get_backend_name()
    if style == "numeric_dollar":
        with MODES[kind]["asyncpg"](url) as caller:
            return [tuple(row) for row in caller.do(caller.session.fetch(sql, *parameters))]
    if (kind, style) == ("sqlite", "numeric"):  # sqlite3, whose style is another, takes :1 by its name
        parameters = {str(number): value for number, value in enumerate(parameters, 1)}
    driver = {"postgresql": "psycopg", "sqlite": "sqlite3", "mariadb": "pymysql"}[kind]
    with MODES[kind][driver](url) as caller:
        cursor = caller.session.cursor()
        cursor.execute(sql, parameters)
        rows = [tuple(row) for row in cursor.fetchall()]
        caller.commit()
        return rows


STYLES: dict[str, tuple[str | None, ...]] = {
    "sqlite": (None, "qmark", "numeric", "named"),
    "postgresql": (None, "format", "pyformat", "numeric_dollar"),
    "mariadb": (None, "format", "pyformat"),
}


def test_the_statement_writes_the_same_row_as_enqueue(app: sqlq.App, send: Any, database_url: str) -> None:
    def stored() -> list[tuple[Any, ...]]:
        names = ("payload", "queue", "priority", "timeout_ms", "max_attempts", "unique_key", "unique_until")
        rows = []
        for job in app.jobs.list():
            is_late = (job.available_at or job.created_at) > job.created_at
            rows.append((*(getattr(job, name) for name in names), job.state, is_late))
        app.jobs.cancel(all=True)
        app.jobs.prune(finished="0s")
        return rows

    jobs = [send.new(1, text="ä\"'%s %% :x ? $1 €😀").set(**options) for options in OPTIONS]
    for job in jobs:
        app.enqueue(job)
    expected = stored()
    for style in STYLES[app.database.dialect.name]:
        for job in jobs:
            sql, parameters = app.statement(job, paramstyle=style)
            assert sql.startswith(("INSERT INTO jobs (", "INSERT INTO main.jobs ("))
            ((id,),) = run(database_url, style, sql, parameters)
            assert app.jobs.get(id).payload == json.loads(job.payload)
            if job.unique_key is not None:
                there = [(id,)] if database_url.startswith("mariadb") else []
                assert run(database_url, style, sql, parameters) == there
        assert stored() == expected


@needs("schemas")
def test_the_statement_names_the_schema_of_the_app(database_url: str) -> None:
    with closing(sqlq.App(database_url, schema="shop")) as app:
        sql, _ = app.statement(app.named("t").new())
        assert sql.startswith("INSERT INTO shop.jobs (")
        with pytest.raises(sqlq.EnqueueError, match="paramstyle is 'colon': it is one of qmark, numeric,"):
            app.statement(app.named("t").new(), paramstyle="colon")
