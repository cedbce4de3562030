"""A project of Django's on either database; its own test runner runs the tests in `project/`."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.faces.django.project_of_tests import Project
from tests.kit.databases import fresh_database, sqlite_url
from tests.kit.postgresql import PostgreSQL

collect_ignore = ["project"]


@pytest.fixture(scope="session")
def migrated_sqlite(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with sqlq's tables and the project's, to be copied."""
    folder = tmp_path_factory.mktemp("django")
    shutil.copyfile(migrated_sqlite, file := folder / "sqlq.db")
    Project(folder / "project", sqlite_url(file)).ok("migrate")
    with closing(sqlite3.connect(file)) as connection:  # which has a log beside it yet
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file


@pytest.fixture(scope="session")
def migrated_postgresql(
    postgresql: PostgreSQL, migrated_postgresql: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a database with sqlq's tables and the project's, to be a template."""
    with fresh_database(postgresql, template=migrated_postgresql) as url:
        Project(tmp_path_factory.mktemp("django") / "project", url).ok("migrate")
        yield url


@pytest.fixture
def bare_project(tmp_path: Path, empty_database_url: str) -> Project:
    """The project, on a database with nothing in it."""
    return Project(tmp_path / "project", empty_database_url)


@pytest.fixture
def project(tmp_path: Path, database_url: str) -> Project:
    """The project, on a database with sqlq's tables and its own."""
    project = Project(tmp_path / "project", database_url)
    if database_url.startswith("mariadb"):  # which has no templates
        project.ok("migrate")
    return project
