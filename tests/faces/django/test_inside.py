"""Django's own test runner runs the project's tests, those of the dashboard and the admin among them."""

from __future__ import annotations

import importlib.metadata
import json
import re

import pytest
from sqlalchemy import create_engine, inspect

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


STAFF = "--settings=staff_settings"
in_places = pytest.mark.parametrize(
    "place", ["plain", *(pytest.param(place, marks=pytest.mark.slow) for place in ("atomic", "elsewhere"))]
)
"""Also with a transaction around each request (ATOMIC_REQUESTS), and with the jobs in another database and
schema."""


@pytest.mark.variants
@in_places
def test_the_dashboard_works_inside_a_project(bare_project: Project, place: str) -> None:
    run_in(bare_project, "staff_dashboard", place)


@pytest.mark.variants
@in_places
def test_the_admin_works_inside_a_project(bare_project: Project, place: str) -> None:
    run_in(bare_project, "staff_admin", place)


def run_in(bare_project: Project, module: str, place: str) -> None:
    url, folder = bare_project.url, bare_project.directory
    file = {"TEST": {"NAME": str(folder / "test.db")}} if url.startswith("sqlite") else {}
    databases = {"DATABASE": settings_of(url, **file)}
    if place == "atomic":
        bare_project.set(ATOMIC=["default"])
    elif place == "elsewhere":
        users = settings_of(f"sqlite:///{folder / 'users.db'}", TEST={"NAME": str(folder / "test_users.db")})
        databases = {"DATABASE": users, "OTHER": databases["DATABASE"]}
        schema = {"schema": "queue"} if url.startswith("postgresql") else {}
        bare_project.set(SQLQ={"database": "other", **schema})
    bare_project.set(**databases)
    run(bare_project, STAFF, f"shop.{module}")


def test_migrate_makes_permissions_and_no_tables(bare_project: Project) -> None:
    bare_project.ok("migrate", STAFF)
    engine = create_engine(bare_project.url)
    made = set(inspect(engine).get_table_names())
    engine.dispose()
    assert made & {"sqlq_job", "sqlq_failedjob", "sqlq_schedule", "sqlq_queue", "sqlq_worker"} == set()
    assert bare_project.ok("makemigrations", "--check", "--dry-run", STAFF) == "No changes detected\n"
    # permissions, and no rows of tables that are not there
    dump = json.loads(bare_project.ok("dumpdata", "--all", STAFF))
    names = {row["fields"]["codename"] for row in dump if row["model"] == "auth.permission"}
    assert {name for name in names if re.search("_(job|queue|schedule|worker)$", name)} == {
        *("change_job", "delete_job", "view_job", "change_queue", "view_queue"),
        *("change_schedule", "view_schedule", "view_worker"),
    }


@needs("cheap")
def test_werkzeug_is_imported_by_the_urls_of_the_dashboard_alone(project: Project) -> None:
    program = (
        "import sys\n{}\nfrom sqlq.django import app\napp.jobs\n"
        "print([name for name in sys.modules if name.startswith(('werkzeug', 'sqlq.web.site'))])"
    )
    assert project.python(program.format("")) == "[]\n"
    setup = "import os, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'staff_settings'; django.setup()\n"
    in_the_admin = "import sys, sqlq.django.admin\nassert 'werkzeug' not in sys.modules"
    done = project.run(["-c", setup + in_the_admin])
    assert done.code == 0, done
