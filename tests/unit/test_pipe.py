"""Messages through the pipe between processes of a worker, and their shared memory of started jobs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Finished, Released, Retried, SelfCompleted
from sqlq.worker.ipc import parent
from sqlq.worker.ipc.parent import SharedMemory
from sqlq.worker.ipc.pipe import Pipe, packed, spawn, unpacked
from tests.kit import for_each

MOMENT = datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
JOB = ClaimedJob(1, 2, "q", "t", '{"args": ["ä"]}', 1, 5, 0, None, None, MOMENT, 1)
ERROR = ErrorText("ValueError", "no\n\0", "trace")
OUTCOMES = [Finished('{"a": [1]}'), Cancelled(None), Failed("error", ERROR), Released(3, unknown_task=True)]


@for_each("value", [JOB, *OUTCOMES, Retried(5, ERROR, "timeout"), SelfCompleted(Retried(5, ERROR))])
def test_a_message_through_a_pipe_arrives_equal(value: Any) -> None:
    here, there = Pipe.pair()
    other = Pipe(there)
    here.send(value=packed(value))
    message = other.receive()
    assert message is not None
    assert unpacked(message["value"]) == value
    here.close()
    assert other.receive() is None
    other.send(too="late")
    other.close()


def test_offers_do_not_wait_for_a_process_that_does_not_read() -> None:
    here, there = Pipe.pair()
    for n in range(50):
        here.offer(droppable=True, n=n, text="x" * 100_000)
    here.offer(last=True)
    other = Pipe(there)
    seen: list[Any] = []
    while not seen or "last" not in seen[-1]:
        here.flush()
        seen.append(other.receive())
    assert [m["n"] for m in seen[:-1]] == list(range(len(seen) - 1)), "what was sent came whole and in order"
    assert len(seen) < 50, "and the rest was dropped"
    here.close()
    other.close()


def test_a_waiting_message_begins_after_the_one_that_did_not_fit() -> None:
    link, there = Pipe.pair()
    for n in range(1_000):
        link.offer(n=n, text="x" * 10_000)
    assert link._unsent, "nothing was left over, so nothing was tried"
    other = Pipe(there)
    got: list[Any] = []
    reading = threading.Thread(target=lambda: got.extend(iter(other.receive, None)))
    reading.start()
    link.send(n=1_000)
    link.close()
    reading.join(60)
    other.close()
    assert [message["n"] for message in got] == list(range(1_001))


def test_a_message_cut_off_is_ignored() -> None:
    """A message that cannot be read is ignored, too. Its sender died, which the supervisor sees otherwise."""
    here, there = Pipe.pair()
    there.sendall(b'{"half": ')
    there.close()
    assert here.receive(strictly=True) is None
    here.close()


def test_a_new_process_does_not_meet_the_terminals_signals_half_started() -> None:
    program = (
        "import threading; from sqlq.worker.ipc.pipe import ignore_signals; ignore_signals(); "
        "threading.Event().wait(60)"
    )
    process = spawn([sys.executable, "-c", program], ())
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL


def _use(fd: int, ready: Any) -> None:
    box = SharedMemory(fd)
    for n in range(5):
        box.started((n + 1, 7))
    box.ended([(2, 7), (99, 1)])
    box.pulse()
    ready.set()
    signal.pause()


def test_shared_memory_outlives_a_process_that_is_killed() -> None:
    box, fd = SharedMemory.create()
    assert box.read() == set()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_use, args=(fd, ready))
    process.start()
    assert ready.wait(10)
    process.kill()
    process.join()
    assert box.read() == {(1, 7), (3, 7), (4, 7), (5, 7)}
    assert box.last_pulse() > 0
    box.close()
    os.close(fd)


def test_shared_memory_that_overflowed_reads_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "CELLS", 2)
    box, fd = SharedMemory.create()
    os.close(fd)
    for n in range(2):
        box.started((n + 1, 1))
    assert box.read() == {(1, 1), (2, 1)}
    box.started((3, 1))
    assert box.read() is None
    box.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there memory that is shared is a file")
def test_shared_memory_needs_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose root is read-only there is no directory for files. Elsewhere a file will do."""
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", "/nowhere")
        use_a_box()
    monkeypatch.delattr(os, "memfd_create")
    use_a_box()


def use_a_box() -> None:
    box, fd = SharedMemory.create()
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    box.started((1, 1))
    assert box.read() == {(1, 1)}
    box.close()


def test_a_process_without_children_has_no_orphans_to_bury() -> None:
    program = "from sqlq.worker.ipc.pipe import bury_orphans; bury_orphans()"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


EXIT = """
import atexit, time
from sqlq.cli import processes
processes.THREADS_SECONDS = processes.EXIT_SECONDS = 0.2
atexit.register(time.sleep, 3600)
processes.leave_in_time(3)
"""


def test_a_process_ends_when_its_exit_functions_do_not() -> None:
    assert subprocess.run([sys.executable, "-c", EXIT], timeout=30, check=False).returncode == 3
