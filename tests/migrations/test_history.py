"""The history: one line of revisions, all of which keep to their day."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from sqlq.database import migrate, standing
from sqlq.schema import version
from tests.kit import needs

CHECKOUT = Path(version.__file__).parents[2]


def test_head_is_alembics_head() -> None:
    assert ScriptDirectory(str(migrate.location())).get_heads() == [version.HEAD]


def test_the_history_is_one_line_without_gaps() -> None:
    revisions = list(ScriptDirectory(str(migrate.location())).walk_revisions())[::-1]
    assert [r.revision for r in revisions] == [f"{n:04}" for n in range(1, len(revisions) + 1)]
    assert revisions[0].down_revision is None
    assert all(later.down_revision == earlier.revision for earlier, later in pairwise(revisions))
    assert len(revisions) == len(list(migrate.location().glob("versions/*.py")))


def test_no_revision_imports_sqlq() -> None:
    for file in migrate.location().glob("versions/*.py"):
        nodes = [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        modules = {
            node.module if isinstance(node, ast.ImportFrom) else alias.name
            for node in nodes
            for alias in node.names
        }
        assert not [module for module in modules if module and module.partition(".")[0] == "sqlq"], file


def test_the_version_is_read_without_alembic() -> None:
    program = "import sys, sqlq.schema.version; print('alembic' in sys.modules)"
    assert run(sys.executable, "-c", program).stdout.split() == ["False"]


def test_an_installation_without_revisions_is_reported_in_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "sqlq", tmp_path / "sqlq", ignore=shutil.ignore_patterns("migrations"))
    done = run(
        sys.executable,
        "-c",
        "from sqlq.database import migrate; migrate.location()",
        place=tmp_path,
        check=False,
    )
    assert "install it again" in done.stderr.splitlines()[-1]


@pytest.mark.integration
def test_alembics_own_command_works_in_a_checkout(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    for _ in range(2):
        assert "Warning" not in alembic("upgrade", "head", url=empty_database_url).stderr
    assert standing.check(engine, None).standing == "up to date"
    assert alembic("current", url=empty_database_url).stdout.split() == [version.HEAD, "(head)"]
    alembic("downgrade", "base", url=empty_database_url)
    assert standing.check(engine, None).standing == "missing"
    engine.dispose()


@needs("schemas", empty=True)
def test_alembics_own_command_obeys_sqlq_schema(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    alembic("upgrade", "head", url=empty_database_url, SQLQ_SCHEMA="queueing")
    assert standing.check(engine, None).standing == "missing"
    assert standing.check(engine, "queueing").standing == "up to date"
    engine.dispose()


def test_alembics_own_command_prints_sql(empty_database_url: str) -> None:
    script = alembic("upgrade", "head", "--sql", url=empty_database_url).stdout
    assert re.search(r"CREATE TABLE (IF NOT EXISTS )?jobs \(", script)
    assert f"INSERT INTO sqlq_version (version_num) VALUES ('{version.HEAD}')" in script


def alembic(*arguments: str, url: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Alembic's command at the top of the checkout."""
    return run(sys.executable, "-m", "alembic", *arguments, settings={"SQLQ_DATABASE_URL": url} | settings)


def run(
    *command: str, place: Path = CHECKOUT, check: bool = True, settings: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the directory where it finds sqlq, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQLQ_")} | {
        "PYTHONPATH": str(place)
    }
    done = subprocess.run(
        command,
        cwd=place,
        env=environment | (settings or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


PUBLISHED = {"0001": "8b31260d37bd8ec83cc2f3465d0680c5fc4323c91c1b5d8520e0467576d5b245"}
"""The SHA-256 of each published revision, with its scripts.

Its tables exist in many databases, so it cannot change.
"""


def test_no_published_revision_changes() -> None:
    versions = migrate.location() / "versions"
    found = {file.name[:4]: hashlib.sha256(file.read_bytes()) for file in versions.glob("*.py")}
    for script in sorted(versions.glob("*/*.sql")):
        found[script.parent.name].update(script.read_bytes())
    assert {number: each.hexdigest() for number, each in found.items()} == PUBLISHED, (
        "write what changes as a new revision, and note it here once it is published"
    )
