"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from sqlalchemy import create_engine

import sqlq

PACKAGE = Path(__file__).parents[2] / "sqlq"
MODULES = [
    ".".join(("sqlq", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


def test_modules_with_doctests_are_found() -> None:
    assert {"sqlq", "sqlq.app.app", "sqlq.config.durations"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(
        module, extraglobs={"sqlq": sqlq, "create_engine": create_engine}, optionflags=doctest.ELLIPSIS
    )
    assert result.failed == 0
