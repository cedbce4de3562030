"""The databases that tests run on, and a new one for a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL

import sqlq
from tests.kit.mariadb import MariaDB
from tests.kit.postgresql import PostgreSQL

DATABASES = os.environ.get("SQLQ_TEST_DATABASES", "sqlite,postgresql").split(",")
SERVERS = [kind for kind in DATABASES if kind != "sqlite"]
"""Those of them that are reached over a network."""


def sqlite_url(file: Path) -> str:
    """Return the URL of a SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string()


@contextmanager
def fresh_database(server: PostgreSQL | MariaDB, template: str | None = None) -> Iterator[str]:
    """Make a database while the block lasts, empty or as a template; yields its URL."""
    url = server.create_database(template) if isinstance(server, PostgreSQL) else server.create_database()
    try:
        yield url
    finally:
        server.drop_database(url)


def migrate(url: str) -> None:
    """Make sqlq's tables."""
    app = sqlq.App(url)
    app.migrate()
    app.close()
