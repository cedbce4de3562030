"""Jobs run and are shown alike, whatever a server, a role, a URL, the environment or a hook sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from sqlalchemy import NullPool, create_engine, event, make_url

import sqlq
from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command
from tests.kit import drain
from tests.kit.databases import DATABASES

TEXT = "price in €, 😀"
LACKING = ("LATIN1", "WIN1252")
"""Encodings that lack a character of it."""

SLEEP = {"postgresql": "SELECT pg_catalog.pg_sleep(0.2)", "mariadb": "DO SLEEP(0.2)", "sqlite": "SELECT 1"}

SETTINGS = {
    "postgresql": {
        "encoding": ["LATIN1", "WIN1252", "SQL_ASCII"],
        "database": [
            *("datestyle = 'SQL, DMY'", "client_encoding = latin1", "timezone = 'Asia/Kolkata'"),
            *("standard_conforming_strings = off", "array_nulls = off", "statement_timeout = 100"),
            *("idle_in_transaction_session_timeout = 1", "default_transaction_isolation = serializable"),
            *("intervalstyle = sql_standard", "transform_null_equals = on", "bytea_output = escape"),
            *("client_min_messages = debug1", "idle_session_timeout = 100", "transaction_timeout = 100"),
        ],
        "role": ["datestyle = German", "client_encoding = sql_ascii", "lock_timeout = 1"],
        "url": ["client_encoding=win1252", "options=-c datestyle=German -c array_nulls=off"],
        "environment": [
            *("PGOPTIONS=-c standard_conforming_strings=off -c statement_timeout=100", "PGDATESTYLE=German"),
            *("PGCLIENTENCODING=LATIN1", "PGTZ=America/New_York"),
        ],
        "hook": ["SET client_encoding = latin1", "SET datestyle = 'Postgres, DMY'"],
    },
    "mariadb": {
        "server": [
            *("sql_select_limit = 1", "collation_server = latin1_german2_ci", "sql_mode = 'ANSI'"),
            *("time_zone = '+05:30'", "sql_safe_updates = 1", "completion_type = 2", "max_join_size = 1"),
            *("group_concat_max_len = 8", "max_statement_time = 0.1", "idle_transaction_timeout = 1"),
            *("default_storage_engine = MyISAM", "tx_isolation = 'SERIALIZABLE'", "autocommit = 0"),
            *("innodb_lock_wait_timeout = 1", "unique_checks = 0"),
        ],
        "url": ["charset=latin1", "charset=utf8mb3", "use_unicode=0", "sql_mode=ANSI"],
        "hook": ["SET NAMES latin1", "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"],
    },
    "sqlite": {
        "encoding": ["UTF-16le"],
        "url": ["detect_types=3", "timeout=0", "isolation_level=EXCLUSIVE"],
        "hook": [
            *("PRAGMA foreign_keys = ON", "PRAGMA recursive_triggers = ON", "PRAGMA busy_timeout = 0"),
            *("PRAGMA case_sensitive_like = ON", "PRAGMA reverse_unordered_selects = ON"),
            *("PRAGMA read_uncommitted = ON", "PRAGMA ignore_check_constraints = ON"),
            *("PRAGMA trusted_schema = OFF", "PRAGMA synchronous = OFF", "PRAGMA temp_store = MEMORY"),
            *("PRAGMA count_changes = ON", "PRAGMA full_column_names = ON"),
        ],
        "driver": ["text_factory = bytes"],
    },
}
"""The settings of each kind of database, by the place where they are set."""
ALWAYS = {setting for places in SETTINGS.values() for settings in places.values() for setting in settings[:1]}
"""The first ones of each place; the others are tried by `poe test-all`."""
TABLE = [
    pytest.param(
        *(kind, place, setting),
        id=re.sub(r"[^\w.+-]+", "-", f"{kind}-{place}-{setting}"),
        marks=() if setting in ALWAYS else pytest.mark.slow,
    )
    for kind in DATABASES
    for place, settings in SETTINGS[kind].items()
    for setting in settings
]


@contextmanager
def set_at(place: str, setting: str, url: str, server: Any, monkeypatch: Any) -> Iterator[str]:
    """Set it there while the block lasts; yields the URL to use."""
    name = make_url(url).database
    match place:
        case "encoding" if "sqlite" in url:
            with create_engine(url, poolclass=NullPool).connect() as conn:
                conn.exec_driver_sql(f"PRAGMA encoding = '{setting}'")
                conn.exec_driver_sql("CREATE TABLE host (id INTEGER)")
            yield url
        case "encoding":
            own = f"sqlq_test_{uuid4().hex}"
            server._administer(
                f"CREATE DATABASE {own} TEMPLATE template0 ENCODING {setting} LC_COLLATE 'C' LC_CTYPE 'C'"
            )
            try:
                yield server.url(own)
            finally:
                server.drop_database(server.url(own))
        case "database":
            server._administer(f'ALTER DATABASE "{name}" SET {setting}')
            yield url
        case "role":
            server._administer(f'ALTER ROLE CURRENT_USER IN DATABASE "{name}" SET {setting}')
            yield url
        case "server":
            variable = setting.partition(" =")[0]
            ((before,),) = server.administer(f"SELECT @@global.{variable}")
            server.administer(f"SET GLOBAL {setting}")
            try:
                yield url
            finally:
                server.administer(f"SET GLOBAL {variable} = {before!r}")
        case "url":
            yield str(make_url(url).update_query_string(setting).render_as_string(hide_password=False))
        case "environment":
            monkeypatch.setenv(*setting.split("=", 1))
            yield url
        case _:
            yield url


def app_at(place: str, setting: str, url: str) -> sqlq.App:
    """Return an App at the URL, or beside an engine whose hook sets this."""
    if place not in ("hook", "driver"):
        return sqlq.App(url)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _connected(driver: Any, record: Any) -> None:
        if place == "driver":
            driver.text_factory = bytes
        else:
            driver.cursor().execute(setting)

    return sqlq.App(engine=engine)


@pytest.mark.parametrize(("kind", "place", "setting"), TABLE)
def test_jobs_run_and_are_shown_whatever_is_set(
    kind: str,
    place: str,
    setting: str,
    tmp_path: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = None if kind == "sqlite" else request.getfixturevalue(kind)
    with ExitStack() as stack:
        if server is None:
            url = f"sqlite:///{tmp_path / 'jobs.db'}"
        else:
            url = server.create_database()
            stack.callback(server.drop_database, url)
        url = stack.enter_context(set_at(place, setting, url, server, monkeypatch))
        app = app_at(place, setting, url)
        stack.callback(app.close)
        app.migrate()

        @app.task(name="finish")
        def finish() -> str:
            sqlq.current_job().progress(1, 2, TEXT)
            return TEXT

        @app.task(name="fail", max_attempts=1)
        def fail() -> None:
            raise ValueError(TEXT)

        @app.task(name="retry", backoff="0s")
        def retry() -> str:
            if sqlq.current_job().attempt == 1:
                raise ValueError(TEXT)
            return "retried"

        @app.task(name="snooze")
        def snooze() -> str:
            if sqlq.current_job().lease_token == 1:
                raise sqlq.Snooze("0s")
            return "snoozed"

        @app.task(name="cancel")
        def cancel() -> None:
            raise sqlq.Cancel(TEXT)

        @app.task(name="limited", limit=sqlq.Limit("lines", running=1))
        def limited(back: str) -> str:
            return back

        tasks: list[Any] = [finish, fail, retry, snooze, cancel]
        made = [app.enqueue(task.new()) for task in tasks]
        made += app.enqueue_many([limited.new("C:\\new 'line'").set(unique_key=f"key {n}") for n in range(3)])
        drain(app)
        ended = [app.jobs.get(job.id) for job in made]
        states = [str(job.state) for job in ended]
        assert states == ["finished", "failed", "finished", "finished", "cancelled", *["finished"] * 3]
        results = [job.result for job in ended]
        assert results == [TEXT, None, "retried", "snoozed", None, *["C:\\new 'line'"] * 3]
        # the database refuses the whole text because of one character that it lacks
        assert ended[1].message == (r"price in \u20ac, \ud83d\ude00" if setting in LACKING else TEXT)
        assert len(app.jobs.list()) == len(made)
        with app.database.read() as conn:  # longer than a timeout of the table
            conn.exec_driver_sql(SLEEP[kind])
        if place in ("hook", "driver"):
            return
        for words in (["status"], ["doctor"], ["jobs"]):
            context = Context()
            done = CliRunner(env={"COLUMNS": "300"}).invoke(command, ["-d", url, *words], obj=context)
            context.app().close()
            # the doctor has a thing to do on a server without fsync
            assert done.exit_code == 0 or "to do" in done.output, (words, done.output, done.exception)
