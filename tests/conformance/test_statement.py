"""SQL for drivers that sqlq does not know: one INSERT with the job's parameters in any style."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, cast

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest
from sqlalchemy import make_url

import sqlq
from tests.kit import needs
from tests.kit.databases import DATABASES

pytestmark = pytest.mark.each_database

MOMENT = datetime(2030, 1, 31, 8, tzinfo=UTC)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"delay": "1h"},
    {"available_at": MOMENT},
    {"priority": 9, "timeout": "1m", "max_attempts": 7, "queue": "other"},
    {"unique_key": "k", "unique_until": "start"},
    {"unique_key": "l", "delay": "1h", "priority": -3},
]


def run(url: str, style: str | None, sql: str, parameters: Any) -> list[tuple[Any, ...]]:
    """Run a statement as a driver of that style does."""
    parsed = make_url(url)
    plain = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    if parsed.get_backend_name() == "sqlite":
        if style == "numeric":  # sqlite3, whose style is another, takes :1 by its name
            parameters = {str(number): value for number, value in enumerate(parameters, 1)}
        with closing(sqlite3.connect(parsed.database or "")) as conn, conn:
            return conn.execute(sql, parameters).fetchall()
    if parsed.get_backend_name() == "mariadb":
        where = parsed.translate_connect_args(username="user")
        with closing(pymysql.connect(**where, autocommit=True)) as mine, mine.cursor() as cursor:
            cursor.execute(sql, parameters)
            return [*cursor.fetchall()]
    if style == "numeric_dollar":

        async def fetch() -> list[tuple[Any, ...]]:
            conn = await asyncpg.connect(plain)
            rows = await conn.fetch(sql, *parameters)
            await conn.close()
            return [tuple(row) for row in rows]

        return asyncio.run(fetch())
    with psycopg.connect(plain) as theirs:
        return theirs.execute(cast(Any, sql), parameters).fetchall()


STYLES = {
    "sqlite": (None, "qmark", "numeric", "named"),
    "postgresql": (None, "format", "pyformat", "numeric_dollar"),
    "mariadb": (None, "format", "pyformat"),
}


@pytest.mark.parametrize(
    ("database_url", "style"),
    [(database, style) for database in DATABASES for style in STYLES[database]],
    indirect=["database_url"],
)
def test_the_statement_writes_the_same_row_as_enqueue(
    app: sqlq.App, database_url: str, style: str | None
) -> None:
    @app.task(name="shop.send", queue="mail", max_attempts=3)
    def send(order_id: int, **more: Any) -> None: ...

    def stored() -> list[tuple[Any, ...]]:
        names = ("payload", "queue", "priority", "timeout_ms", "max_attempts", "unique_key", "unique_until")
        every = [
            (
                *(getattr(job, name) for name in names),
                job.state,
                (job.available_at or job.created_at) > job.created_at,
            )
            for job in app.jobs.list()
        ]
        app.jobs.cancel(queue="mail")
        app.jobs.cancel(queue="other")
        app.jobs.prune(finished="0s")
        return every

    jobs = [send.new(1, text="ä\"'%s %% :x ? $1 €😀").set(**options) for options in OPTIONS]
    for job in jobs:
        app.enqueue(job)
    expected = stored()
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
def test_the_schema_is_named_where_the_app_has_one(database_url: str) -> None:
    with closing(sqlq.App(database_url, schema="shop")) as app:
        sql, _ = app.statement(app.named("t").new())
        assert sql.startswith("INSERT INTO shop.jobs (")


def test_statement_refuses_a_bad_job_and_an_unknown_paramstyle(app: sqlq.App) -> None:
    wrong: Any = app.named("t")
    with pytest.raises(sqlq.EnqueueError, match="enqueue takes what task"):
        app.statement(wrong)
    with pytest.raises(sqlq.EnqueueError, match="paramstyle is 'colon': it is one of qmark, numeric, named"):
        app.statement(app.named("t").new(), paramstyle="colon")


@pytest.mark.parametrize(
    "database_url", [name for name in DATABASES if name in ("sqlite", "mariadb")], indirect=True
)
def test_a_connection_that_enqueue_refuses_takes_the_statement(app: sqlq.App, database_url: str) -> None:
    where = make_url(database_url)
    sql, parameters = app.statement(app.named("t").new(7))

    async def main() -> None:
        conn: Any
        if where.get_backend_name() == "sqlite":
            conn = await aiosqlite.connect(where.database or "")
        else:
            conn = await asyncmy.connect(**where.translate_connect_args(username="user"))
        with pytest.raises(sqlq.EnqueueError, match=r"run what app\.statement"):
            await app.aenqueue(app.named("t").new(8), session=conn)
        async with conn.cursor() as cursor:
            await cursor.execute(sql, parameters)
        await conn.commit()
        closed = conn.close()
        if closed is not None:
            await closed

    asyncio.run(main())
    assert [job.payload["args"] for job in app.jobs.list()] == [[7]]
