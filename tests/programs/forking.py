"""Programs that fork, each by its name."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TypeAlias

from sqlalchemy import create_engine

import sqlq
from sqlq.errors import ConfigurationError
from tests.programs.notes import nap

Who: TypeAlias = sqlq.Task[[str], None]


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def closes_first(app: sqlq.App, task: Who) -> int:
    """The parent closes the file, as its last process would, between two commits of the child."""
    answers, says = os.pipe()
    waits, goes_on = os.pipe()
    if (pid := os.fork()) == 0:
        app.enqueue(task.new("child"))
        os.write(says, b".")
        os.read(waits, 1)
        app.enqueue(task.new("child again"))
        os._exit(0)
    os.close(says)  # the child may have ended
    os.read(answers, 1)
    app.close()
    os.write(goes_on, b".")
    return ended(pid)


def reads_meanwhile(app: sqlq.App, task: Who) -> int:
    """A thread reads at the time of the fork; another begins to read while the fork waits."""
    reads, ends = threading.Event(), threading.Event()

    def read(seconds: float) -> None:
        with app.database.read():
            reads.set()
            nap(seconds) if seconds else ends.wait(60)

    def read_later() -> None:
        threading.Timer(0.1, ends.set).start()
        read(30)

    threading.Thread(target=read, args=(0,)).start()
    reads.wait(60)
    later = threading.Timer(0.2, read_later)
    later.daemon = True
    later.start()
    if (pid := os.fork()) == 0:
        app.enqueue(task.new("child"))
        os._exit(0)
    return ended(pid)


def keeps_open(app: sqlq.App, task: Who) -> int:
    """The program has a connection of its own to the file at the time of the fork."""
    with create_engine(app.url).connect() as conn:
        conn.exec_driver_sql("SELECT 1")
        if (pid := os.fork()) == 0:
            try:
                app.enqueue(task.new("child"))
            except ConfigurationError as error:
                print(error, flush=True)
            os._exit(0)
        return ended(pid)


def waits(app: sqlq.App, task: Who) -> int:
    """Each of the two processes waits for a job of its own, after the parent has waited before."""
    with suppress(sqlq.WaitTimeoutError):
        app.result(app.enqueue(task.new("nobody").set(delay="1h")), timeout="50ms")
    assert any(thread.name == "sqlq-results" for thread in threading.enumerate())
    pid = os.fork()
    app.result(app.enqueue(task.new(str(pid))), timeout="50s")
    app.close()
    return ended(pid) if pid else 0


if __name__ == "__main__":
    opened = sqlq.App(sys.argv[2])
    who = opened.task(name="t")(lambda who: None)
    opened.enqueue(who.new("parent"))
    sys.exit(globals()[sys.argv[1]](opened, who))
