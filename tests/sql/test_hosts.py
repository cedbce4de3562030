"""The order in which sqlq's own engines try the hosts of a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from sqlalchemy import URL, event, make_url, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.database.database import Database
from tests.kit import needs
from tests.kit.proxy import Proxy

pytestmark = needs("postgresql")


@pytest.fixture
def hosts(app: sqlq.App, database_url: str) -> Iterator[list[Proxy]]:
    """Yield two ways to the same server."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(make_url(database_url).port or 1)) for _ in range(2)]


def opened(hosts: list[Proxy], database_url: str) -> Database:
    given = make_url(database_url)
    query = {"host": [f"127.0.0.1:{each.port}" for each in hosts]}
    return Database(URL.create(given.drivername, given.username, database=given.database, query=query))


def query(database: Database) -> None:
    with database.read() as conn:
        conn.execute(text("SELECT 1"))


def run_raw(database: Database) -> None:
    database.run_raw(lambda ask: ask("SELECT 1", None))


def tried(database: Database) -> list[str]:
    """Return the ports of each connection that is made from now on, in the order in which they are tried."""
    ports: list[str] = []
    event.listen(database.engine, "do_connect", lambda *given: ports.append(given[3]["port"]))
    return ports


@pytest.mark.parametrize("use", [query, run_raw])
def test_a_host_is_tried_last_when_its_connection_has_broken(
    hosts: list[Proxy], database_url: str, use: Callable[[Database], None]
) -> None:
    first, second = hosts
    with opened(hosts, database_url) as database:
        ports = tried(database)
        use(database)
        first.drop()
        with suppress(DBAPIError):
            use(database)
        use(database)
    assert ports == [f"{first.port},{second.port}", f"{second.port},{first.port}"]


def test_a_host_stays_first_when_a_connection_to_it_comes_back_late(
    hosts: list[Proxy], database_url: str
) -> None:
    first, second = hosts
    with opened(hosts, database_url) as database:
        with database.read():
            database.close()
        ports = tried(database)
        query(database)
    assert ports == [f"{first.port},{second.port}"]


def test_the_port_of_hosts_is_for_libpq_to_find_when_the_url_has_none(
    hosts: list[Proxy], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_url(database_url)
    monkeypatch.setenv("PGPORT", str(hosts[0].port))
    url = URL.create(given.drivername, given.username, host="127.0.0.1,localhost", database=given.database)
    with Database(url) as database, database.read() as conn:
        assert conn.connection.driver_connection.info.port == hosts[0].port  # type: ignore[union-attr]


def test_a_host_is_tried_first_when_it_has_answered_last(hosts: list[Proxy], database_url: str) -> None:
    first, second = hosts
    first.target = 1  # where nobody answers
    with opened(hosts, database_url) as database:
        ports = tried(database)
        query(database)
        database.close()
        query(database)
    assert ports == [f"{first.port},{second.port}", f"{second.port},{first.port}"]
