"""A Django project in a directory of its own, and its manage.py as people run it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from tests.kit import wait_until
from tests.kit.command import Done
from tests.kit.preloaded import DJANGO, environment, preloaded

PROJECT = Path(__file__).parent / "project"


def settings_of(url: str, **more: Any) -> dict[str, Any]:
    """Return the entry of DATABASES for a database of the tests."""
    where = make_url(url)
    if where.get_backend_name() == "sqlite":
        options = {"transaction_mode": "IMMEDIATE", "timeout": 20}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": where.database, "OPTIONS": options, **more}
    kind = "mysql" if where.get_backend_name() == "mariadb" else "postgresql"
    server = {"NAME": where.database, "USER": where.username, "HOST": where.host, "PORT": where.port}
    return {"ENGINE": f"django.db.backends.{kind}", **server, **more}


class Project:
    """A copy of the tests' project, and processes that run its manage.py."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        shutil.copytree(PROJECT, directory, ignore=shutil.ignore_patterns("__pycache__"))
        self.environment = environment(PYTHONWARNINGS="error::ResourceWarning,error::RuntimeWarning")
        self.set(DATABASE=settings_of(url))

    def set(self, **settings: Any) -> None:
        """Set what settings.py reads of the environment: SHOP_DATABASE, SHOP_SQLQ and so on."""
        self.environment |= {f"SHOP_{name}": json.dumps(value) for name, value in settings.items()}

    def run(self, command: Sequence[str | Path], *, cwd: Path | None = None, **env: str) -> Done:
        done = preloaded(*DJANGO).run(
            ["python", *map(str, command)], cwd or self.directory, {**self.environment, **env}, timeout=100
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def manage(self, *args: str) -> Done:
        return self.run(["manage.py", *args])

    def ok(self, *args: str) -> str:
        done = self.manage(*args)
        assert done.code == 0, done
        return done.out

    def sqlq(self, *args: str) -> Done:
        return self.manage("sqlq", *args)

    def python(self, program: str) -> str:
        """Run a few lines of Python in the project, with Django set up, and return what they print."""
        # `shell -c` imports all models first, with words about it in some versions
        lines = f"import django; django.setup()\n{program}"
        done = self.run(["-c", lines], DJANGO_SETTINGS_MODULE="settings")
        assert done.code == 0, done
        return done.out

    def jobs(self, **wanted: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.sqlq("jobs", "--json").json()
        return [job for job in found if wanted.items() <= job.items()]

    def results(self) -> list[Any]:
        """The results of the jobs that have finished."""
        ids = [str(job["id"]) for job in self.jobs(state="finished")]
        return [self.sqlq("show", id, "--result").json() for id in ids]

    @contextmanager
    def working(self, *args: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """A worker that runs meanwhile; what it logs is in worker.log."""
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                [sys.executable, str(self.directory / "manage.py"), "sqlq", "work", *args],
                cwd=cwd or self.directory,
                env=self.environment,
                stderr=log,
                text=True,
            ) as process,
        ):
            try:
                wait_until(lambda: "working on" in self.log.read_text(), what=f"a worker ({self.log})")
                yield process
            finally:
                process.kill()

    @property
    def log(self) -> Path:
        return self.directory / "worker.log"


def run(project: Project, *args: str) -> None:
    done = project.manage("test", "--no-input", *args)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert re.search(r"^Ran [1-9]\d* tests? in .*\n\nOK", done.err, re.MULTILINE), done.err
