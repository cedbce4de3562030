"""The distribution that pip installs is `sqlq-jobs`; `sqlq` on the package index is another project's."""

from __future__ import annotations

from importlib import metadata

REMEDY = "pip uninstall -y sqlq && pip install --force-reinstall --no-deps sqlq-jobs"


def intruder() -> str | None:
    """Return a sentence about the other project's distribution, where it is installed."""
    for each in metadata.distributions(name="sqlq"):
        if all(script.value != "sqlq.cli:main" for script in each.entry_points):
            return f"sqlq {each.version} is another project's, and overwrites files of sqlq-jobs"
    return None
