"""Out of `running` there is one door, so that what hooks in there meets every ending."""

from __future__ import annotations

import re
from pathlib import Path

import sqlq

ROOT = Path(sqlq.__file__).parent


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
