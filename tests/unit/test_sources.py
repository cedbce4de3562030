"""Rules for the source: where databases differ, and the one door out of `running`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import sqlq
from sqlq.database.dialect import Driver, Migrations
from sqlq.database.sql import Sql
from tests.kit import for_each

# -- another database is one folder of sqlq/database ---------------------------------------------------------


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


# -- and few verbs -------------------------------------------------------------------------------------------


MOST_VERBS = 25


def verbs(part: Any) -> list[str]:
    """Return the methods that a database may override."""
    functions = [name for name, _ in inspect.getmembers(part, inspect.isfunction)]
    others = [name for name, kind in inspect.get_annotations(part).items() if "Callable" in kind]
    return [f"{part.__name__}.{name}" for name in (*functions, *others) if not name.startswith("_")]


def test_a_database_overrides_few_verbs() -> None:
    known = [verb for part in (Sql, Driver, Migrations) for verb in verbs(part)]
    assert len(known) <= MOST_VERBS, f"each database answers one verb more: {', '.join(known)}"


# -- out of running there is one door ------------------------------------------------------------------------


def places(pattern: str) -> set[str]:
    """Return the files of sqlq that hold the pattern."""
    return {
        str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if re.search(pattern, file.read_text())
    }


def test_only_settle_takes_rows_out_of_jobs_and_puts_them_back() -> None:
    assert places(r"delete\(jobs\)") == {"database/sql.py", "database/postgresql/dialect.py"}
    assert places(r"Change\(jobs, held\(\w+, \w+\), returning") == set(), "`move` takes them out"
    assert places(r"\.move\(") == {"store/jobs/settle.py"}, "the dialects' deletes are those of `move`"
    assert places(r'"reserved_at": null\(\)') == {"store/jobs/settle.py"}
    assert places(r"insert_?\w*\((finished|failed)_jobs\)") == {"store/jobs/settle.py"}


def test_only_callbacks_settlement_creates_settlements() -> None:
    """`callbacks.settlement` makes them all."""
    assert places(r"(?<!class )\bSettlement\(") == {"model/outcome.py"}
