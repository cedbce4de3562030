"""The command line, `sqlq`: a thin face of App and Admin.

Commands import what they need when they run, so that `sqlq --help` answers at once.
"""

from sqlq.cli.root import main

__all__ = ["main"]
