"""A program that runs a worker itself, with or without handlers of its own for signals."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from tests.programs.play import app

if __name__ == "__main__":
    worker = app.worker()

    def stop(*_: object) -> None:
        Path("own").touch()
        threading.Thread(target=worker.stop).start()

    if sys.argv[1] == "own":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    worker.run()
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    sys.exit(5)
