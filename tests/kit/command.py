"""`sqlq` as people run it: in a process and a directory of its own, with an App of theirs in it."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

import sqlq
from sqlq.cli.context import Context
from sqlq.cli.problems import explain
from sqlq.cli.root import sqlq as sqlq_command
from sqlq.model.outcome import Outcome
from sqlq.store.workers import workers
from tests.kit import end
from tests.kit.preloaded import INTERPRETERS, Forked, preloaded
from tests.kit.preloaded import environment as own_environment
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]

SHOP = '''
import os
import time
from pathlib import Path

import sqlq

app = sqlq.App()

@app.task(queue="mail", max_attempts=2, backoff="10ms", aliases=["mail.send"])
def send(order_id: int, copy: bool = False, note: str = "") -> str:
    return f"{order_id} {copy} {note}"

@app.task(queue="mail", max_attempts=2, backoff="10ms")
def fail(why: str) -> None:
    if not Path("mended").exists():
        raise ValueError(f"cannot {why}\\nfor several reasons")

@app.task(name="wait")
def wait(name: str) -> None:
    """Say that it runs, then run until it is let go."""
    Path(name + ".started").touch()
    while not Path(name + ".go").exists():
        time.sleep(0.01)
    Path(name + ".ended").touch()

@app.task
async def where() -> str:
    return os.getcwd()
'''


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @classmethod
    def of(cls, done: subprocess.CompletedProcess[str]) -> Done:
        return cls(done.returncode, done.stdout or "", done.stderr or "")

    def json(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)

    def sentence(self) -> str:
        """Return its error: one line, for people."""
        assert self.code == 1, self
        assert not self.out, self
        (line,) = self.err.splitlines()
        assert line.startswith("sqlq: "), line
        return line.removeprefix("sqlq: ")

    def misuse(self) -> str:
        """Return its error about the command line."""
        assert self.code == 2, self
        assert not self.out, self
        *usage, line = self.err.splitlines()
        assert line.startswith("Error: "), line
        assert not usage or usage[0].startswith("Usage: "), self
        return line.removeprefix("Error: ")


class Command:
    """Runs `sqlq` in a directory, with the shop's App in it."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.environment = own_environment(**environment)
        (directory / "shop.py").write_text(SHOP)

    def __call__(self, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> Done:
        environment = {**self.environment, **(env or {})}
        if any(name.startswith(INTERPRETERS) for name in env or {}):
            done = self.process(sys.executable, "-m", "sqlq", *args, env=environment, timeout=timeout)
        else:
            done = Done.of(preloaded().run(args, self.directory, environment, timeout))
        # but for those of handlers, of jobs that failed for good
        failures = done.err.count("failed for good")
        failures += done.err.count("next attempt in") if "debug" in args else 0
        assert done.err.count("Traceback (most recent call last)") <= failures, done.err
        return done

    def process(self, *command: str, **options: Any) -> Done:
        """Run a program that is not forked, with these options of `subprocess.run`."""
        usual: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "timeout": 120, "env": self.environment}
        usual |= {"cwd": self.directory, "text": True}
        return Done.of(subprocess.run(command, check=False, **(usual | options)))

    def python(self, *args: str) -> Done:
        """Run a forked program of Python: a file, `-m` or `-c`."""
        return Done.of(preloaded().run(["python", *args], self.directory, self.environment, 120))

    def ok(self, *args: str, env: Mapping[str, str] | None = None) -> str:
        done = self(*args, env=env)
        assert done.code == 0, done
        return done.out

    def shop(self, *args: str) -> Done:
        return self("--app", "shop:app", *args)

    def enqueue(self, *args: str) -> int:
        """Enqueue a job, and return its id."""
        return int(self.shop("enqueue", "--json", *args).json()["id"])

    def work(self, *args: str) -> Done:
        done = self.shop("work", "--drain", *args)
        assert done.code == 0, done
        return done

    @contextmanager
    def running(
        self, *command: str, anew: bool = False, output: str = "worker.log"
    ) -> Iterator[Popen[str] | Forked]:
        """A command that runs meanwhile, `anew` if the interpreter starts it; a file has what it prints."""
        with (self.directory / output).open("w") as log:
            process: Popen[str] | Forked
            if anew:
                words, names = [sys.executable, "-m", "sqlq", *command], self.environment
                process = Popen(words, cwd=self.directory, env=names, stdout=log, stderr=log, text=True)
            else:
                process = preloaded().start(command, self.directory, self.environment, log, log)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def working(self, *args: str, anew: bool = False) -> AbstractContextManager[Popen[str] | Forked]:
        """A worker that runs meanwhile."""
        return self.running("--app", "shop:app", "work", *args, anew=anew)

    def on_terminal(self, *args: str, typed: str = "", interrupt_at: str | None = None) -> Done:
        """Run a command on a terminal of 100 columns, for a person who types something, or presses Ctrl-C
        when it has shown a text."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        os.write(ours, typed.encode())
        process = Popen(
            [sys.executable, "-m", "sqlq", *args],
            cwd=self.directory,
            env=self.environment | {"TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        shown = b""
        try:
            with suppress(OSError):  # of Linux, when the other end is closed
                while chunk := os.read(ours, 65_536):
                    shown += chunk
                    if interrupt_at is not None and interrupt_at in shown.decode():
                        os.killpg(process.pid, signal.SIGINT)
                        interrupt_at = None
            return Done(process.wait(30), shown.decode(), "")
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    def log(self) -> str:
        return (self.directory / "worker.log").read_text()

    def wait_for_worker(self) -> None:
        wait_until(lambda: self("status", "--json").json()["workers"], timeout=60, what="a worker")

    def wait_for(self, name: str) -> None:
        wait_until((self.directory / name).exists, timeout=60, what=name)

    def touch(self, name: str) -> None:
        (self.directory / name).touch()


def other_distribution(folder: Path, name: str = "sqlq", scripts: str = "") -> None:
    """Make a folder on the path look as if a distribution were installed there."""
    there = folder / f"{name}-1.6.0.dist-info"
    there.mkdir(exist_ok=True)
    (there / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.6.0\n"
    )
    (there / "entry_points.txt").write_text(scripts)


def grant(url: str, role: str, kind: str) -> None:
    """Run the command that gives a role its rights, as the role in a URL."""
    words, context = ["grants", role, "--as", kind, "--apply", "-d", url], Context()
    sqlq_command.main(words, standalone_mode=False, obj=context)
    context.app().close()


def obey_permissions() -> None:
    """In a process of root's: let what files permit count for it, too."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


class Console:
    """Runs `sqlq` in this process, and does what a worker does."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self.app = sqlq.App(url)
        self.task = self.app.task(name="shop.send", max_attempts=3)(lambda n=0: None)
        self._capsys = capsys

    def __call__(self, *args: str) -> str:
        context = Context()
        self._capsys.readouterr()
        try:
            sqlq_command.main(["-d", self.url, *args], standalone_mode=False, obj=context)
        finally:
            context.app().close()
        return self._capsys.readouterr().out

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json"))

    def sentence(self, *args: str) -> str:
        """Return the error of the command."""
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any, as for a person
            self(*args)
        return str(explain(caught.value, Context(database_url=self.url)))

    def enqueue(self, *args: Any, **options: Any) -> int:
        return self.app.enqueue(self.task.new(*args).set(**options)).id

    def end(self, outcome: Outcome, *args: Any) -> int:
        id = self.enqueue(*args, priority=100)
        assert end(self.app, outcome) == [id]
        return id

    def serve(self, id: str = "w", slots: int = 2) -> None:
        with self.app.database.begin() as conn:
            workers.register(conn, id=id, host="box", pid=7, version="1", queues=None, concurrency=slots)
