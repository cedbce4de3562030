"""`sqlq` at a MariaDB that refuses, or goes away: it prints one sentence, and loses no job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import make_url

from tests.kit import let_pass, needs, wait_until
from tests.kit.command import Command
from tests.kit.databases import fresh_database
from tests.kit.mariadb import MariaDB, OwnMariaDB

Account = Callable[[str], str]


@pytest.fixture
def account(mariadb: MariaDB, database_url: str) -> Iterator[Account]:
    """Make an account with a right to something of the database; return the URL of that for it."""
    name, url = f"sqlq_{uuid4().hex[:12]}", make_url(database_url)
    mariadb.administer(f"CREATE USER {name} IDENTIFIED BY 'secret'")

    def grant(right: str) -> str:
        mariadb.administer(f"GRANT {right.format(database=url.database)} TO {name}")
        return url.set(username=name, password="secret").render_as_string(hide_password=False)

    yield grant
    mariadb.administer(f"DROP USER {name}")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown database": ({"database": "nodb"}, "Unknown database 'nodb'; create it first"),
    "a wrong password": ({"password": "secret"}, "Access denied .*; check the user and password in the URL"),
    "a URL of MySQL": ({"drivername": "mysql+pymysql"}, r"not on MySQL, .*: for MariaDB write mariadb\+"),
    "no server": ({"port": 1}, "start the server, or check host and port in the URL"),
}


@needs("mariadb")
@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_url_of_mariadb_is_reported_in_one_sentence(
    bare: Command, database_url: str, what: str
) -> None:
    changes, words = REFUSED[what]
    url = make_url(database_url).set(**changes).render_as_string(hide_password=False)
    for command in (["status"], ["migrate"], ["--app", "shop:app", "enqueue", "shop.send", "7"]):
        said = bare("-d", url, *command).sentence()
        assert "secret" not in said
        assert re.search(words, said), said


OTHER_SERVERS = {
    "8.0.36": "sqlq runs on MariaDB, and {url} leads to MySQL 8.0.36",
    "10.6.18-MariaDB": "sqlq needs MariaDB 10.11 or newer; {url} is version 10.6.18",
}


@pytest.mark.parametrize("version", OTHER_SERVERS)
@needs("mariadb")
def test_another_server_is_reported_in_one_sentence(bare: Command, database_url: str, version: str) -> None:
    with closing(OwnMariaDB(f"--version={version}")) as server:
        url = server.url("mysql")
        said = [bare("-d", url, command).sentence() for command in ("status", "migrate")]
        assert all(
            OTHER_SERVERS[version].format(url=url) in each for each in (*said, bare("-d", url, "doctor").out)
        )


@needs("mariadb")
def test_a_missing_right_is_reported_in_one_sentence(
    bare: Command, database_url: str, account: Account
) -> None:
    enqueue = ("--app", "shop:app", "enqueue", "shop.send", "7")
    url = account("SELECT ON mysql.help_topic")
    assert "to database" in bare("-d", url, "status").sentence()
    url = account("CREATE TEMPORARY TABLES ON {database}.*")
    assert "or GRANT SELECT on them to the account" in bare("-d", url, "status").sentence()
    url = account("SELECT ON {database}.*")
    assert bare.ok("-d", url, "status")
    for command in (enqueue, ("queues", "pause", "mail")):
        said = bare("-d", url, *command).sentence()
        assert re.search("command denied .* GRANT SELECT, INSERT, UPDATE, DELETE on all tables", said), said
    said = bare("-d", url, "migrate", "--down", "base", "--force").sentence()
    assert "GRANT ALL on" in said
    account("ALL ON {database}.*")
    bare.ok("-d", url, *enqueue)
    assert bare("-d", url, "jobs", "--json").json()


@needs("mariadb")
def test_a_replica_that_is_read_only_is_reported_in_one_sentence(
    bare: Command, database_url: str, account: Account, mariadb: MariaDB
) -> None:
    url = account("ALL ON {database}.*")
    enqueue = ("-d", url, "--app", "shop:app", "enqueue", "shop.send", "7")
    mariadb.administer("SET GLOBAL read_only = 1")
    try:
        for command in (enqueue, ("-d", url, "queues", "pause", "mail")):
            assert "use the primary server" in bare(*command).sentence()
        assert "use the primary server" in bare("-d", url, "migrate", "--down", "base", "--force").sentence()
        assert "this server is read-only" in bare("-d", url, "doctor").out
    finally:
        mariadb.administer("SET GLOBAL read_only = 0")


@needs("mariadb")
def test_sessions_that_the_server_ends_soon_are_not_missed(
    sqlq_: Command, database_url: str, mariadb: MariaDB
) -> None:
    (before,) = mariadb.administer("SELECT @@global.wait_timeout")
    mariadb.administer("SET GLOBAL wait_timeout = 1")
    try:
        with sqlq_.working():
            sqlq_.wait_for_worker()
            let_pass(3, "the server ends sessions that nobody uses")
            assert sqlq_.shop("enqueue", "wait", "late").code == 0
            sqlq_.wait_for("late.started")
            sqlq_.touch("late.go")
            wait_until(lambda: finished(sqlq_), what="the job finished")
        assert "WARNING" not in sqlq_.log()
    finally:
        mariadb.administer(f"SET GLOBAL wait_timeout = {before[0]}")


def finished(command: Command) -> bool:
    jobs = command("jobs", "--state", "finished", "--json").json()
    return [(job["attempts"], job["state"]) for job in jobs] == [(1, "finished")]


@needs("mariadb")
def test_a_server_that_dies_costs_no_job(
    sqlq_: Command, database_url: str, restartable_mariadb: OwnMariaDB
) -> None:
    """It dies before the claim, while the handler runs, and again before the job is settled."""
    server = restartable_mariadb
    try:
        with sqlq_.working():
            sqlq_.wait_for_worker()
            server.stop("immediate")
            assert "start the server, or check host" in sqlq_.shop("enqueue", "wait", "b").sentence()
            wait_until(lambda: "does not answer" in sqlq_.log(), what="the worker saying that it waits")
            server.start()
            assert sqlq_.shop("enqueue", "wait", "a").code == 0
            sqlq_.wait_for("a.started")
            server.restart("immediate")
            server.stop("immediate")
            sqlq_.touch("a.go")
            sqlq_.wait_for("a.ended")
            server.start()
            wait_until(lambda: finished(sqlq_), what="the job finished")
        assert "Traceback" not in sqlq_.log()
    finally:
        if not server._answers():
            server.start()


def test_a_migration_whose_server_dies_goes_on(bare: Command, restartable_mariadb: OwnMariaDB) -> None:
    server = restartable_mariadb
    with fresh_database(server) as url:
        bare.ok("-d", url, "migrate")
        with server._connect() as holder, holder.cursor() as cursor, ThreadPoolExecutor(1) as pool:
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT * FROM {make_url(url).database}.jobs")
            migration = pool.submit(bare, "-d", url, "migrate", "--down", "base", "--force")
            waiting = "SELECT 1 FROM information_schema.processlist WHERE state LIKE 'Waiting for table%'"
            wait_until(lambda: server.administer(waiting), what="the migration waiting for a table")
            server.restart("immediate")
            assert migration.result().sentence().startswith(url)
        bare.ok("-d", url, "migrate", "--down", "base", "--force")
        bare.ok("-d", url, "migrate")
        bare.ok("-d", url, "--app", "shop:app", "enqueue", "shop.send", "7")
