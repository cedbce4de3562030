"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faces.command import Command


@pytest.fixture
def bare(tmp_path: Path) -> Command:
    """`sqlq` where no database is named."""
    return Command(tmp_path)


@pytest.fixture
def sqlq_(tmp_path: Path, database_url: str) -> Command:
    """`sqlq` on a database with tables, named by SQLQ_DATABASE_URL."""
    return Command(tmp_path, SQLQ_DATABASE_URL=database_url)
