"""The files that CONTRIBUTING.md names exist, so that its maps of code and tests lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_each_file_and_folder_that_contributing_names_exists() -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([\w./*-]+(?:\.(?:py|md|toml|json|html|yml)|/))`", prose))
    assert len(named) > 100
    roots = (ROOT, ROOT / "sqlq", ROOT / "sqlq" / "worker")
    assert [path for path in named if not any(_exists(root, path) for root in roots)] == []


def _exists(root: Path, path: str) -> bool:
    """Whether a path is below a root; a bare name may be in any of its folders, as prose has it."""
    return any(root.glob(path if "/" in path.rstrip("/") else f"**/{path}"))


def test_each_folder_of_tests_has_a_row_in_contributing() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    assert folders <= set(re.findall(r"^\| `tests/(\w+)/` \|", TEXT, re.MULTILINE))
