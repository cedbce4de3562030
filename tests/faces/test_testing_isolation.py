"""While a test database is open, no row of a real one beside it changes, whatever the tested code does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.testing import Counts, assert_enqueued, drain, inline, on_database
from tests.kit import execute
from tests.kit.databases import sqlite_url
from tests.kit.flows import RealShop, rows
from tests.kit.postgresql import PostgreSQL, async_database_url

REAL = {"args": ["real"]}
UNSET: Any = None
"""The value of `os.environ.get` where the variable is not set."""


def available(app: sqlq.App) -> list[object]:
    return [job.payload for job in app.jobs.list(state="available")]


@pytest.fixture
def shop(app: sqlq.App) -> RealShop:
    """A shop whose own database has something in every table."""
    shop = RealShop(app)
    shop.fill()
    return shop


@pytest.fixture
def place(database_url: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Where the test is to be: another file, or a schema beside the real one in the same database. On MariaDB
    that is a database of the same server."""
    if database_url.startswith("sqlite"):
        yield {"url": sqlite_url(tmp_path / "test.db")}
        return
    schema = f"beside_{database_url[-12:]}"
    yield {"url": database_url, "schema": schema}
    if database_url.startswith("mariadb"):
        execute(create_engine(database_url, poolclass=NullPool), f"DROP DATABASE IF EXISTS {schema}")


@pytest.fixture(autouse=True)
def _nothing_real_is_touched(shop: RealShop, database_url: str) -> Iterator[None]:
    before = rows(database_url)
    yield
    assert rows(database_url) == before


def do_everything(shop: RealShop) -> None:
    """All that an App can do to a database."""
    app = shop.app
    app.migrate()
    first = app.enqueue(shop.note.new("test"))
    app.enqueue_many([shop.note.new("test"), shop.bad.new(), shop.note.new("later").set(delay="1h")])
    assert app.jobs.cancel([first.id]) == {first.id: "cancelled"}
    app.queues.pause("mail")
    app.queues.resume("mail")
    assert drain(app) == Counts(finished=1, failed=1)
    assert shop.done == ["test"]
    shop.done.clear()
    assert_enqueued(shop.bad)
    assert len(app.jobs.retry(all=True)) == 1
    app.worker(drain=True).run()
    app.jobs.delete(all=True)
    assert app.jobs.prune(finished="0s", failed="0s").finished == 2
    app.jobs.cancel(queue="default", force=True)
    app.close()
    assert not app.jobs.list(state="available")


WAYS_TO_LEAVE: dict[str, Callable[[sqlq.App, str], object]] = {
    "nothing": lambda app, url: None,
    "url": lambda app, url: app.use(url),
    "engine": lambda app, url: app.use(engine=create_engine(url)),
    "async engine": lambda app, url: app.use(engine=create_async_engine(async_database_url(url))),
    "a thread": lambda app, url: ThreadPoolExecutor(1).submit(app.use, url).result(),
}


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_the_app_stays_on_the_tests_database(
    shop: RealShop, database_url: str, place: dict[str, Any], way: str
) -> None:
    with on_database(shop.app, **place) as app:
        there = app._connected.address
        WAYS_TO_LEAVE[way](app, database_url)
        assert app._connected.address is there
        do_everything(shop)
    assert available(shop.app) == [REAL]


def test_the_app_is_on_the_used_database_after_the_block(
    shop: RealShop, database_url: str, place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = shop.app
    engine = create_engine(database_url)
    with caplog.at_level(logging.INFO, "sqlq"), on_database(app, **place):
        app.use(engine=engine)
    assert app._connected.address.engine is engine
    assert "the App goes to another one when it is closed" in caplog.text
    assert available(app) == [REAL]
    engine.dispose()


def test_blocks_in_blocks(shop: RealShop, database_url: str, place: dict[str, Any], tmp_path: Path) -> None:
    app = shop.app
    with on_database(app, **place):
        app.enqueue(shop.note.new("outer"))
        outer = app._connected.address
        with on_database(app, sqlite_url(tmp_path / "inner.db")):
            app.use(database_url)
            app.enqueue(shop.note.new("inner"))
            assert drain(app) == Counts(finished=1)
        assert app._connected.address is outer
        assert drain(app) == Counts(finished=1)
    assert shop.done == ["inner", "outer"]


def test_a_block_that_cannot_begin_keeps_the_apps_database(
    shop: RealShop, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    monkeypatch.setenv("SQLQ_DATABASE_URL", database_url)
    own = shop.app._connected.address
    for url, said in (
        (UNSET, "the test database's URL is None"),
        ("sqlite:////no/folder/x.db", "there is no directory"),
    ):
        with pytest.raises(sqlq.errors.ConfigurationError, match=said), on_database(shop.app, url):
            do_everything(shop)
        assert shop.app._connected.address is own
    assert available(shop.app) == [REAL]


def test_a_worker_refuses_to_run(shop: RealShop, place: dict[str, Any]) -> None:
    workers = [shop.app.worker(drain=True), shop.app.worker(["default"], drain=True)]
    shop.app.use(place["url"], schema=place.get("schema"))
    with on_database(shop.app, **place):
        for worker in workers:
            with pytest.raises(sqlq.errors.ConfigurationError, match="database is open, and this worker"):
                worker.run()
        do_everything(shop)
    assert shop.done == []


def test_kept_connections_refuse_writes(shop: RealShop, place: dict[str, Any]) -> None:
    app, database = shop.app, shop.app.database
    kept = (database, database.for_loops, database.for_claims)
    enqueue = app._connected.enqueuer.enqueue
    enqueue([])
    changes: list[Callable[[], object]] = [
        partial(app.jobs.cancel, queue="default"),
        partial(app.queues.pause, "default"),
        *(partial(enqueue, [shop.note.new("x").set(unique_key=key)]) for key in (None, "x")),
        *(partial(each.run, lambda conn: None) for each in kept),
        *(partial(each.run_statement, "SELECT 1", ()) for each in kept),
        *(each.begin().__enter__ for each in kept),
        *(each.read().__enter__ for each in kept),
        *(each.single_statements().__enter__ for each in kept),
    ]
    with on_database(app, **place):
        for change in changes:
            with pytest.raises(sqlq.errors.ConfigurationError, match="a test database is open"):
                change()


@pytest.fixture
def other(shop: RealShop, tmp_path: Path, postgresql: PostgreSQL, database_url: str) -> Iterator[str]:
    """Another real database of the same kind, with tables."""
    is_a_file = database_url.startswith("sqlite")
    url = sqlite_url(tmp_path / "other.db") if is_a_file else postgresql.create_database()
    app = sqlq.App(url)
    app.migrate()
    RealShop(app).fill()
    app.close()
    before = rows(url)
    yield url
    assert rows(url) == before
    if not is_a_file:
        postgresql.drop_database(url)


def test_a_session_on_another_database_is_refused(shop: RealShop, other: str, place: dict[str, Any]) -> None:
    engine = create_engine(other)
    with on_database(shop.app, **place), Session(engine) as session:
        for _ in range(2):
            with pytest.raises(sqlq.EnqueueError, match=r"database is open, .* with sqlq\.testing\.on_"):
                shop.app.enqueue(shop.note.new("x"), session=session)
        session.execute(text("SELECT 1"))
        session.commit()
    engine.dispose()


def test_the_jobs_of_an_app_that_no_test_has_placed_are_not_run(
    shop: RealShop, place: dict[str, Any], database_url: str
) -> None:
    """An application factory may well make a second App, on the real database."""
    second = RealShop(sqlq.App(database_url))
    with on_database(shop.app, **place):
        with pytest.raises(sqlq.errors.ConfigurationError, match=r"drain\(\) would run the jobs of .*sqlq"):
            drain(second.app)
        with on_database(second.app, **place):
            second.app.enqueue(second.note.new("test"))
            assert drain(second.app) == Counts(finished=1)
    assert second.done == ["test"]
    second.app.close()


def test_on_database_does_not_end_inline(shop: RealShop, place: dict[str, Any]) -> None:
    with inline(shop.app):
        with on_database(shop.app, **place) as app:
            app.enqueue(shop.note.new("1"))
        shop.app.enqueue(shop.note.new("2"))
    with on_database(shop.app, **place), inline(shop.app):
        shop.app.use("sqlite:///nowhere/x.db")
        shop.app.enqueue(shop.note.new("3"))
    assert shop.done == ["1", "2", "3"]
