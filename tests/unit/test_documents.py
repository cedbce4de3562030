"""CONTRIBUTING.md leads to files that exist, decisions have one form, and examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from sqlalchemy import create_engine

import sqlq
from tests import words

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


# -- decisions -----------------------------------------------------------------------------------------------


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
FORM = re.compile(
    r"# (?P<number>\d+)\. .+: .+\n\n"
    r"Status: (?:accepted\.(?: It replaces .+\.)?|replaced by \[decision \d+\]\((?P<next>.+\.md)\)\.)\n\n"
    r"## Context\n\n[^#].+\n\n## Decision\n\n[^#].+\n\n## Consequences\n\n[^#].+\n",
    re.DOTALL,
)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_subject_and_choice_status_context_decision_and_consequences(page: Path) -> None:
    form = FORM.fullmatch(page.read_text())
    assert form, f"{page.name}: CONTRIBUTING.md shows the form"
    assert re.fullmatch(rf"{int(form['number']):04d}(-[a-z0-9]+)+", page.stem)
    assert form["next"] is None or (page.parent / form["next"]).exists()
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_each_mention_of_a_decision_has_its_page() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert len(set(numbers)) == len(numbers)
    mentioned = set[int]()
    for path in (path for files in words.FILES for path in ROOT.glob(files)):
        mentioned |= {int(number) for number in re.findall(r"\bdecisions?[ /\n]+(\d+)", path.read_text())}
    assert mentioned <= {*numbers}


# -- examples in docstrings ----------------------------------------------------------------------------------


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "sqlq").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_do_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"sqlq", "sqlq.app.app", "sqlq.config.durations"} <= set(MODULES)
    monkeypatch.chdir(tmp_path)
    names = {"sqlq": sqlq, "create_engine": create_engine}
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS).failed == 0
