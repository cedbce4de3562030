"""Programs that fork while a SQLite file is open, each by its name."""

from __future__ import annotations

import os
import sys
import threading
from typing import TypeAlias

from sqlalchemy import create_engine

import sqlq
from sqlq.errors import ConfigurationError
from tests.programs.notes import nap

Who: TypeAlias = sqlq.Task[[str], None]


def closes_first(app: sqlq.App, task: Who) -> None:
    """The parent closes the file, as its last process would, between two commits of the child."""
    app.enqueue(task.new("parent"))
    answers, says = os.pipe()
    waits, goes_on = os.pipe()
    pid = os.fork()
    if pid == 0:
        app.enqueue(task.new("child"))
        os.write(says, b".")
        os.read(waits, 1)
        app.enqueue(task.new("child again"))
        os._exit(0)
    os.close(says)  # the child may have ended
    os.read(answers, 1)
    app.close()
    os.write(goes_on, b".")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def reads_meanwhile(app: sqlq.App, task: Who) -> None:
    """A thread reads at the time of the fork; another begins to read while the fork waits."""
    app.enqueue(task.new("parent"))
    reads, ends = threading.Event(), threading.Event()

    def read() -> None:
        with app.database.read():
            reads.set()
            ends.wait(60)

    def read_later() -> None:
        nap(0.2)
        threading.Timer(0.1, ends.set).start()
        with app.database.read():
            nap(30)

    thread = threading.Thread(target=read)
    thread.start()
    reads.wait(60)
    threading.Thread(target=read_later, daemon=True).start()
    pid = os.fork()
    if pid == 0:
        app.enqueue(task.new("child"))
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def keeps_open(app: sqlq.App, task: Who) -> None:
    """The program has a connection of its own to the file at the time of the fork."""
    app.enqueue(task.new("parent"))
    with create_engine(app.url).connect() as conn:
        conn.exec_driver_sql("SELECT 1")
        pid = os.fork()
        if pid == 0:
            try:
                app.enqueue(task.new("child"))
            except ConfigurationError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    opened = sqlq.App(sys.argv[2])
    globals()[sys.argv[1]](opened, opened.task(name="t")(lambda who: None))
