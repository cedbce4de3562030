"""django-tasks-db: Django's ORM, one task at a time in each process, polling. Finished tasks stay in its
table."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from benchmarks import work
from benchmarks.subject import Subject

_TABLE = "django_tasks_database_dbtaskresult"


class DjangoTasksDb(Subject):
    name = "django-tasks-db"
    databases = ("postgresql", "mariadb")
    requirements = ("django-tasks-db", "django-tasks", "psycopg[binary,pool]", "PyMySQL")
    packages = ("django-tasks-db", "django-tasks", "Django", "psycopg", "PyMySQL")
    settings = "a process for each job at a time (it has no other concurrency), db_worker --interval 0.01"
    many = False
    enqueued = f"SELECT count(*) FROM {_TABLE}"
    settled = f"SELECT count(*) FROM {_TABLE} WHERE status = 'SUCCESSFUL'"
    left = (
        f"SELECT count(*) FROM (SELECT 1 FROM {_TABLE} WHERE status IN ('READY', 'RUNNING') LIMIT 1) AS rest"
    )

    def prepare(self, url: str) -> None:
        _set_up(url)
        from django.core.management import call_command

        call_command("migrate", verbosity=0)

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        _set_up(url)
        yield Producer(noop_task())

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [
            ["python", "-m", __name__, "db_worker", "--interval", "0.01", "--no-startup-delay", "-v", "0"]
        ] * (concurrency * processes)

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        return {"SQLQ_BENCHMARK_URL": url}


class Producer:
    def __init__(self, task: Any) -> None:
        self.one = task.enqueue


def _set_up(url: str) -> None:
    from urllib.parse import urlsplit

    import django
    from django.conf import settings

    parts = urlsplit(url)
    engine = "postgresql"
    if parts.scheme.startswith("mariadb"):
        import pymysql

        pymysql.install_as_MySQLdb()
        engine = "mysql"
    settings.configure(
        INSTALLED_APPS=["django_tasks", "django_tasks_db"],
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
        DATABASES={
            "default": {
                "ENGINE": f"django.db.backends.{engine}",
                "NAME": parts.path[1:],
                "HOST": parts.hostname,
                "PORT": parts.port or "",
                "USER": parts.username or "",
                "PASSWORD": parts.password or "",
            }
        },
        USE_TZ=True,
        LOGGING_CONFIG=None,
    )
    django.setup()


def noop(number: int) -> None:
    work.done(number)


@cache
def noop_task() -> Any:
    from django_tasks import task

    module: Any = sys.modules["benchmarks.peers.with_django_tasks_db"]
    module.noop = task()(module.noop)  # the worker looks it up by its name
    return module.noop


def _manage(arguments: list[str]) -> None:
    _set_up(os.environ["SQLQ_BENCHMARK_URL"])
    # under its own name, as the worker imports it
    importlib.import_module("benchmarks.peers.with_django_tasks_db").noop_task()
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage", *arguments])


SUBJECTS = (DjangoTasksDb,)

if __name__ == "__main__":
    _manage(sys.argv[1:])
