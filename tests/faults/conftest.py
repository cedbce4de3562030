"""Fixtures of the fault tests: a proxy, and what SQLQ_TEST_OPERATED turns on, for which see `operated`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from sqlalchemy import make_url

from sqlq.payload.encryption import new_key
from tests.faults import operated
from tests.kit.proxy import Proxy


@pytest.fixture(scope="session", autouse=True)
def keys() -> Iterator[None]:
    """Keys for every process of the tests, which outlive what is made for several of them."""
    with pytest.MonkeyPatch.context() as patch:
        if operated.is_on():
            patch.setenv("SQLQ_KEYS", new_key())
            patch.setenv("SQLQ_ENCRYPTION", "encrypt")
            patch.setenv("SQLQ_PLAIN", "accept")  # tests write rows by hand
        yield


@pytest.fixture(autouse=True)
def waiters(request: pytest.FixtureRequest, keys: None) -> Iterator[None]:
    """Somebody who waits for each job of the test's database."""
    has_jobs = operated.is_on() and "database_url" in request.fixturenames
    with operated.Waiters(request.getfixturevalue("database_url")) if has_jobs else nullcontext():
        yield


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    """A way to the database, if there is one that leads over a network."""
    with Proxy(make_url(database_url).port or 1) as proxy:
        yield proxy
