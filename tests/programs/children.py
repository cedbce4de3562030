"""Worker processes as their supervisor sees them: one that is at work, and one that has nothing to do."""

from __future__ import annotations

import sys
from typing import Any

from sqlq.worker.ipc.pipe import Pipe


def ready(link: Any) -> None:
    link.send(ready=link.receive()["facts"])
    while "stop" not in link.receive():
        pass
    link.send(ended={})


def idle(link: Any) -> None:
    """Have been idle for long, as the first process, or since a pause, as the second."""
    generation = link.receive()["generation"]
    link.send(report={"counts": {}, "running": 1, "idle_ms": (5_000, 10)[generation]})
    while (message := link.receive()) is not None and "stop" not in message:
        link.send(report={"counts": {}, "running": 0, "idle_ms": 1_000})


if __name__ == "__main__":
    {"ready": ready, "idle": idle}[sys.argv[1]](Pipe.inherited(int(sys.argv[2])))
