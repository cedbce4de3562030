"""Peers' own environments: each in a folder of its own, for their requirements may clash, kept from one run
to the next."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.subject import Subject

TREE = Path(__file__).resolve().parents[1]


class Environments:
    """Finds the programs of a subject, and installs a peer when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = folder or cache / "sqlq-benchmarks"

    def programs(self, subject: Subject) -> Path:
        """Return the folder with the subject's python. Raises what `installed` raises."""
        if not subject.requirements:
            return Path(sys.executable).parent
        return self.installed(subject.name, subject.requirements)

    def installed(self, name: str, requirements: tuple[str, ...]) -> Path:
        """Return the folder with the python of an environment that has these requirements; makes it where it
        is not yet. Raises `RuntimeError` with pip's last words where they cannot be installed."""
        place = self.folder / name
        programs = place / "bin"
        installed = place / "installed"
        if not installed.exists() or installed.read_text() != repr(requirements):
            venv.create(place, clear=True, with_pip=True)
            command = [
                str(programs / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *requirements,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"pip could not install {name}: {done.stderr.strip()[-300:]}")
            installed.write_text(repr(requirements))
        return programs

    def command(self, subject: Subject, command: list[str]) -> list[str]:
        """Return a subject's command with the path of its program."""
        program, *arguments = command
        return [str(self.programs(subject) / program), *arguments]


def variables(more: dict[str, str]) -> dict[str, str]:
    """Return an environment in which `benchmarks` can be imported and no setting of the shell's own sqlq is
    seen."""
    foreign = ("SQLQ_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PG", "DJANGO")
    return (
        {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        | {"PYTHONPATH": str(TREE)}
        | more
    )
