"""The titles of the processes of `sqlq work` in ps and top, where setproctitle is installed."""

from __future__ import annotations

from collections.abc import Callable

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
