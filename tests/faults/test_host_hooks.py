"""A host's hooks on the class Engine count for sqlq's engines, too; what they make of errors does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError

import sqlq
from tests.kit import refuse, wait_until, working


class HostError(Exception): ...


def raises_the_drivers(context: ExceptionContext) -> None:
    raise context.original_exception


def raises_its_own(context: ExceptionContext) -> None:
    raise HostError("the database is not available")


def returns_its_own(context: ExceptionContext) -> HostError:
    return HostError("the database is not available")


@pytest.fixture(params=[raises_the_drivers, raises_its_own, returns_its_own], autouse=True)
def hook(request: pytest.FixtureRequest) -> Iterator[Callable[[ExceptionContext], object]]:
    event.listen(Engine, "handle_error", request.param)
    yield request.param
    event.remove(Engine, "handle_error", request.param)


@pytest.mark.parametrize("beside", [False, True])
def test_a_refused_outcome_does_not_delay_others(database_url: str, beside: bool) -> None:
    engine = create_engine(database_url)
    app = sqlq.App(engine=engine) if beside else sqlq.App(database_url)
    refuse(engine, "INSERT ON finished_jobs", "NEW.id = 3")
    task = app.task(name="t", max_attempts=1)(lambda: None)
    made = app.enqueue_many([task.new() for _ in range(10)])
    others = [job.id for job in made if job.id != 3]
    with working(app):
        wait_until(lambda: all(app.jobs.get(id).state == "finished" for id in others), what="the nine others")
    app.close()
    engine.dispose()


def raising(*codes: object) -> list[Any]:
    """Return statements that raise these errors: SQLSTATEs of PostgreSQL, or numbers of MariaDB."""
    statements = {
        code: ("mariadb", f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {code}")
        if isinstance(code, int)
        else ("postgresql", f"DO $$ BEGIN RAISE SQLSTATE '{code}'; END $$")
        for code in codes
    }
    return [pytest.param(*each, id=f"{code}-{each[0]}") for code, each in statements.items()]


@pytest.mark.parametrize(
    ("database_url", "error"), raising("40001", "40P01", 1213, 1020, 1205), indirect=["database_url"]
)
def test_a_transaction_that_the_database_rolled_back_runs_again(app: sqlq.App, error: str) -> None:
    tries = []

    def work(conn: Connection) -> None:
        tries.append(1)
        if len(tries) == 1:
            conn.exec_driver_sql(error)

    app.database.run(work)
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("database_url", "error"), raising("25006", 1290, 1792, 1836, 1047), indirect=["database_url"]
)
def test_a_useless_connection_is_invalidated(app: sqlq.App, error: str) -> None:
    """For example the connection of a standby, which is read-only."""
    with pytest.raises(DBAPIError) as caught, app.database.begin() as conn:
        conn.exec_driver_sql(error)
    assert caught.value.connection_invalidated


def test_an_outage_raises_sqlalchemys_error(app: sqlq.App, postgresql: object, database_url: str) -> None:
    if app.database.engine.dialect.name == "sqlite":
        elsewhere = sqlq.App("sqlite:////proc/version")  # a file, but none that can be written
    else:
        elsewhere = sqlq.App(app.database.engine.url.set(host="127.0.0.1", port=1))
    with pytest.raises(DBAPIError):
        elsewhere.jobs.list()
    elsewhere.close()
