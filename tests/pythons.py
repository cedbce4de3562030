"""Run the default tests on each Python that sqlq is for.

    python -m tests.pythons          3.11 to 3.14
    python -m tests.pythons 3.14     this one

Each has an environment of its own. The interpreters are those on PATH and of pyenv; a missing one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def interpreter(version: str) -> str | None:
    """Return the program of an interpreter. It runs each candidate, since a shim may have nothing behind
    it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        try:
            told = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if told.stdout.startswith(f"Python {version}."):
            return candidate
    return None


def passes(version: str) -> bool:
    """Run the tests on this Python, and return whether all pass."""
    if (program := interpreter(version)) is None:
        print(f"there is no Python {version} on PATH or among pyenv's")
        return False
    with tempfile.TemporaryDirectory(prefix="sqlq-python-") as folder:
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([program, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-e", ".[test]"], check=True, cwd=ROOT)
        environment = os.environ | {"SQLQ_TEST_ENVIRONMENT": folder}
        environment.pop("SQLQ_TEST_ALL", None)
        for module in ("tests.environment", "pytest"):
            done = subprocess.run([python, "-m", module], check=False, cwd=ROOT, env=environment)
            if done.returncode:
                return False
    return True


def main(name: str, versions: Sequence[str], passes: Callable[[str], bool]) -> int:
    """Try each version of a program or library; return the exit code."""
    refused = []
    for version in versions:
        print(f"── {name} {version}", flush=True)
        if not passes(version):
            refused.append(version)
    print(f"fails on {name} {', '.join(refused)}" if refused else "passes on all of them")
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main("Python", sys.argv[1:] or VERSIONS, passes))
