"""The doctor reports on standbys: whether commits wait for one, which server answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import make_url

import sqlq
from sqlq.admin.doctor import postgresql
from sqlq.admin.doctor.doctor import examine
from sqlq.admin.doctor.finding import Finding, Verdict
from tests.kit import for_each, wait_until
from tests.kit.standby import Pair, pair_of_servers


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
        return [finding for finding in examine(app.database) if finding.check == check]


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
    pair.standby.configure("synchronous_standby_names = 'elsewhere'")
    wait_until(lambda: said()[0] is Verdict.TO_DO, what="the standby being none of these")
    assert "a standby that is away (synchronous_standby_names is elsewhere)" in said()[1]
    (found,) = about("standbys", pair.standby.url(pair.database))
    assert found.verdict is Verdict.OK, "it is the primary that knows"


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(postgresql.DURABILITY, "fsync", {})
        return about("durability", pair.primary.url(pair.database))
