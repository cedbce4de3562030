"""The reliability page and the list of mutations name tests and lines of code: they are there."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.faults.mutations import GUARDS, ROOT, marks, mutant
from tests.kit.processes import run_program

NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def code_of(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""


def defines(file: str, function: str) -> bool:
    return f"def {function}(" in code_of(file)


def test_every_test_on_the_page_of_guarantees_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 50
    assert [f"{file}::{function}" for file, function in named if not defines(f"tests/{file}", function)] == []


def test_every_guard_mark_is_in_the_list_once() -> None:
    found = marks()
    assert sorted(found) == sorted({guard.mark for guard in GUARDS})
    assert [mark for mark, places in found.items() if len(places) != 1] == []


def test_every_guard_can_be_removed_and_its_test_exists() -> None:
    wrong: list[str] = []
    for guard in GUARDS:
        try:
            mutant(guard, marks()[guard.mark][0])
            file, *_, function = guard.test.split("::")
            if not defines(file, function.partition("[")[0]):
                wrong.append(f"there is no {guard.test}")
        except ValueError as error:
            wrong.append(str(error))
    assert wrong == []


@pytest.mark.slow
def test_each_variant_that_a_guard_names_is_collected() -> None:
    named = sorted({guard.test for guard in GUARDS})
    options = ["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
    databases = "sqlite,postgresql,mariadb"
    done = run_program("-m", "pytest", *options, *named, timeout=600, SQLQ_TEST_DATABASES=databases)
    missing = [line for line in (done.stdout + done.stderr).splitlines() if "not found" in line]
    assert (done.returncode, missing) == (0, [])
