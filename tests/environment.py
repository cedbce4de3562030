"""Print the Python and the libraries of this run: `python -m tests.environment`, or `poe environment`.

SQLQ_TEST_ENVIRONMENT names the environment that is meant, by its folder, and SQLQ_TEST_PINS a file of pip
constraints. A run with another Python, or another version than a pin, ends with an error. `.ci/run` sets
both, so that no step can run in an environment that it does not mean.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

SHOWN = ("SQLAlchemy", "psycopg", "alembic", "msgspec", "click")


def described() -> str:
    """Return this environment in one line."""
    libraries = " · ".join(f"{name} {version(name)}" for name in SHOWN)
    return f"Python {platform.python_version()} · {libraries} · {sys.prefix}"


def mistakes() -> list[str]:
    """Return a sentence for each difference between this environment and the one that is meant."""
    sentences = []
    folder = os.environ.get("SQLQ_TEST_ENVIRONMENT")
    if folder and Path(folder).resolve() != Path(sys.prefix).resolve():
        sentences.append(f"this runs in {sys.prefix}, not in {folder}")
    if pins := os.environ.get("SQLQ_TEST_PINS"):
        for line in Path(pins).read_text().splitlines():
            name, is_pin, wanted = line.partition("==")
            if is_pin and version(name) != wanted:
                sentences.append(f"{name} is {version(name)} here, not {wanted}")
    return sentences


if __name__ == "__main__":
    print(described())
    if sentences := mistakes():
        sys.exit("\n".join(sentences))
