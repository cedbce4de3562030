"""The command line, `sqlq`: a thin face of `sqlq.App`.

The module of a command is imported when it is first used, so that `sqlq --help` answers at once.
"""

import gc
import sys
from typing import NoReturn

from sqlq.config.constants import INTERRUPTED

STAYING = frozenset({"work", "web", "metrics", "demo"})
"""Commands whose process stays, and so collects its garbage."""


def main() -> NoReturn:
    """Run the command line and exit. A Ctrl-C is quiet, also in the middle of an import."""
    # Imports make many objects and no garbage. Collections among them, and at the end of the process, took a
    # quarter of a short command's time. Worker processes choose thresholds of their own.
    gc.set_threshold(1_000_000 if STAYING.isdisjoint(sys.argv) else 50_000, 20, 100)
    try:
        from sqlq.cli.root import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()


__all__ = ["main"]
