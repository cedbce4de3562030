"""The process that forks worker processes: how those begin and end, and when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit import for_each, wait_until

ROOT = Path(__file__).parents[2]
BEGIN = """
import atexit, os, signal, socket, sys, threading, time
from pathlib import Path
from sqlq.worker.ipc import forkserver
from sqlq.worker.ipc.pipe import spawn

PROGRAM = [sys.executable, "-m", "sqlq"]

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
    if word == "fork":
        os.waitpid(os.fork() or os._exit(0), 0)
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
        "forkserver.start(run, PROGRAM)\n"
        f"process = spawn([*PROGRAM, *{words}], [])\n"
        "print(type(process).__name__, process.poll() if 'wait' in process.args else '')\n"
        "'wait' in process.args and process.kill()\n"
        "print('code', process.wait(30), process.poll())\n"
    )
    assert "Forked" in output
    assert f"code {code} {code}" in output
    assert ("ValueError: as any program may" in output) is (words == ["raise"])


def test_python_warns_of_no_fork_when_the_server_is_nice() -> None:
    output = said(
        "import warnings\n"
        "warnings.simplefilter('always', DeprecationWarning)\n"
        "os.nice(5)\n"
        "forkserver.start(run, PROGRAM)\n"
        "print('code', spawn([*PROGRAM, 'fork'], []).wait(30))\n"
    )
    assert output == "code 0\n"


def test_a_forked_process_has_no_descriptor_of_the_server_or_of_others() -> None:
    output = said(
        "reading, writing = os.pipe()\n"
        "private = socket.socketpair()\n"
        "forkserver.start(run, PROGRAM, private=[end.fileno() for end in private])\n"
        "others = [spawn([*PROGRAM, 'wait'], []) for _ in range(10)]\n"
        "process = spawn([*PROGRAM, 'fds', str(writing)], [writing])\n"
        "print('code', process.wait(30), os.read(reading, 4))\n"
        "private[0].close()\n"
        "private[1].settimeout(5)\n"
        "print('end:', private[1].recv(1))\n"
        "for each in others: each.kill()\n"
    )
    assert "end: b''" in output
    assert "code 0 b'here'" in output
    (line,) = [line for line in output.splitlines() if line.startswith("stdin:")]
    assert line.startswith("stdin: ''")
    assert int(line.split()[-1]) < 12


def test_a_forked_process_waits_for_threads_and_runs_atexit() -> None:
    output = said("forkserver.start(run, PROGRAM)\nprint('code', spawn([*PROGRAM, 'thread'], []).wait(30))\n")
    assert output.splitlines() == ["first this", "then this", "code 0"]


def test_the_fork_server_refuses_to_start_beside_other_threads() -> None:
    output = said(
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
        "forkserver.start(run, PROGRAM)\nprint(forkserver.current)\n"
    )
    assert output == "None\n"


def test_the_fork_server_ends_with_its_owner() -> None:
    children = "Path(f'/proc/self/task/{os.getpid()}/children').read_text()"
    pid = int(said(f"forkserver.start(run, PROGRAM)\nprint({children}, flush=True)\nos._exit(0)\n"))
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="its end")


def test_a_process_starts_anew_when_the_fork_server_stands_still() -> None:
    output = said(
        "forkserver.ANSWER_SECONDS = 0.2\n"
        "forkserver.start(run, PROGRAM)\n"
        "(server,) = Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()\n"
        "waiting = spawn([*PROGRAM, 'wait'], [])\n"
        "os.kill(int(server), signal.SIGSTOP)\n"
        "process = spawn([sys.executable, '-m', 'sqlq', '--version'], [])\n"
        "print(type(process).__name__, process.wait(60), forkserver.current)\n"
        "waiting.kill()\n"
        "print('code', waiting.wait(30))\n"
        "os.kill(int(server), signal.SIGKILL)\n"
    )
    assert "Popen 0 None" in output
    assert output.count("the fork server does not answer") == 1
    assert "code -9" in output
