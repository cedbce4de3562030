"""The command line, `sqlq`: a thin face of App and Admin.

Commands import what they need when they run, so that `sqlq --help` answers at once.
"""

import sys
from typing import NoReturn

INTERRUPTED = 130
"""128 + SIGINT, as shells count it."""


def main() -> NoReturn:
    """Run the command line and exit. A Ctrl-C is quiet, also in the middle of an import."""
    try:
        from sqlq.cli.root import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


__all__ = ["main"]
