"""`sqlq init`: the table of sqlq in a project's pyproject.toml, a first task, and a test of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import NoReturn

import click

from sqlq.cli.options import confirm, yes_option
from sqlq.errors import ConfigurationError

TEMPLATES = Path(__file__).parent / "templates"


KINDS = {
    "Django": {"app": "app", "head": "from sqlq.django import app"},
    "Flask": {
        "app": "queue",
        "head": "import sqlq\n\nqueue = sqlq.App()  # and in create_app: queue.use(engine=db.engine)",
    },
    "FastAPI": {"app": "queue", "head": "import sqlq\n\nqueue = sqlq.App()", "prefix": "async "},
    "plain Python": {"app": "app", "head": "import sqlq\n\napp = sqlq.App()"},
}
"""The kinds of projects, each with the name of its App, and the lines above its first task."""


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
    if not yes:
        confirm("write this")
    for file, text in files.items():
        gap = "\n" if file.exists() else ""  # of pyproject.toml alone
        with file.open("a" if gap else "x", encoding="utf-8") as out:
            out.write(gap + text)
    click.echo(steps, nl=False)


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
    if (file := folder / "pyproject.toml").exists():
        tomllib.loads(file.read_text(encoding="utf-8"))


def _sources(folder: Path) -> Iterator[Path]:
    yield from _files(folder, "manage.py", "pyproject.toml", "requirements*.txt", "*.py")
    yield from _files(folder, "*/__init__.py", "*/app.py", "src/*/__init__.py", "src/*/app.py")


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
        for kind in ("Flask", "FastAPI"):
            if re.search(rf"{before}{kind}\b", text, re.MULTILINE | re.IGNORECASE):
                return kind
    return "plain Python"


def _plan(folder: Path, kind: str) -> tuple[dict[Path, str], str]:
    """Return the text for each file, and what a person does next. pyproject.toml comes first: where that is
    locked, nothing is written."""
    is_django = kind == "Django"
    marks = ("apps.py", "models.py") if is_django else ("__init__.py",)
    folders = {file.parent for mark in marks for file in _files(folder, f"*/{mark}", f"src/*/{mark}")}
    packages = sorted(each for each in folders if each.name not in ("tests", "test"))
    if is_django and not packages:
        _refuse("this Django project has no app yet; make one with python manage.py startapp NAME")
    target = packages[0] if len(packages) == 1 or is_django else folder
    module = "tasks" if target == folder else f"{target.name}.tasks"
    # in a package of tests, and beside the module, pytest finds the module by itself
    tests = target if is_django else folder / "tests" if (folder / "tests/__init__.py").exists() else folder
    names = {"prefix": "", "module": module, "package": target.name, **KINDS[kind]}
    names["file"] = str((tests / "test_tasks.py").relative_to(folder))

    def filled(name: str) -> str:
        template = TEMPLATES / ("django" if is_django else "plain") / f"{name}.txt"
        return Template(template.read_text(encoding="utf-8")).substitute(names)

    files = {parent / name: filled(name) for parent, name in ((target, "tasks.py"), (tests, "test_tasks.py"))}
    for file in files:
        if file.exists():
            _refuse(f"{file.relative_to(folder)} is there already, and init overwrites nothing")
    return {folder / "pyproject.toml": filled("pyproject.toml"), **files}, filled("steps")
