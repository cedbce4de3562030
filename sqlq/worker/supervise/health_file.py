"""The health file of a worker, which is young while the worker is alive. Its mark shows that it is no other
file."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from sqlq.worker.threads.log import log

TOUCH_SECONDS = 1.0
MARK = b"sqlq work\n"


def is_one(file: Path) -> bool:
    """Whether a file is such a file. Raises `OSError`."""
    with file.open("rb") as opened:
        return opened.read(len(MARK)) == MARK  # guard: health-file-has-its-mark


def touch(file: Path) -> None:
    """Make the file, or make it young. Raises `OSError`, also where another file has its name."""
    # in /tmp others may make a symlink or a pipe; guard: no-health-file-behind-a-symlink
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(fd, "r+b", buffering=0) as opened:
        mark = opened.read(len(MARK))
        if mark == b"":
            opened.write(MARK)
        elif mark != MARK:
            raise FileExistsError(errno.EEXIST, "it is another file, and no health file")
        os.utime(fd)


@dataclass(eq=False)
class HealthFile:
    """Keeps a health file young."""

    _file: Path

    _touch_at = 0.0
    _untouchable = False

    def tick(self, *, is_well: bool) -> None:
        """Touch the file, once a second, while all is well."""
        if monotonic() < self._touch_at:
            return
        self._touch_at = monotonic() + TOUCH_SECONDS
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
