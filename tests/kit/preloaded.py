"""A process that has imported what sqlq needs, and forks for each command that a test runs.

Half a second of each command is Python importing; there are a thousand of them. A command so started is a
process of its own with the environment, directory, arguments and standard streams that it was given. It is
forked by the fork server of `sqlq work`.
Tests about processes themselves (signals, the first process of a container, the interpreter's own options)
start them as people do.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import json
import os
import runpy
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
from typing import IO, Any

from sqlq.worker.ipc import forkserver

ROOT = Path(__file__).parents[2]
IMPORTED = (
    *("sqlq.app.app", "sqlq.admin.jobs", "sqlq.admin.doctor.doctor", "sqlq.tables", "sqlq.database.migrate"),
    *("sqlq.cli.root", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite"),
    *("sqlq.cli.commands.work", "sqlq.cli.worker_process", "sqlq.worker.supervise.supervisor"),
    *("sqlq.worker.worker", "sqlq.cli.terminal.logs", "sqlq.cli.processes", "sqlq.cli.terminal.progress"),
    *("sqlq.cli.terminal.output", "msgspec", "alembic.command", "psycopg"),
    *("rich.console", "rich.table", "rich.live"),
)
DJANGO = (
    *("django.core.management.commands.migrate", "django.test.runner"),
    "django.contrib.contenttypes.management",
    *("django.db.backends.sqlite3.base", "django.db.backends.postgresql.base"),
)
"""The modules that a process imports besides, which forks for a project's manage.py."""
SILENT = ("SQLQ_", "DJANGO_", "SHOP_", "PYTEST_", "COLUMNS", "FORCE_COLOR", "TTY_")
"""Variables that begin so would change what a process does or prints."""
INTERPRETERS = ("PYTHON", "LC_", "LANG")
"""Variables that begin so are read when Python starts."""
Stream = int | IO[Any]


forkserver.ANSWER_SECONDS = 60.0  # the machine may be busy with other tests


class Forked(forkserver.Forked):
    """A process that a preloaded one has forked, with all that tests use of `subprocess.Popen`."""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process: that of this one, with no settings but the test's own."""
    names = {name: value for name, value in os.environ.items() if not name.startswith(SILENT)}
    return {**names, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


@cache
def preloaded(*more: str) -> Preloaded:
    """Return the one of this test process that has imported these modules, besides."""
    return Preloaded(more)


class Preloaded:
    def __init__(self, more: Sequence[str] = ()) -> None:
        self._door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ends, self._alive = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.preloaded", str(inside.fileno()), str(ends), *more],
            cwd=ROOT,
            env=environment(),
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
        return subprocess.CompletedProcess(list(args), code, *said)

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
        under the same numbers. Raises `OSError` where the preloaded process is gone."""
        streams = [each if isinstance(each, int) else each.fileno() for each in (out, err)]
        request = json.dumps([list(args), str(directory), dict(environment), streams, new_session])
        return Forked(self._door, [request], [*streams, *passed])


# -- the process ---------------------------------------------------------------------------------------------


def be_the_command() -> None:
    """Be the requested process, in one that was just forked."""
    args, directory, environment, streams, new_session = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forkserver.GROUP_SIGNALS)
    if new_session:
        os.setsid()
    for number, fd in enumerate(streams, 1):
        os.dup2(fd, number)
    for fd in {*streams} - {1, 2}:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(directory)
    sys.path[0] = directory
    sys.path[1:1] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.argv = ["sqlq", *args]
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    err = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    if args[0] == "python":
        _run_python(args[1:], environment)
    else:
        from sqlq.cli import main

        main()


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


if __name__ == "__main__":
    inside, ends, *more = sys.argv[1:]
    for name in (*IMPORTED, *more):
        importlib.import_module(name)
    gc.freeze()  # a collection would write to the pages that are shared
    forkserver._serve(socket.socket(fileno=int(inside)), int(ends), be_the_command, 0)
