"""Tests of the worker replace no private attribute, so that its inside may change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.kit import for_each

WORKER = Path(__file__).parents[1] / "worker"
REPLACES = {
    "monkeypatch.setattr(worker, '_claim', other)": ["_claim"],
    "patch.setattr('sqlq.worker.loop._troubles', {})": ["_troubles"],
    "patch.delattr(worker, '_claim')": ["_claim"],
    "worker._wake._interval = 3600.0": ["_interval"],
    "worker._count += 1": ["_count"],
    "monkeypatch.setattr(worker._claimer, 'claim', other)": [],
    "worker._claimer.claim = other": [],
    "self._connection = connection": [],
    "handler.__annotations__['x'] = int": [],
}


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


@for_each("code", REPLACES)
def test_a_private_patch_is_found(code: str) -> None:
    assert list(patched(ast.parse(code))) == REPLACES[code]


def test_no_test_of_the_worker_replaces_a_private_attribute() -> None:
    files = sorted(WORKER.glob("*.py"))
    assert len(files) > 20
    assert [(file.name, name) for file in files for name in patched(ast.parse(file.read_text()))] == []
