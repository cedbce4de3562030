"""A release of sqlq that is two revisions ahead: in this process for one test, or in a process of its own
beside today's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

from sqlq.database import migrate
from sqlq.schema import version

HEAD = "0003"
CHECKOUT = Path(version.__file__).parents[2]

PROGRAM = """
import logging, sys
from pathlib import Path
from sqlq.config import constants
constants.IDLE_TRANSACTION_MS = 300  # a migration may be idle for longer
from sqlq import cli
from sqlq.database import migrate
from sqlq.database.postgresql import online
from sqlq.schema import version

url, directory, head, lock_timeout_ms, *command = sys.argv[1:]
version.HEAD = head
migrate.location = lambda: Path(directory)
online.LOCK_TIMEOUT_MS = int(lock_timeout_ms)
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
sys.argv = ["sqlq", "-d", url, *command]
cli.main()
"""


def write_history(directory: Path) -> Path:
    """Make a directory with today's revisions and those after them."""
    shutil.copytree(migrate.location(), directory)
    for file in (Path(__file__).parent / "later").glob("*.py"):
        shutil.copy(file, directory / "versions")
    return directory


def become(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sqlq of this process be the later release until the end of the test."""
    monkeypatch.setattr(migrate, "location", lambda: directory)
    monkeypatch.setattr(version, "HEAD", HEAD)


class Migrator:
    """The later release's `sqlq migrate`, the command itself, in a process of its own."""

    def __init__(
        self, url: str, directory: Path, *, lock_timeout_ms: int = 300, command: Sequence[str] = ("migrate",)
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(directory), HEAD, str(lock_timeout_ms), *command],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                self._lines.put(line.strip())
        self._lines.put(None)

    def says(self, words: str) -> bool:
        """Wait for a line with these words, and return whether one came before the end.

        A minute without a line fails the test.
        """
        while (line := self._lines.get(timeout=60)) is not None:
            if words in line:
                return True
        return False

    def migrated_from(self, revision: str) -> bool:
        """Wait for the line that names this revision as the one before the migration."""
        if revision == HEAD:
            return self.says(f"at revision {HEAD}, the one needed")
        return self.says(f"from revision {revision} to {HEAD}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
