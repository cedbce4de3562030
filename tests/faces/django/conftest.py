"""What the tests of `sqlq.django` share: a project of Django's, on either database, in processes of its own.

What is in `project/` is run by Django's test runner, in the project, see `test_inside.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faces.django.project_of_tests import Project

collect_ignore = ["project"]


@pytest.fixture
def bare_project(tmp_path: Path, empty_database_url: str) -> Project:
    """The project, on a database with nothing in it."""
    return Project(tmp_path / "project", empty_database_url)


@pytest.fixture
def project(tmp_path: Path, database_url: str) -> Project:
    """The project, on a database with sqlq's tables and its own."""
    project = Project(tmp_path / "project", database_url)
    project.ok("migrate")
    return project
