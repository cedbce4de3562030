"""Django's own test runner runs the project's tests, as its developers run it."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.faces.django.project_of_tests import PROJECT, Project, run, settings_of
from tests.kit import needs

DJANGO = tuple(map(int, importlib.metadata.version("django").split(".")[:2]))
MODULES = sorted(path.stem for path in (PROJECT / "shop").glob("test_*.py"))
ON_BOTH = [module for module in MODULES if module != "test_settings"]


@pytest.mark.parametrize("module", ON_BOTH)
def test_inside(bare_project: Project, module: str) -> None:
    if module == "test_backend" and DJANGO < (6, 0):
        pytest.skip("django.tasks came with Django 6.0, which needs Python 3.12")
    if bare_project.url.startswith("sqlite"):
        file = str(bare_project.directory / "test.db")
        bare_project.set(DATABASE=settings_of(bare_project.url, TEST={"NAME": file}))
    run(bare_project, f"shop.{module}")


@needs("file", empty=True)
def test_in_memory(bare_project: Project) -> None:
    # Django cannot load the data of a serialized rollback again after the flush of another class
    modules = {*MODULES} - {"test_flush"} - ({"test_backend"} if DJANGO < (6, 0) else set())
    run(bare_project, *(f"shop.{module}" for module in sorted(modules)))


@pytest.mark.integration
def test_in_several_processes(bare_project: Project) -> None:
    run(bare_project, "--parallel", "2", "shop.test_enqueue")
