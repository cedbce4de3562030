"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from tests.faces.command import Command
from tests.faces.pages import Desk, around


@pytest.fixture
def bare(tmp_path: Path) -> Command:
    """`sqlq` where no database is named."""
    return Command(tmp_path)


@pytest.fixture
def sqlq_(tmp_path: Path, database_url: str) -> Command:
    """`sqlq` on a database with tables, named by SQLQ_DATABASE_URL."""
    return Command(tmp_path, SQLQ_DATABASE_URL=database_url)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def names(app: sqlq.App, engine: Engine) -> dict[str, Any]:
    """The names that the pages' Python finds around it."""
    return around(app, engine)
