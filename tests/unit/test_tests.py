"""Rules for the source: the order of the tests' own files, where databases differ, and the one door out of
`running`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import sqlq
from sqlq.database.dialect import Driver, Migrations
from sqlq.database.sql import Sql
from tests import conftest, kit

TESTS = Path(__file__).parents[1]
KIT = sorted((TESTS / "kit").glob("*.py"))
SOURCES = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def test_no_file_imports_a_test_module() -> None:
    imports = re.compile(r"^ *(?:from|import) tests\b[^(\n]*(?:\([^)]*\))?", re.MULTILINE)
    found = [(file, line) for file, source in SOURCES.items() for line in imports.findall(source)]
    assert len(found) > 300
    assert [each for each in found if re.search(r"\btest_", each[1])] == []


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
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions() -> list[tuple[str, Function, bool, set[str]]]:
    """Return each function with its file, whether it has an assert, and the names of what it calls."""
    found = []
    for file, source in SOURCES.items():
        for each in ast.walk(ast.parse(source)):
            if isinstance(each, Function) and "django/project" not in file:
                nodes = [*ast.walk(each)]
                called = {name_of(node) for node in nodes if isinstance(node, ast.Call)}
                found.append((file, each, any(isinstance(node, ast.Assert) for node in nodes), called))
    return found


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_each_test_asserts_something() -> None:
    """By itself, or by a helper that does."""
    asserting = ASSERTING | {each.name for _, each, asserts, _ in functions() if asserts}
    known = [(each.name, called) for _, each, _, called in functions() if not each.name.startswith("test_")]
    while more := {name for name, called in known if called & asserting} - asserting:
        asserting |= more
    assert [
        (file, each.name)
        for file, each, asserts, called in functions()
        if each.name.startswith("test_") and not asserts and not called & asserting
    ] == []


def sleeps(statement: ast.stmt) -> bool:
    """Whether a statement waits for an event that nobody can set. Nested handlers may, as slow work."""
    if isinstance(statement, Function):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func) == "threading.Event().wait" for call in calls)


def test_no_test_waits_for_a_time_but_by_let_pass() -> None:
    assert [
        (file, each.name)
        for file, each, _, called in functions()
        if each.name.startswith("test_") and "wait" in called and any(map(sleeps, each.body))
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


def test_the_store_has_no_sql_of_one_database() -> None:
    written = r"\.returning\(|\.on_conflict_do|MATERIALIZED|\.with_for_update\(|SKIP LOCKED|\bRETURNING\b"
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


def places(regex: str) -> set[str]:
    """Return the files of sqlq that hold the pattern."""
    return {str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if re.search(regex, file.read_text())}


def test_only_settle_takes_rows_out_of_jobs_and_puts_them_back() -> None:
    assert places(r"delete\(jobs\)") == {"database/sql.py", "database/postgresql/dialect.py"}
    assert places(r"Change\(jobs, held\(\w+, \w+\), returning") == set(), "`move` takes them out"
    assert places(r"\.move\(") == {"store/jobs/settle.py"}, "the dialects' deletes are those of `move`"
    assert places(r'"reserved_at": null\(\)') == {"store/jobs/settle.py"}
    assert places(r"insert_into\(target\)") == {"store/jobs/settle.py"}
    assert places(r"insert_?\w*\((finished|failed)_jobs\)") == set()


def test_only_callbacks_settlement_creates_settlements() -> None:
    """`callbacks.settlement` makes them all."""
    assert places(r"(?<!class )\bSettlement\(") == {"model/outcome.py"}
