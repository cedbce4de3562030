"""The health file of a worker, which is young while the worker is alive. Its mark shows that it is no other
file."""

from __future__ import annotations

import errno
from pathlib import Path

MARK = b"sqlq work\n"


def is_one(file: Path) -> bool:
    """Whether a file is such a file. Raises `OSError`."""
    with file.open("rb") as opened:
        return opened.read(len(MARK)) == MARK  # guard: any-file-is-no-health-file


def touch(file: Path) -> None:
    """Make the file, or make it young. Raises `OSError`, also where another file has its name."""
    if not file.exists() or file.stat().st_size == 0:
        file.write_bytes(MARK)
    elif not is_one(file):
        raise FileExistsError(errno.EEXIST, "it is another file, and no health file")
    file.touch()
