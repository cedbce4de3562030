"""What ps and top show of the processes of `sqlq work`, where setproctitle is installed."""

from __future__ import annotations

from collections.abc import Callable

from sqlq.config.command_hint import escaped


def entitle(name: str | None) -> Callable[[str], None]:
    """Return what sets the title of this process, as in "sqlq: mail-1 worker idle"; it does nothing where
    setproctitle is not installed, and nothing while the title stays the same."""
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
