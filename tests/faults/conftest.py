"""Fixtures of the fault tests that SQLQ_TEST_OPERATED turns on: see `operated`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sqlq.payload.encryption import new_key
from tests.faults import operated


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
    if operated.is_on() and "database_url" in request.fixturenames:
        with operated.Waiters(request.getfixturevalue("database_url")):
            yield
    else:
        yield
