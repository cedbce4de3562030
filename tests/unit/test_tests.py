"""The order of the tests' own files: a test module imports no other one, and fixtures are in their files."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
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


# -- each test asserts something -----------------------------------------------------------------------------


ASSERTING = {"raises", "warns", "fail", "wait_until"}


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def asserts(function: ast.AST, helpers: Collection[str] = ()) -> bool:
    """Whether a function asserts by itself, or calls a helper that does."""
    calls = [name_of(node) for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.Assert) for node in ast.walk(function)) or not {
        *ASSERTING,
        *helpers,
    }.isdisjoint(calls)


def functions(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_each_test_asserts_something() -> None:
    files = {file: functions(source) for file, source in SOURCES.items() if "django/project" not in file}
    helpers: set[str] = set()
    known = [each for found in files.values() for each in found if not each.name.startswith("test_")]
    while more := {each.name for each in known if asserts(each, helpers)} - helpers:
        helpers |= more
    assert [
        (file, each.name)
        for file, found in files.items()
        for each in found
        if each.name.startswith("test_") and not asserts(each, helpers)
    ] == []


def sleeps(statement: ast.stmt) -> bool:
    """Whether a statement waits for an event that nobody can set. Nested handlers may, as slow work."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func) == "threading.Event().wait" for call in calls)


def test_no_test_waits_for_a_time_but_by_let_pass() -> None:
    assert [
        (file, each.name)
        for file, source in SOURCES.items()
        for each in functions(source)
        if each.name.startswith("test_") and any(map(sleeps, each.body))
    ] == []


# -- tests of the worker replace no private attribute --------------------------------------------------------


WORKER = Path(__file__).parents[1] / "worker"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def patched(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the private attributes that a test replaces, but for those of its own `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=[first, *others]):
                named = [each.value for each in (first, *others[:1]) if isinstance(each, ast.Constant)]
                names = [str(name).rpartition(".")[2] for name in named[:1]]
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del(), value=owner):
                names = [] if isinstance(owner, ast.Name) and owner.id == "self" else [name]
            case _:
                continue
        yield from filter(private, names)


def test_no_test_of_the_worker_replaces_a_private_attribute() -> None:
    files = sorted(WORKER.glob("*.py"))
    assert len(files) > 20
    assert [(file.name, name) for file in files for name in patched(ast.parse(file.read_text()))] == []
