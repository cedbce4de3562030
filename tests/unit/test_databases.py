"""The differences between databases stand in `sqlq/database`: another database is one folder there."""

from __future__ import annotations

import re
from pathlib import Path

import sqlq
from tests.kit import for_each

ROOT = Path(sqlq.__file__).parent
BELOW = ("schema/types.py", "schema/qualify.py", "schema/version.py", "tables.py")
"""How times are stored, how statements name operators, and where tables lie: below the dialects."""
READS_URLS = "config/urls.py"


def rooms(*names: str) -> list[Path]:
    """Return the files of sqlq outside `database`, or those of these rooms."""
    files = [file for file in ROOT.rglob("*.py") if not file.is_relative_to(ROOT / "database")]
    return [file for file in files if not names or file.relative_to(ROOT).parts[0] in names]


def found(pattern: str, files: list[Path]) -> list[str]:
    """Return where the pattern stands."""
    return [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_only_the_database_packages_compare_database_names() -> None:
    asked = r"(dialect\.name|get_backend_name\(\)|\bkind) (==|!=|in|not in) \W?\"(postgresql|sqlite|m\w+)"
    files = [file for file in rooms() if str(file.relative_to(ROOT)) not in (*BELOW, READS_URLS)]
    assert found(asked, files) == []


@for_each(
    "written",
    [
        r"\.returning\(",
        r"\.on_conflict_do",
        r"MATERIALIZED",
        r"\.with_for_update\(",
        r"SKIP LOCKED",
        r"\bRETURNING\b",
    ],
)
def test_the_store_has_no_sql_of_one_database(written: str) -> None:
    assert found(written, rooms("store", "enqueue", "worker", "results", "admin", "app")) == []
