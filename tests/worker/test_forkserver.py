"""The process that forks worker processes: how those begin and end, and when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sqlq.worker.ipc.forkserver import PROGRAM, Forked
from sqlq.worker.ipc.pipe import spawn
from tests.kit import for_each
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
BEGIN = """
import atexit, os, signal, sys, threading, time
from sqlq.worker.ipc import forkserver
from sqlq.worker.ipc.forkserver import PROGRAM
from sqlq.worker.ipc.pipe import spawn

def run():
    word, *rest = sys.argv[1:]
    if word == "exit":
        sys.exit(int(rest[0]))
    if word == "raise":
        raise ValueError("as any program may")
    if word == "fds":
        os.write(int(rest[0]), b"here")
        print("stdin:", repr(sys.stdin.read()), "open:", len(os.listdir("/proc/self/fd")), flush=True)
    if word == "thread":
        atexit.register(lambda: print("then this", flush=True))
        threading.Thread(target=lambda: (time.sleep(0.2), print("first this", flush=True))).start()
    if word == "wait":
        time.sleep(60)
"""


def said(program: str) -> str:
    """Return the output of a program of its own, which may start a fork server."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    return done.stdout + done.stderr


@for_each(("words", "code"), [(["exit", "0"], 0), (["exit", "3"], 3), (["raise"], 1), (["wait"], -9)])
def test_a_forked_process_ends_with_its_exit_code(words: list[str], code: int) -> None:
    output = said(
        "forkserver.start(run)\n"
        f"process = spawn([*PROGRAM, *{words}], [])\n"
        "print(type(process).__name__, process.poll() if 'wait' in process.args else '')\n"
        "'wait' in process.args and process.kill()\n"
        "print('code', process.wait(30), process.poll())\n"
    )
    assert "Forked" in output
    assert f"code {code} {code}" in output
    assert ("ValueError: as any program may" in output) is (words == ["raise"])


def test_a_forked_process_has_only_the_given_descriptors() -> None:
    output = said(
        "reading, writing = os.pipe()\n"
        "more = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]\n"
        "forkserver.start(run)\n"
        "process = spawn([*PROGRAM, 'fds', str(writing)], [writing])\n"
        "print('code', process.wait(30), os.read(reading, 4))\n"
    )
    assert "code 0 b'here'" in output
    (line,) = [line for line in output.splitlines() if line.startswith("stdin:")]
    assert line.startswith("stdin: ''")
    assert int(line.split()[-1]) < 10


def test_a_forked_process_waits_for_threads_and_runs_atexit() -> None:
    output = said("forkserver.start(run)\nprint('code', spawn([*PROGRAM, 'thread'], []).wait(30))\n")
    assert output.splitlines() == ["first this", "then this", "code 0"]


def test_the_fork_server_refuses_to_start_beside_other_threads() -> None:
    output = said(
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "forkserver.start(run)\nprint(forkserver.current)\n"
    )
    assert output == "None\n"


def test_the_fork_server_ends_with_its_owner() -> None:
    pid = int(said("forkserver.start(run)\nprint(forkserver.server_pid, flush=True)\nos._exit(0)\n"))
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="its end")


def test_another_program_is_not_started_by_the_fork_server() -> None:
    process = spawn([sys.executable, "-c", "pass"], ())
    assert not isinstance(process, Forked)
    assert process.wait(60) == 0
    assert PROGRAM[0] == sys.executable
