"""A process that has imported what sqlq needs, and forks for each command that a test runs.

Half a second of each command is Python importing; there are a thousand of them. A command so started is a
process of its own with the environment, directory, arguments and standard streams that it was given.
What is about processes themselves (signals, the first process of a container, the interpreter's own options)
is started as people start it.
"""

from __future__ import annotations

import array
import atexit
import builtins
import fcntl
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *(
        "sqlq.app.app",
        "sqlq.admin.jobs",
        "sqlq.admin.doctor.doctor",
        "sqlq.tables",
        "sqlq.database.migrate",
        "sqlq.worker.worker",
    ),
    *("sqlq.cli.root", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite"),
    *("sqlq.cli.work", "sqlq.worker.supervise.supervisor", "sqlq.worker.run.isolated"),
    *("alembic.command", "psycopg", "rich.console", "rich.table", "rich.live"),
)
DJANGO = (
    *(
        "django.core.management.commands.migrate",
        "django.test.runner",
        "django.contrib.contenttypes.management",
    ),
    *("django.db.backends.sqlite3.base", "django.db.backends.postgresql.base"),
)
"""What a process imports that forks for a project's manage.py, besides."""
INTERPRETERS = ("PYTHON", "LC_", "LANG")
"""Variables that begin so are read when Python starts."""
MOST_FDS = 16
MOST_OPEN = 4_096
FIRST_FREE = 500
LONGEST_REQUEST = 200_000
Stream = int | IO[Any]


class Forked:
    """A process that a preloaded one has forked, with what tests and sqlq use of `subprocess.Popen`."""

    def __init__(
        self,
        door: socket.socket,
        args: Sequence[str],
        directory: str | Path,
        environment: Mapping[str, str],
        streams: Sequence[Stream],
        *,
        passed: Sequence[int] = (),
        new_session: bool = False,
    ) -> None:
        """`door` leads to the preloaded process; `passed` are descriptors that it has under the same numbers.
        Raises `OSError` where that process is gone."""
        self.args = list(args)
        self.returncode: int | None = None
        self._connection, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), *(each if isinstance(each, int) else each.fileno() for each in streams)]
            rights = array.array("i", [*fds, *passed])
            request = json.dumps([list(args), str(directory), dict(environment), list(passed), new_session])
            door.sendmsg([request.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._words = self._connection.makefile("rb")
        self.pid = int(self._words.readline() or 0)
        if not self.pid:
            raise ConnectionError("the preloaded process is gone")

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            word = self._words.readline()
            # its server was killed, as all of its session are at once
            self.returncode = int(word) if word else -signal.SIGKILL
            self._words.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its server has not said so yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@cache
def preloaded(*more: str) -> Preloaded:
    """Return the one of this test process that has imported these modules, besides."""
    return Preloaded(more)


class Preloaded:
    def __init__(self, more: Sequence[str] = ()) -> None:
        self._door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ends, self._alive = os.pipe()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQLQ_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(inside.fileno()), str(ends), *more],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[inside.fileno(), ends],
        )
        inside.close()
        os.close(ends)

    def run(
        self, args: Sequence[str], directory: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `sqlq` with these arguments, as `subprocess.run` would, with nothing on its standard input.

        Arguments that begin with "python" are those of a Python program: a file, `-m` or `-c`.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(args, directory, environment, out, err)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            said = []
            for stream in (out, err):
                stream.seek(0)
                said.append(stream.read().decode())
        return subprocess.CompletedProcess(process.args, code, *said)

    def start(
        self,
        args: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        out: Stream,
        err: Stream,
        *,
        passed: Sequence[int] = (),
        new_session: bool = False,
    ) -> Forked:
        """Start `sqlq` with these arguments, with nothing on its standard input, and with these descriptors
        under the same numbers."""
        with Path(os.devnull).open("rb") as nothing:
            streams = (nothing, out, err)
            return Forked(
                self._door, args, directory, environment, streams, passed=passed, new_session=new_session
            )


# -- the process ---------------------------------------------------------------------------------------------


def serve(inside: socket.socket, alive: int, kept: Sequence[int] = (), more: Sequence[str] = ()) -> None:
    """Fork for each request that comes by the door, and say which process it is and how it ended, until
    nobody holds the other end of `alive` any more. Those forked keep the descriptors `kept`."""
    for name in (*IMPORTED, *more):
        importlib.import_module(name)
    children: dict[int, socket.socket] = {}
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready = select.select([inside.fileno(), alive, woken], [], [])[0]
        if alive in ready:
            return
        if woken in ready:
            os.read(woken, 1024)
            while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with children.pop(ended[0]) as connection:
                    _say(connection, os.waitstatus_to_exitcode(ended[1]))
        if inside.fileno() in ready:
            words, fds, *_ = socket.recv_fds(inside, LONGEST_REQUEST, MOST_FDS)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (inside, *children.values()):
                    each.detach()  # or it warns of itself, though its descriptor is closed
                _close_but([*fds[1:], *kept])
                _be_the_command(json.loads(words), fds[1:])
            children[pid] = socket.socket(fileno=fds[0])
            for fd in fds[1:]:
                os.close(fd)
            _say(children[pid], pid)


def _say(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(b"%d\n" % number)
    except OSError:  # who asked is gone
        pass


def _close_but(kept: Sequence[int]) -> None:
    above = 2
    for fd in sorted(kept):
        os.closerange(above + 1, fd)
        above = fd
    os.closerange(above + 1, MOST_OPEN)


def _be_the_command(request: list[Any], fds: list[int]) -> NoReturn:
    args, directory, environment, passed, new_session = request
    code: Any = 1
    try:
        if new_session:
            os.setsid()
        _place(fds, [0, 1, 2, *passed])
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        os.chdir(directory)
        sys.path[0] = directory
        sys.path[1:1] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
        sys.argv = ["sqlq", *args]
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        if args[0] == "python":
            _run_python(args[1:], environment)
            code = 0
        else:
            from sqlq.cli import main

            main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_python(args: list[str], environment: Mapping[str, str]) -> None:
    """Run what an interpreter with these arguments would."""
    for filters in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
        action, _, category = filters.partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
    sys.orig_argv = [sys.executable, *args]
    first, *rest = args
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        runpy.run_path(first, run_name="__main__")


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Move descriptors to these numbers."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), more=sys.argv[3:])
