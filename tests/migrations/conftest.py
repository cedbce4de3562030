"""Fixtures of the tests of migrations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Engine]:
    """An engine on a database with nothing in it."""
    engine = create_engine(empty_database_url)
    yield engine
    engine.dispose()
