"""A program that waits for jobs, and then forks: each of the two processes waits for its own."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import sqlq

if __name__ == "__main__":
    app = sqlq.App(sys.argv[1])
    task = app.task(name="t")(lambda n: n)
    with suppress(sqlq.WaitTimeoutError):
        app.result(app.enqueue(task.new(0).set(delay="1h")), timeout="50ms")
    assert any(thread.name == "sqlq-results" for thread in threading.enumerate())
    pid = os.fork()
    assert app.result(app.enqueue(task.new(pid)), timeout="50s") == pid
    app.close()
    if pid == 0:
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
