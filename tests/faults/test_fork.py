"""A web server that forks after its App has connected: no connection is shared with its children."""

from __future__ import annotations

import subprocess
import sys

import sqlq
from tests.faults.scorecard import record
from tests.kit.processes import ROOT

CHILDREN = 4
EACH = 50
PROGRAM = """
import os, sys
import sqlq
from sqlalchemy import event
from sqlq.database import pool
pool.TAKEN_SECONDS = 60  # so that what rests is not given back before the fork, however slow the machine
url, children, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
app = sqlq.App(url)
task = app.task(name="t")(lambda who, n: None)
with app.database.read():
    app.enqueue(task.new("before the fork", 0))
pool = app.database.engine.pool
assert (pool.checkedin(), pool.checkedout()) == (1, 1)  # at rest for the next job
connected = []
event.listen(app.database.engine, "connect", lambda *_: connected.append(os.getpid()))
pids = []
for child in range(children):
    pid = os.fork()
    if pid == 0:
        for n in range(each):
            app.enqueue(task.new(child, n))
            if connected != [os.getpid()]:
                os._exit(3)  # it would be luck if nothing went wrong
        app.close()
        os._exit(0)
    pids.append(pid)
for n in range(each):
    app.enqueue(task.new("parent", n))
ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
app.enqueue(task.new("after the children", 0))
app.close()
sys.exit(any(ended))
"""


def test_a_forking_server_shares_no_connection(app: sqlq.App, database_url: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        PROGRAM,
        database_url,
        str(CHILDREN),
        str(EACH),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = {(who, n) for who in (*range(CHILDREN), "parent") for n in range(EACH)}
    expected |= {("before the fork", 0), ("after the children", 0)}
    there = [tuple(job.payload["args"]) for job in app.jobs.list(limit=10_000)]
    record("G2: enqueueing beside forks", cases=len(expected), lost=len(expected - set(there)))
    assert len(there) == len(expected)
    assert set(there) == expected
