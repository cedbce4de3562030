"""The order of the tests' own files: a test module imports no other one, and fixtures are in their files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import conftest, kit

TESTS = Path(__file__).parents[1]
KIT = sorted((TESTS / "kit").glob("*.py"))
SOURCES = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of what a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_file_imports_a_test_module() -> None:
    assert [
        (file, name)
        for file, source in SOURCES.items()
        for name in imported(ast.parse(source))
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ] == []


def test_conftest_lists_each_file_of_fixtures_and_has_nothing_else() -> None:
    files = [f"tests.fixtures.{path.stem}" for path in (TESTS / "fixtures").glob("*.py")]
    assert sorted(conftest.pytest_plugins) == sorted(files)
    assert not [node for node in ast.parse(SOURCES["conftest.py"]).body if isinstance(node, ast.FunctionDef)]


def test_the_kit_lists_its_modules_and_explains_each() -> None:
    for path in KIT:
        assert ast.get_docstring(ast.parse(path.read_text())), path
        if path.stem != "__init__" and not path.stem.endswith("_guard"):
            assert path.stem in (kit.__doc__ or ""), path
