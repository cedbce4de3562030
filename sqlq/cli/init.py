"""`sqlq init`: the table of sqlq in a project's pyproject.toml, a first task, and a test of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Final, NoReturn

import click

from sqlq.cli.options import confirm, yes_option
from sqlq.errors import ConfigurationError

TASKS: Final = """$head


@$app.task(max_attempts=5, timeout="1m")
${prefix}def greet(name: str) -> str:
    return f"Hello, {name}!"
"""
TEST: Final = """import sqlq.testing

from $module import greet


def test_greet_says_hello(sqlq_app):
    job = sqlq_app.enqueue(greet.new("Ada"))
    assert sqlq.testing.drain(sqlq_app).completed == 1
    assert sqlq_app.result(job) == "Hello, Ada!"
"""
DJANGO_TEST: Final = """from django.test import TestCase
from sqlq.django import app
from sqlq.testing import inline

from $module import greet


class GreetTest(TestCase):
    def test_greet_says_hello(self):
        with inline(app):  # jobs run where they are enqueued
            self.assertEqual(app.result(app.enqueue(greet.new("Ada"))), "Hello, Ada!")
"""
TABLE: Final = """[tool.sqlq]
app = "$module:$app"
database-url = "sqlite:///dev.db"  # to develop on; SQLQ_DATABASE_URL counts before it
"""
DJANGO_TABLE: Final = '[tool.sqlq]\napp = "sqlq.django:app"\n'
STEPS: Final = """now run: sqlq migrate
         sqlq enqueue $module.greet Ada
         sqlq work --drain
         python -m pytest $file"""
DJANGO_STEPS: Final = """now add "sqlq.django" to INSTALLED_APPS, and run: python manage.py migrate
         python manage.py sqlq enqueue $module.greet Ada
         python manage.py sqlq work --drain
         python manage.py test $package"""
PLAIN: Final = {"app": "app", "prefix": "", "test": TEST, "table": TABLE, "steps": STEPS}
PLAIN["head"] = "import sqlq\n\napp = sqlq.App()"
DJANGO: Final = PLAIN | {"test": DJANGO_TEST, "table": DJANGO_TABLE, "steps": DJANGO_STEPS}
DJANGO["head"] = "from sqlq.django import app"
QUEUE: Final = PLAIN | {"app": "queue", "head": "import sqlq\n\nqueue = sqlq.App()"}
FLASK: Final = QUEUE | {"head": f"{QUEUE['head']}  # and in create_app: queue.use(engine=db.engine)"}
KINDS: Final = {
    "Django": DJANGO,
    "Flask": FLASK,
    "FastAPI": QUEUE | {"prefix": "async "},
    "plain Python": PLAIN,
}


@click.command()
@yes_option
def init(yes: bool) -> None:
    """Begin to use sqlq in the project here.

    It recognises Django, Flask, FastAPI and plain Python, and writes the table of sqlq in pyproject.toml, a
    first task, and a test of it. It shows what it will write, and wants a yes. It overwrites nothing.
    """
    folder = Path.cwd()
    try:
        _refuse_unfit(folder)
        kind = _recognised(folder)
        files, steps = _plan(folder, kind)
    except (OSError, ValueError) as error:
        _refuse(f"this project cannot be read: {error}")
    click.echo(f"a project of {kind}\n")
    for file, text in files.items():
        where = f"{file.relative_to(folder)}{', at its end' if file.exists() else ''}"
        lines = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        click.echo(f"{where}:\n{lines}\n")
    confirm("write this", yes=yes)
    _write(files)
    click.echo(steps)


def _refuse(why: str) -> NoReturn:
    raise ConfigurationError(f"{why}: nothing was written")


def _refuse_unfit(folder: Path) -> None:
    import tomllib

    from sqlq.config import pyproject

    if (known := pyproject.find(folder)) is not None:
        _refuse(f"{known.file} has {pyproject.TABLE} already")
    is_empty = all(each.name.startswith(".") for each in folder.iterdir())
    if not is_empty and next(_sources(folder), None) is None:
        _refuse(f"{folder} holds no Python project: run init where pyproject.toml or manage.py lies")
    for file in _files(folder, "*.py", "[!.]*/*.py"):
        text = file.read_text(errors="replace")
        found = re.search(r"^(\w+) = (?:sqlq\.)?App\(", text, re.MULTILINE)
        if found and re.search(r"^(?:from|import) sqlq\b", text, re.MULTILINE):  # other libraries have an App
            module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            line = f'app = "{module}:{found[1]}"'
            _refuse(f"there is an App already: write {line} under [tool.sqlq] in pyproject.toml")
    if (file := folder / "pyproject.toml").exists():
        tomllib.loads(file.read_text(encoding="utf-8"))
        changes = ""
        with suppress(OSError):  # no git
            asked = ["git", "-C", str(folder), "status", "--porcelain", "--", file.name]
            changes = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        if changes and not changes.startswith(("??", "A ")):
            _refuse(f"{file.name} has changes that are not committed: commit them first")


def _sources(folder: Path) -> Iterator[Path]:
    yield from _files(folder, "manage.py", "pyproject.toml", "requirements*.txt", "*.py")
    yield from _files(folder, "*/__init__.py", "*/app.py")


def _files(folder: Path, *patterns: str) -> Iterator[Path]:
    """Yield the files of such names. A dangling symlink, by which an editor locks a file, is none."""
    for pattern in patterns:
        yield from (each for each in sorted(folder.glob(pattern)) if each.is_file())


def _recognised(folder: Path) -> str:
    if (folder / "manage.py").exists():
        return "Django"
    for file in _sources(folder):
        before = "^(?:from|import) " if file.suffix == ".py" else "(?:^|[\"'])"
        text = file.read_text(errors="replace")
        if found := re.search(rf"{before}(flask|fastapi)\b", text, re.MULTILINE | re.IGNORECASE):
            return {"flask": "Flask", "fastapi": "FastAPI"}[found[1].lower()]
    return "plain Python"


def _plan(folder: Path, kind: str) -> tuple[dict[Path, str], str]:
    """Return the text for each file, pyproject.toml last, and what a person does next."""
    is_django = kind == "Django"
    marks = ("apps.py", "models.py") if is_django else ("__init__.py",)
    found = {file.parent for mark in marks for file in folder.glob(f"*/{mark}")}
    packages = sorted(each for each in found if each.name not in ("tests", "test"))
    if is_django and not packages:
        _refuse("this Django project has no app yet; make one with python manage.py startapp NAME")
    place = packages[0] if len(packages) == 1 or is_django else folder
    module = "tasks" if place == folder else f"{place.name}.tasks"
    # in a package of tests, and beside the module, pytest finds the module by itself
    tests = place if is_django else folder / "tests" if (folder / "tests/__init__.py").exists() else folder
    names = {**KINDS[kind], "module": module, "package": place.name}
    names["file"] = str((tests / "test_tasks.py").relative_to(folder))
    task, test, table, steps = (
        Template(text).substitute(names) for text in (TASKS, names["test"], names["table"], names["steps"])
    )
    files = {place / "tasks.py": task, tests / "test_tasks.py": test}
    for file in files:
        if file.exists():
            _refuse(f"{file.relative_to(folder)} is there already, and init overwrites nothing")
    return {**files, folder / "pyproject.toml": table}, steps


def _write(files: Mapping[Path, str]) -> None:
    made: list[Path] = []
    for file, text in files.items():
        gap = "\n" if file.name == "pyproject.toml" and file.exists() else ""
        try:
            with file.open("a" if gap else "x", encoding="utf-8") as out:
                made += [] if gap else [file]
                out.write(gap + text)
        except OSError as error:
            for each in made:
                each.unlink()
            _refuse(f"{file}: {error.strerror}")
