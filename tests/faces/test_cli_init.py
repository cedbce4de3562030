"""`sqlq init` in projects of each kind, and in folders that it refuses."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.command import Command, obey_permissions
from tests.kit.preloaded import DJANGO, preloaded

INIT = (sys.executable, "-m", "sqlq", "init", "--yes")
FLASK = "from flask import Flask\n\nweb = Flask(__name__)\n"
KINDS: dict[str, tuple[Mapping[str, str], str, str]] = {
    "an empty folder": ({}, "plain Python", "tasks:app"),
    "an App of another library": (
        {"bot.py": "from slack_bolt import App\n\napp = App()\n"},
        *("plain Python", "tasks:app"),
    ),
    "a package": ({"shop/__init__.py": "", "tests/__init__.py": ""}, "plain Python", "shop.tasks:app"),
    "a package in src": (
        {"src/shop/__init__.py": "", "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n'},
        *("plain Python", "shop.tasks:app"),
    ),
    "Flask by its import": (
        {"web.py": FLASK, "pyproject.toml": '[project]\nname = "x"'},
        "Flask",
        "tasks:queue",
    ),
    "FastAPI by its name": (
        {"pyproject.toml": '[project]\nname = "x"\nversion = "1"\ndependencies = ["fastapi>=0.100"]\n'},
        *("FastAPI", "tasks:queue"),
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Command:
    """`sqlq` in a folder with nothing in it."""
    run = Command(tmp_path)
    (tmp_path / "shop.py").unlink()
    return run


def make(run: Command, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        file = run.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def contents(folder: Path) -> dict[str, str]:
    files = (each for each in folder.rglob("*") if each.is_file() and ".git/" not in str(each))
    return {str(each.relative_to(folder)): each.read_text() for each in files}


def python(run: Command, *words: str) -> str:
    imported = ("pytest",) if "pytest" in words else DJANGO
    done = preloaded(*imported).run(["python", *words], run.directory, run.environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_task_and_a_test_that_passes(project: Command, kind: str) -> None:
    files, title, app = KINDS[kind]
    make(project, files)
    said = project.ok("init", "--yes")
    assert said.startswith(f"a project of {title}\n")
    after = contents(project.directory)
    added = {name: text for name, text in after.items() if name not in files}
    assert all(after[name].startswith(text) for name, text in files.items()), "what was there stays"
    for text in added.values():
        assert all(line.strip() in said for line in text.splitlines()), "what is shown is what is written"
    table = tomllib.loads(after["pyproject.toml"])["tool"]["sqlq"]
    assert table == {"app": app, "database-url": "sqlite:///dev.db"}
    (test,) = (name for name in added if "test_" in name)
    assert "1 passed" in python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)


@pytest.mark.slow
def test_init_in_a_project_of_django(project: Command) -> None:
    python(project, "-m", "django", "startproject", "site_", ".")
    python(project, "manage.py", "startapp", "shop")
    said = project.ok("init", "--yes")
    assert said.startswith("a project of Django\n\nshop/tasks.py:\n")
    settings = project.directory / "site_" / "settings.py"
    settings.write_text(settings.read_text() + '\nINSTALLED_APPS += ["shop", "sqlq.django"]\n')
    first, *steps = said.partition("and run: ")[2].splitlines()
    for step in (first, *steps):
        words = step.split()
        assert words[0] == "python"
        said = python(project, *words[1:])
    assert "Ran 1 test" in said
    assert "OK" in said


@pytest.mark.parametrize("made", [(), ("pyproject.toml",)], ids=["a folder", "a file"])
def test_init_without_rights_writes_nothing(project: Command, made: tuple[str, ...]) -> None:
    make(project, dict.fromkeys(made, '[project]\nname = "x"\nversion = "1"\n'))
    locked = [project.directory / name for name in made] or [project.directory]
    before = contents(project.directory)
    for each in locked:
        each.chmod(0o555)
    try:
        done = project.process(*INIT, preexec_fn=obey_permissions)
    finally:
        for each in locked:
            each.chmod(0o755)
    assert done.code == 1
    (said,) = done.err.splitlines()
    assert said.startswith("sqlq: ")
    assert "Permission denied: " in said
    assert contents(project.directory) == before
