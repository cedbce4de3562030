"""The titles of the processes of `sqlq work` in ps and top, where setproctitle is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sqlq.config.command_hint import escaped


def entitle(name: str | None) -> Callable[[str], None]:
    """Return a function that sets the title of this process, as in "sqlq: mail-1 worker idle". It does
    nothing where setproctitle is not installed."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return lambda said: None
    before = "sqlq: " if name is None else f"sqlq: {name} "
    shown = ""

    def show(said: str) -> None:
        nonlocal shown
        if said != shown:
            shown = said
            setproctitle(escaped(before + said))

    return show


def conceal(text: str) -> None:
    """Overwrite a text in the command line of this process, which all users of the machine may read. The
    processes that it forks have the same command line."""
    secret = os.fsencode(text)
    with suppress(OSError):  # another system than Linux, or one that forbids it
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
        begin, place = int(fields[45]), Path("/proc/self/cmdline").read_bytes().find(secret)
        if place >= 0:
            with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
                memory.seek(begin + place)
                memory.write(b"*" * len(secret))
