"""The dashboard and the admin in a Django project, whose tests run there."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, inspect

from tests.faces.django.project_of_tests import Project, run, settings_of
from tests.kit import needs

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
    assert "sqlq" in bare_project.ok("dumpdata", "--all", STAFF), (
        "permissions, and no rows of tables that are not"
    )
    bare_project.environment["DJANGO_SETTINGS_MODULE"] = "staff_settings"
    found = bare_project.run(["manage.py", "shell", "-v", "0", "-c", PERMISSIONS])
    assert found.code == 0, found
    assert found.out.split() == [
        *("change_job", "delete_job", "view_job", "change_queue", "view_queue"),
        *("change_schedule", "view_schedule", "view_worker"),
    ]


PERMISSIONS = """
from django.contrib.auth.models import Permission
found = Permission.objects.filter(content_type__app_label="sqlq")
for each in found.order_by("content_type__model", "codename"):
    print(each.codename)
"""


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
