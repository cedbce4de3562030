"""A release of sqlq that is two revisions ahead: in this process for one test, or in a process of its own
beside today's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from sqlq.database import migrate
from sqlq.schema import version
from tests.kit import wait_until
from tests.kit.preloaded import environment

TODAY, HEAD = version.HEAD, "0802"

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
        text = file.read_text().replace('"HEAD"', f'"{TODAY}"')
        (directory / "versions" / file.name).write_text(text)
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
        self.log = directory / f"{uuid4().hex}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, url, str(directory), HEAD, str(lock_timeout_ms), *command],
                cwd=directory,
                env=environment(PYTHONUNBUFFERED="1"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def says(self, words: str) -> bool:
        """Wait for these words in its log, and return whether they came before its end."""
        wait_until(lambda: words in self.log.read_text() or self.process.poll() is not None, what=words)
        return words in self.log.read_text()

    def migrated_from(self, revision: str) -> bool:
        """Wait for the line that names this revision as the one before the migration."""
        if revision == HEAD:
            return self.says(f"at revision {HEAD}, the one needed")
        return self.says(f"from revision {revision} to {HEAD}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
