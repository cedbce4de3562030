"""What is said of a database that is away, once for all loops of a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

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
