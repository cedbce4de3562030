"""A program that forks beside a worker's handlers of signals."""

from __future__ import annotations

import os
import signal
import sys

from sqlq.worker.lifecycle.stop import stopped_by_signals
from tests.programs.notes import nap

if __name__ == "__main__":
    with stopped_by_signals(lambda: os._exit(9)):
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                nap(20)
                os._exit(8)
            os.kill(pid, signal.SIGTERM)  # often before the child has handlers of Python's
            status = os.waitpid(pid, 0)[1]
            if status != signal.SIGTERM:
                sys.exit(f"a child ended with {status}")
