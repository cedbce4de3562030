"""`sqlq work` as process 1 of a container: a PID namespace of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

import sqlq
from tests.kit import needs, wait_until
from tests.kit.processes import ROOT, WorkerProcess, reasons
from tests.kit.scenario import Scenario

AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
NAMESPACE = ["unshare", *AS_ROOT, "--pid", "--fork", "--mount-proc", "--kill-child"]
MAY_UNSHARE = (
    shutil.which("unshare") is not None
    and subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not MAY_UNSHARE, reason="no unshare here, or no right to make a PID namespace"),
    needs("cheap"),
]

PLAIN = """
import sqlq
app = sqlq.App()

@app.task
def here(): ...

@app.task(isolate=True)
def alone(): ...
"""

READ_ONLY = """
for place in / /dev/shm /tmp /var/tmp; do
    mount --bind $place $place && mount -o remount,bind,ro $place || exit 77
done
mount --bind "$1" "$1" && mount -o remount,bind,rw "$1" || exit 77
cd / && ! touch /tmp/sqlq-may-not 2>/dev/null || exit 78
shift
exec "$@"
"""
"""Runs a command where nothing can be written but in one folder."""


@pytest.fixture
def play(tmp_path: Path, database_url: str) -> Iterator[Scenario]:
    with Scenario(tmp_path / "play", database_url, "play") as play:
        yield play


@contextmanager
def container(play: Scenario) -> Iterator[tuple[WorkerProcess, psutil.Process]]:
    """Run `sqlq work` as process 1; yields it with its process as seen from outside."""
    worker = WorkerProcess(play.folder, f"{play.program.__name__}:app", play.url, anew=True, by=NAMESPACE)
    try:
        worker.wait_ready()
        (first,) = psutil.Process(worker.process.pid).children()
        yield worker, first
    finally:
        with suppress(ProcessLookupError):
            worker.kill()


def dead(first: psutil.Process) -> list[int]:
    """Return the children that nobody has waited for."""
    return [child.pid for child in first.children() if child.status() == psutil.STATUS_ZOMBIE]


def test_process_one_stops_in_good_order(play: Scenario) -> None:
    job = play.enqueue("wait")
    with container(play) as (worker, first):
        wait_until(lambda: play.starts(job), what="the job running")
        first.send_signal(signal.SIGTERM)
        wait_until(lambda: worker.said("what runs may finish"), what="the signal noticed")
        play.touch("go")
        assert worker.process.wait(30) == 0
    assert play.app.jobs.get(job).state == "finished"
    assert not worker.said("Errno")


def test_process_one_reaps_orphans_and_survives_the_death_of_its_only_child(play: Scenario) -> None:
    with container(play) as (worker, first):
        for _ in range(5):
            play.enqueue("orphan")
        play.wait_done()
        wait_until(lambda: len(first.children()) == 1, what="only the fork server left")
        assert dead(first) == []
        job = play.enqueue("wait")
        wait_until(partial(play.started, job, 1), timeout=60, what="the job running")
        (server,) = first.children()
        (child,) = server.children()
        server.kill()  # now the other one is the only child
        child.kill()
        wait_until(partial(play.started, job, 2), timeout=60, what="the job running again")
        play.touch("go")
        play.wait_done()
        wait_until(lambda: not dead(first), what="both buried")
        first.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0
    done = play.app.jobs.get(job)
    assert (done.state, done.attempts, reasons(done)) == ("finished", 2, ["worker_lost"])


def test_process_one_works_on_a_read_only_filesystem(
    app: sqlq.App, tmp_path: Path, database_url: str
) -> None:
    """All is read-only but the folder of the database."""
    (tmp_path / "plain.py").write_text(PLAIN)
    work = [sys.executable, "-m", "sqlq", "-a", "plain:app", "-d", database_url, "work", "--drain"]
    jobs = [app.enqueue(app.named(f"plain.{name}").new()) for name in ("here", "alone")]
    done = subprocess.run(
        ["unshare", *AS_ROOT, "--mount", "sh", "-c", READ_ONLY, "sh", str(tmp_path), *work],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert {app.jobs.get(job.id).state for job in jobs} == {"finished"}
