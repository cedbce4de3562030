"""When a worker ends by itself, beside the number of its jobs and its lifetime: its memory, and a time
without work."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from pathlib import Path

from sqlq.errors import ConfigurationError

MEASURE_SECONDS = 1.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_STATM = Path("/proc/self/statm")


def checked_bytes(value: str | int, what: str) -> int:
    """Return a size in bytes: "400MB" and "400M" are 400 million, "400MiB" 400 times 1,048,576.

    Raises `ConfigurationError` for anything but a size of more than nothing.

    >>> checked_bytes("1.5GB", "max_rss")
    1500000000
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        digits, unit, binary = found.groups()
        number = round(float(digits) * (1024 if binary else 1000) ** _POWERS[unit.upper()])
    if number is None or number <= 0:
        raise ConfigurationError(f'{what} is {value!r}: give a size such as "400MB" or "1.5GB"')
    return number


def resident_bytes() -> int:
    """Return how much memory this process has; where the system does not tell, the most it ever had."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def readable_bytes(number: int) -> str:
    """Say a size: "412 MB", "1.5 GB"."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{max(1, round(number / 1e6)):,} MB"


class Bounds:
    """Watches the bounds of one worker."""

    def __init__(self, max_rss: int | None, max_idle_ms: int | None) -> None:
        self._max_rss = max_rss
        self._max_idle_ms = max_idle_ms
        self._measured_at = float("-inf")
        self._worked_at: float | None = None  # guard: idleness-begins-with-a-look
        """When there was work last, or the first look that found none; None while it is not known whether
        there is some."""

    def begin(self) -> None:
        """Begin to count. Raises `ConfigurationError` where the process is too large before its first job: it
        would be replaced for ever."""
        if self._max_rss is not None and (size := resident_bytes()) >= self._max_rss:
            raise ConfigurationError(
                f"max_rss is {readable_bytes(self._max_rss)}: this process has {readable_bytes(size)} before "
                "its first job; give more than that, and room for what jobs need"
            )

    def works(self) -> None:
        """Note that there is work, or that nothing is to be done for now."""
        self._worked_at = time.monotonic()

    def looked(self) -> None:
        """Note that the database has answered whether there is work."""
        if self._worked_at is None:
            self._worked_at = time.monotonic()

    def cannot_look(self) -> None:
        """Note that the database does not answer: what waits in it is not known, so that no time counts."""
        self._worked_at = None

    def idle_ms(self) -> float:
        """Return for how long there has been no work."""
        return 0.0 if self._worked_at is None else (time.monotonic() - self._worked_at) * 1000

    def is_idle_for_long(self) -> bool:
        """Whether a worker that is not to wait for work for ever has waited long enough."""
        return self._max_idle_ms is not None and self.idle_ms() >= self._max_idle_ms

    def is_too_large(self) -> str | None:
        """Return why this process should be replaced; None while it need not be."""
        if self._max_rss is None or time.monotonic() < self._measured_at + MEASURE_SECONDS:
            return None
        self._measured_at = time.monotonic()
        size = resident_bytes()
        if size <= self._max_rss:  # guard: large-processes-are-replaced
            return None
        return f"it has {readable_bytes(size)} in use, more than {readable_bytes(self._max_rss)}"
