"""A process with a fork server, as `sqlq work` has one: what it forks, and what becomes of these."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from sqlq.worker.ipc import forkserver
from sqlq.worker.ipc.pipe import spawn
from tests.programs.notes import nap

PROGRAM = [sys.executable, "-m", "sqlq"]


def run() -> None:
    """Be the command of a forked process."""
    word, *rest = sys.argv[1:]
    match word:
        case "exit":
            sys.exit(int(rest[0]))
        case "raise":
            raise ValueError("as any program may")
        case "look":
            seen = f"{sys.stdin.read()!r} {len([*Path('/proc/self/fd').iterdir()])}"
            os.write(int(rest[0]), seen.encode())
        case "wait":
            nap(60)


def forked(*words: str, fds: tuple[int, ...] = ()) -> Any:
    return spawn([*PROGRAM, *words], fds)


def server() -> int:
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text())


def exit_codes() -> None:
    forkserver.start(run, PROGRAM)
    for words, code in ((["exit", "0"], 0), (["exit", "3"], 3), (["raise"], 1)):
        process = forked(*words)
        assert isinstance(process, forkserver.Forked)
        assert (process.wait(30), process.poll()) == (code, code)
    waiting = forked("wait")
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.wait(30) == -signal.SIGKILL


def descriptors() -> None:
    """A process has none of the server's or of other processes."""
    reading, writing = os.pipe()
    private, far = socket.socketpair()
    forkserver.start(run, PROGRAM, private=[private.fileno(), far.fileno()])
    others = [forked("wait") for _ in range(10)]
    assert forked("look", str(writing), fds=(writing,)).wait(30) == 0
    stdin, number = os.read(reading, 100).decode().split()
    assert stdin == "''"
    assert int(number) < 12
    private.close()
    far.settimeout(5)
    assert far.recv(1) == b""
    for each in others:
        each.kill()


def owner() -> None:
    """The server ends with its owner."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        forkserver.start(run, PROGRAM)
        os.write(writing, str(server()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    place = Path(f"/proc/{os.read(reading, 16).decode()}")
    while place.exists():
        nap(0.01)


def standstill() -> None:
    """A process starts anew when the server stands still, and so do the next ones."""
    forkserver.ANSWER_SECONDS = 0.2
    forkserver.start(run, PROGRAM)
    waiting, pid = forked("wait"), server()
    os.kill(pid, signal.SIGSTOP)
    process = spawn([*PROGRAM, "--version"], [])
    assert isinstance(process, subprocess.Popen)
    assert process.wait(60) == 0
    assert forkserver.current is None
    waiting.kill()
    assert waiting.wait(30) == -signal.SIGKILL
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        {each.__name__: each for each in (exit_codes, descriptors, owner, standstill)}[sys.argv[1]]()
    except BaseException:
        traceback.print_exc()
        os.killpg(0, signal.SIGKILL)  # with all that it has forked
