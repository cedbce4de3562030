"""The health file of a worker, which is young while the worker is alive. Its mark shows that it is no other
file."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

log = logging.getLogger("sqlq.worker")
TOUCH_SECONDS = 1.0
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


class HealthFile:
    """Keeps a health file young."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._touch_at = 0.0
        self._untouchable = False

    def tick(self, *, is_well: bool) -> None:
        """Touch the file, once a second, while all is well."""
        if time.monotonic() < self._touch_at:
            return
        self._touch_at = time.monotonic() + TOUCH_SECONDS
        if not is_well:
            return
        try:
            touch(self._file)
        except OSError as error:
            level = logging.DEBUG if self._untouchable else logging.WARNING
            log.log(level, "the health file cannot be touched: %s", error)
            self._untouchable = True
        else:
            self._untouchable = False
