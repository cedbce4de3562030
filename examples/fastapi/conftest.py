"""The shop on a database for each test: an SQLite file, or what SQLQ_TEST_DATABASE_URL names."""

from collections.abc import AsyncIterator

import httpx
import pytest
import shop
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import sqlq


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def sqlq_metadata() -> MetaData:
    # sqlq_app creates these tables for each test, and drops them after it
    return shop.Model.metadata


def async_engine(app: sqlq.App) -> AsyncEngine:
    """Make an engine of the test's database, with its asynchronous driver."""
    match app.url.get_backend_name():
        case "sqlite":
            return create_async_engine(app.url.set(drivername="sqlite+aiosqlite"))
        case "postgresql":
            url = app.url.set(drivername="postgresql+asyncpg")
            return create_async_engine(
                url.difference_update_query(["options"]),
                connect_args={"server_settings": {"search_path": app.schema}},
            )
        case _:
            return create_async_engine(app.url.set(drivername="mariadb+asyncmy"))


@pytest.fixture
async def database(sqlq_app: sqlq.App) -> AsyncIterator[sqlq.App]:
    """The App and the sessions of the shop, on the test's database and event loop."""
    engine = async_engine(sqlq_app)
    shop.new_session.configure(bind=engine)
    yield sqlq_app
    shop.new_session.configure(bind=shop.engine)
    await engine.dispose()


@pytest.fixture
async def client(database: sqlq.App) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(shop.web)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """A mail service that takes all; its requests."""
    taken: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        taken.append(request)
        return httpx.Response(202)

    service = httpx.MockTransport(take)
    monkeypatch.setattr(
        shop, "mail_client", lambda: httpx.AsyncClient(transport=service, base_url="http://mail")
    )
    return taken
