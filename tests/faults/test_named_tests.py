"""The reliability page and the list of mutations name tests and lines of code: they are there."""

from __future__ import annotations

import re

import pytest

from tests.faults.mutations import GUARDS, ROOT, Guard

NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def defines(file: str, function: str) -> bool:
    path = ROOT / file
    return path.exists() and f"def {function}(" in path.read_text()


def test_every_test_on_the_reliability_page_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "reliability.md").read_text())
    assert len(named) > 50
    assert [f"{file}::{function}" for file, function in named if not defines(f"tests/{file}", function)] == []


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file}-{' '.join(guard.text.split())[:40]}")
def test_every_guard_and_the_test_that_misses_it_exist(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text().count(guard.text) == 1
    file, function = guard.killed_by.split("::")
    assert defines(file, function.partition("[")[0])
