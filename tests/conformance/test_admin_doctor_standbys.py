"""The doctor reports on standbys: whether commits wait for one, which server answers, what keeps WAL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import make_url

import sqlq
from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding, Verdict
from sqlq.admin.storage import storage
from tests.faults.standby import Pair, pair_of_servers
from tests.kit import for_each
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with pair_of_servers() as pair:
        yield pair


@pytest.fixture
def pair(servers: Pair) -> Iterator[Pair]:
    """The servers, whose settings are as before after each test."""
    yield servers
    servers.standby.configure("synchronous_standby_names = ''")


def about(check: str, url: str) -> list[Finding]:
    with closing(sqlq.App(url)) as app:
        return [finding for finding in Doctor(app.database).examine() if finding.check == check]


def tell(pair: Pair, *statements: str) -> None:
    with psycopg.connect(pair.primary.url(pair.database).replace("+psycopg", ""), autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def test_the_doctor_reports_whether_commits_wait_for_a_standby(pair: Pair) -> None:
    def said() -> tuple[Verdict, str]:
        (found,) = about("standbys", pair.primary.url(pair.database))
        return found.verdict, found.said

    assert said() == (
        Verdict.CHECK,
        "1 standby follows, and commits wait for none: a failover loses the jobs acknowledged in its last "
        "moments",
    )
    pair.standby.configure("synchronous_standby_names = '*'")
    wait_until(lambda: said()[0] is Verdict.OK, what="the standby being synchronous")
    assert said()[1] == "commits wait for a standby (synchronous_standby_names is *)"
    with closing(sqlq.App(pair.primary.url(pair.database))) as app:
        (reading,) = (each for each in storage(app.database).readings if each.name == "standbys")
    assert ": streaming, sync" in reading.value
    assert not reading.findings
    pair.standby.configure("synchronous_standby_names = 'elsewhere'")
    wait_until(lambda: said()[0] is Verdict.TO_DO, what="the standby being none of these")
    assert "a standby that is away (synchronous_standby_names is elsewhere)" in said()[1]
    assert not about("standbys", pair.standby.url(pair.database)), "it is the primary that knows"


def test_the_doctor_names_the_grant_to_a_role_that_may_not_see_standbys(pair: Pair) -> None:
    tell(pair, "CREATE ROLE poor LOGIN")
    (found,) = about(
        "standbys", make_url(pair.primary.url(pair.database)).set(username="poor").render_as_string()
    )
    assert found.remedy == "GRANT pg_read_all_stats to the role in the URL"


def test_the_server_that_answers_is_named(pair: Pair) -> None:
    (found,) = about("primary", pair.standby.list_url(pair.database, first=True))
    assert (found.verdict, found.said) == (
        Verdict.OK,
        f"the server 127.0.0.1:{pair.primary.port} takes writes",
    )
    (found,) = about("primary", pair.standby.url(pair.database))
    assert found.verdict is Verdict.TO_DO
    assert found.said.startswith(f"the server 127.0.0.1:{pair.standby.port} is a standby")


def test_the_doctor_checks_each_host_of_a_list(pair: Pair) -> None:
    url = pair.standby.list_url(pair.database)
    (found,) = about("hosts", url)
    ports = pair.primary.port, pair.standby.port
    assert found.verdict is Verdict.OK
    assert found.said == "127.0.0.1:{} is a primary; 127.0.0.1:{} is a standby".format(*ports)
    first, *_ = about("hosts", url.replace("&target_session_attrs=read-write", ""))
    assert (first.verdict, first.remedy) == (
        Verdict.CHECK,
        "add target_session_attrs=read-write to the URL",
    )
    first, *_ = about("hosts", url.replace("&target", "&host=nowhere.invalid:5432&target"))
    assert first.verdict is Verdict.CHECK
    assert first.said.startswith("the host nowhere.invalid:5432 does not answer: ")
    assert not about("hosts", pair.primary.url(pair.database))


@for_each(
    ("whose", "said"),
    [
        ("ROLE weak", "for the role weak: "),
        ("ROLE weak IN DATABASE {}", "for the role weak in the database {}: "),
        ("DATABASE {}", "synchronous_commit is remote_write: "),
    ],
)
def test_commits_that_wait_for_less_are_named(pair: Pair, whose: str, said: str) -> None:
    tell(pair, "CREATE ROLE weak")
    try:
        tell(pair, f"ALTER {whose.format(pair.database)} SET synchronous_commit = remote_write")
        (found,) = durability(pair)
        assert found.verdict is Verdict.CHECK
        assert said.format(pair.database) in found.said
        assert "set synchronous_commit = on" in str(found.remedy)
    finally:
        tell(pair, f"ALTER {whose.format(pair.database)} RESET synchronous_commit", "DROP ROLE weak")


def durability(pair: Pair) -> list[Finding]:
    """The tests' servers run with fsync off, which would hide every other finding."""
    from sqlq.database.postgresql import health

    told: Callable[..., dict[str, str]] = health.settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "settings", lambda conn, names: told(conn, names) | {"fsync": "on"})
        return about("durability", pair.primary.url(pair.database))


def test_an_idle_slot_is_named_with_the_wal_it_keeps(pair: Pair) -> None:
    tell(pair, "SELECT pg_create_physical_replication_slot('gone', true)", "CREATE TABLE filler AS SELECT 1")
    try:
        (found,) = about("slots", pair.primary.url(pair.database))
        assert found.verdict is Verdict.CHECK
        assert found.said.startswith("the replication slot gone is idle, and keeps ")
        assert found.said.endswith(" of WAL")
        assert "pg_drop_replication_slot('gone')" in str(found.remedy)
    finally:
        tell(pair, "SELECT pg_drop_replication_slot('gone')", "DROP TABLE filler")
    (found,) = about("slots", pair.primary.url(pair.database))
    assert found.verdict is Verdict.OK


def test_the_doctor_reports_the_lag_of_the_replica_in_sqlq_read_url(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLQ_READ_URL", pair.standby.url(pair.database))
    (found,) = about("replica", pair.primary.url(pair.database))
    assert found.verdict is Verdict.OK
    assert found.said.endswith(" behind")
