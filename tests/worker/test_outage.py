"""What is said of a database that is away, once for all loops of a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.worker.outage import Outage

on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def outages_end() -> Iterator[None]:
    yield
    Outage._since = None
    Outage._said_at.clear()


@pytest.fixture
def refusal(database_url: str) -> DBAPIError:
    """What a standby answers to an UPDATE."""
    engine = create_engine(database_url, connect_args={"options": "-c default_transaction_read_only=on"})
    try:
        with engine.begin() as conn, pytest.raises(DBAPIError) as refused:
            conn.execute(text("CREATE TABLE note (id INTEGER)"))
    finally:
        engine.dispose()
    return refused.value


@on_postgresql
def test_an_answer_to_a_question_does_not_end_the_trouble_with_a_standby(
    refusal: DBAPIError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    listening, claiming = Outage("listening"), Outage("claiming")
    listening.met(refusal)
    claiming.met(refusal)
    claiming.over(wrote=False)
    claiming.met(refusal)
    assert [record.getMessage().split("(")[0].strip() for record in caplog.records] == [
        "the database takes no writes"
    ]
    claiming.over()
    listening.over()
    assert caplog.messages[1:] == [caplog.messages[1]], "it is back is said once"
    assert caplog.messages[1].startswith("the database is back after")


def test_an_answer_to_a_question_ends_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    claiming = Outage("claiming")
    claiming.met(DBAPIError("SELECT 1", None, ConnectionError("refused")))
    claiming.over(wrote=False)
    assert caplog.messages[0].split(" (")[0] == "the database does not answer"
    assert caplog.messages[1].startswith("the database is back after")


@on_postgresql
def test_a_connection_left_over_from_an_outage_is_no_second_one(
    refusal: DBAPIError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    beating, claiming = Outage("beating"), Outage("claiming")
    refusal.connection_invalidated = True  # as a worker has its engine mark it
    for outage in (beating, claiming):
        outage.met(refusal)
        outage.met(refusal)
    claiming.over()
    told = list(caplog.messages)
    assert beating.met(refusal) == 0, "its next connection is a new one, so it tries at once"
    beating.over()
    assert caplog.messages == told
    claiming.met(refusal)
    claiming.met(refusal)
    assert len(caplog.messages) == len(told) + 1, "the next outage is told"


def refused(database_url: str, *statements: str) -> DBAPIError:
    """What the database says to the last of some statements."""
    engine = create_engine(database_url)
    try:
        with engine.connect() as conn:
            for statement in statements[:-1]:
                conn.execute(text(statement))
            with pytest.raises(DBAPIError) as met:
                conn.execute(text(statements[-1]))
    finally:
        engine.dispose()
    return met.value


def test_what_is_refused_is_told_where_others_speak_of_outages(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others do not meet it: nobody would ever hear of a chore that is never done."""
    pruning, sweeping = Outage("pruning jobs", quiet=True), Outage("sweeping", quiet=True)
    pruning.met(DBAPIError("SELECT 1", None, ConnectionError("refused")))
    assert caplog.messages == []
    error = refused(database_url, "SELECT * FROM nowhere")
    for outage in (pruning, sweeping, pruning, sweeping):
        outage.met(error)
    assert [said.split(":")[0] for said in caplog.messages] == [
        f"the database refuses what {doing} needs" for doing in ("pruning jobs", "sweeping")
    ]
    assert "nowhere" in caplog.messages[0]


@on_postgresql
def test_a_right_that_is_missing_is_told_with_its_grant(
    app: sqlq.App, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = refused(database_url, "SET ROLE pg_monitor", "DELETE FROM failed_jobs WHERE id = 1")
    Outage("pruning jobs", quiet=True).met(error)
    assert caplog.messages == [
        "the database refuses what pruning jobs needs: permission denied for table failed_jobs; "
        "GRANT SELECT, DELETE ON failed_jobs TO the role in the worker's URL; trying again once it is mended"
    ]
