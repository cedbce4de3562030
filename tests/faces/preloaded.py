"""A process that has imported what the commands need, and forks for each command that a test runs.

Half a second of each command is Python importing; there are a thousand of them. A command so started is a
process of its own with the environment, directory, arguments and standard streams that it was given. What is
about processes themselves (workers that stay, signals, the interpreter's own options) is started as people
start it.
"""

from __future__ import annotations

import array
import atexit
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMPORTED = (
    *("sqlq.app", "sqlq.admin", "sqlq.doctor", "sqlq.tables", "sqlq.schema.migrate", "sqlq.worker.worker"),
    *("sqlq.cli.root", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite"),
    *("alembic.command", "psycopg", "rich.console", "rich.table", "rich.live"),
)
INTERPRETERS = ("PYTHON", "LC_", "LANG")
"""Variables that begin so are read when Python starts."""


@cache
def preloaded() -> Preloaded:
    """Return the one of this test process."""
    return Preloaded()


class Preloaded:
    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQLQ_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faces.preloaded", str(there.fileno())],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[there.fileno()],
        )
        there.close()
        self._words = self._socket.makefile("rb")

    def run(
        self, args: Sequence[str], directory: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `sqlq` with these arguments, as `subprocess.run` would, with nothing on its standard input."""
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            Path(os.devnull).open("rb") as nothing,
        ):
            request = json.dumps([list(args), str(directory), dict(environment)]).encode() + b"\n"
            fds = array.array("i", [stream.fileno() for stream in (nothing, out, err)])
            self._socket.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            self._socket.sendall(request)
            pid = int(self._words.readline())
            self._socket.settimeout(timeout)
            try:
                code = int(self._words.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise
            said = []
            for stream in (out, err):
                stream.seek(0)
                said.append(stream.read().decode())
        return subprocess.CompletedProcess(["sqlq", *args], code, *said)


def serve(fd: int) -> None:
    """Fork for each request, and say which process it is and how it ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    end = socket.socket(fileno=fd)
    words = end.makefile("rb")
    size = 3 * array.array("i").itemsize
    while True:
        mark, passed, *_ = end.recvmsg(1, socket.CMSG_SPACE(size))
        if not mark:
            return
        fds = array.array("i")
        fds.frombytes(passed[0][2][:size])
        request = json.loads(words.readline())
        if (pid := os.fork()) == 0:
            end.close()
            _be_the_command(*request, *fds)
        for given in fds:
            os.close(given)
        end.sendall(b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        end.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _be_the_command(args: list[str], directory: str, environment: dict[str, str], *streams: int) -> None:
    code: Any = 1
    try:
        for number, given in enumerate(streams):
            os.dup2(given, number)
            os.close(given)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        os.chdir(directory)
        sys.path[0] = directory
        sys.argv = ["sqlq", *args]
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        from sqlq.cli import main

        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
