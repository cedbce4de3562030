"""Run the tests of enqueue and of outcomes on each release of SQLAlchemy that pyproject.toml admits.

    python -m tests.releases             all of them, which takes a quarter of an hour
    python -m tests.releases 2.0.38 …    these

pip puts each release into a folder of its own, which stands before this environment's on the path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from tests.pythons import main

ROOT = Path(__file__).parents[1]
TESTS = ("tests/worker/test_outcomes.py", "tests/conformance/test_transactions.py")
OLDEST = re.search(r"^SQLAlchemy==(.*)$", (ROOT / ".ci/oldest.txt").read_text(), re.MULTILINE)
"""The release of .ci/oldest.txt, with which the gate runs on the oldest Python. Another one must import."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def admitted() -> Iterator[str]:
    """Yield the releases on the package index that the bounds admit, the oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = next(
        each for each in map(Requirement, project["dependencies"]) if each.name.lower() == "sqlalchemy"
    )
    listing = subprocess.run(
        [*PIP, "index", "versions", "SQLAlchemy"], capture_output=True, text=True, check=True
    ).stdout
    releases = re.search(r"Available versions: (.*)", listing)
    assert releases is not None, listing
    yield from (each for each in reversed(releases[1].split(", ")) if bounds.specifier.contains(each))


def passes(release: str) -> bool:
    """Run the tests with this release of SQLAlchemy, and return whether all pass."""
    with tempfile.TemporaryDirectory(prefix="sqlq-release-") as name:
        folder = Path(name)
        pin = f"SQLAlchemy=={release}"
        subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", name, pin], check=True)
        (folder / "pins.txt").write_text(pin)
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "SQLQ_TEST_PINS": str(folder / "pins.txt")}
        imports = [sys.executable, "-c", "import sqlalchemy"]
        if subprocess.run(imports, check=False, capture_output=True, env=environment).returncode:
            print(f"SKIPPED: SQLAlchemy {release} is older than this Python; the gate's oldest pair has it")
            return OLDEST is not None and release == OLDEST[1]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        return subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main("SQLAlchemy", sys.argv[1:] or list(admitted()), passes))
