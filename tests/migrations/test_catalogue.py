"""The tables that statements know are those of the migrations, by whatever way a database came to be."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from sqlq.database import migrate, standing
from sqlq.database.dialects import dialect_of
from sqlq.schema import version
from sqlq.schema.tables import TOKEN_SCHEMA, metadata
from tests.kit import execute, needs
from tests.kit.preloaded import ROOT, environment, preloaded
from tests.migrations.catalogue import (
    NULLABLE,
    Catalogue,
    another_database,
    catalogue,
    columns,
    indexes,
    nullable,
    run_script,
)

pytestmark = pytest.mark.each_database


@pytest.fixture
def migrated(empty: Engine, tmp_path: Path) -> Catalogue:
    """The catalogue of another database of the same kind, made by a migration."""
    with another_database(empty, tmp_path / "migrated.db") as engine:
        migrate.upgrade(engine, None)
        found = catalogue(engine)
    assert all(found.values()), "an empty part of the catalogue compares nothing"
    return found


@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_statements_know_the_tables_of_the_migrations(empty: Engine) -> None:
    migrate.upgrade(empty, None)
    assert indexes(empty) == dialect_of(empty).health.OWN_INDEXES, "OWN_INDEXES in health.py lists each index"
    known = {table: set(names.split()) for table, names in NULLABLE.items()}
    assert nullable(empty) == known, "NULLABLE in catalogue.py lists each column that may be NULL"
    made = columns(empty)
    migrate.downgrade(empty, None, "base")
    metadata.create_all(empty.execution_options(schema_translate_map={TOKEN_SCHEMA: None}))
    assert made == columns(empty)


def test_down_and_up_again_changes_nothing(empty: Engine, migrated: Catalogue) -> None:
    migrate.upgrade(empty, None)
    migrate.downgrade(empty, None, "base")
    left = catalogue(empty)
    # SQLite keeps its own table of AUTOINCREMENT counters, empty.
    assert [row[:2] for rows in left.values() for row in rows if row[1] != "sqlite_sequence"] == []
    migrate.upgrade(empty, None)
    assert catalogue(empty) == migrated


@needs("server", empty=True)
def test_tables_in_a_named_schema_equal_those_of_the_default(empty: Engine, migrated: Catalogue) -> None:
    queueing, scripted = (f"sqlq_test_{uuid4().hex[:12]}" for _ in range(2))
    migrate.upgrade(empty, queueing)
    run_script(empty, migrate.render_sql(empty.dialect.name, scripted))
    assert catalogue(empty, queueing) == migrated
    assert catalogue(empty, scripted) == migrated
    assert not any(catalogue(empty).values())
    if empty.dialect.name == "mariadb":  # whose schemas are databases of the server
        execute(empty, f"DROP SCHEMA {queueing}")
        execute(empty, f"DROP SCHEMA {scripted}")


def test_the_history_is_one_line_without_gaps() -> None:
    revisions = list(ScriptDirectory(str(migrate.location())).walk_revisions())[::-1]
    assert [r.revision for r in revisions] == [f"{n:04}" for n in range(1, len(revisions) + 1)]
    assert revisions[0].down_revision is None
    assert all(later.down_revision == earlier.revision for earlier, later in pairwise(revisions))
    assert ScriptDirectory(str(migrate.location())).get_heads() == [version.HEAD]
    assert len(revisions) == len(list(migrate.location().glob("versions/*.py")))


def test_no_revision_imports_sqlq() -> None:
    for file in migrate.location().glob("versions/*.py"):
        assert not re.findall(r"^\s*(?:from|import) sqlq\b", file.read_text(), re.MULTILINE), file


def test_the_version_is_read_without_alembic() -> None:
    program = "import sys, sqlq.schema.version; print('alembic' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT) == b"False\n"


@pytest.mark.integration
@needs("file", empty=True)
def test_alembics_own_command_works_in_a_checkout(empty: Engine, empty_database_url: str) -> None:
    def alembic(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, settings = ["python", "-m", "alembic", *arguments], {"SQLQ_DATABASE_URL": empty_database_url}
        done = preloaded().run(command, ROOT, environment(**settings), timeout=60)
        assert done.returncode == 0, done.stderr
        return done

    for _ in range(2):
        assert "Warning" not in alembic("upgrade", "head").stderr
    assert standing.check(empty, None).standing == "up to date"
    assert alembic("current").stdout.split() == [version.HEAD, "(head)"]
    alembic("downgrade", "base")
    assert standing.check(empty, None).standing == "missing"


PUBLISHED = {
    "0001": "c3841e6455a6098533884f5aa8cae75d18caea9bb50137b1f73f2619f7714baf",
    "0002": "aa81342d7f7f3f238551cc8d2815094ec54c0e8200a94dc2517910e102f32ca7",
    "0003": "bafc3ab6261c0428c0063ec3cccb640e4c37e9b28afb406b92ca1ad4e0d731b9",
}
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
