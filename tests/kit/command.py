"""`sqlq` as people run it: in a process of its own, in a directory of its own, with an App of theirs in
it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.preloaded import INTERPRETERS, Forked, preloaded
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
SEARCH = "--task, --queue, --batch, --label, --key, --limit-key, --since, --until"
"""The options that choose jobs, as messages list them."""

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
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SQLQ_", "COLUMNS", "FORCE_COLOR", "TTY_"))
        }
        self.environment = {
            **own,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUTF8": "1",
            **environment,
        }
        (directory / "shop.py").write_text(SHOP)

    def __call__(self, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> Done:
        environment = {**self.environment, **(env or {})}
        if any(name.startswith(INTERPRETERS) for name in env or {}):
            done = subprocess.run(
                [sys.executable, "-m", "sqlq", *args],
                cwd=self.directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        else:
            done = preloaded().run(args, self.directory, environment, timeout)
        # but for those of handlers, of jobs that failed for good
        failures = done.stderr.count("failed for good")
        failures += done.stderr.count("next attempt in") if "debug" in args else 0
        assert done.stderr.count("Traceback (most recent call last)") <= failures, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *args: str, env: Mapping[str, str] | None = None) -> str:
        done = self(*args, env=env)
        assert done.code == 0, done
        return done.out

    def shop(self, *args: str) -> Done:
        return self("--app", "shop:app", *args)

    def work(self, *args: str) -> Done:
        done = self.shop("work", "--drain", *args)
        assert done.code == 0, done
        return done

    @contextmanager
    def working(self, *args: str, anew: bool = False) -> Iterator[subprocess.Popen[str] | Forked]:
        """A worker that runs meanwhile, `anew` where it is to be started by the interpreter; what it logs is
        in worker.log."""
        command = ["--app", "shop:app", "work", *args]
        with (self.directory / "worker.log").open("w") as log, Path(os.devnull).open("w") as nothing:
            process: subprocess.Popen[str] | Forked
            if anew:
                process = subprocess.Popen(
                    [sys.executable, "-m", "sqlq", *command],
                    cwd=self.directory,
                    env=self.environment,
                    stdout=nothing,
                    stderr=log,
                    text=True,
                )
            else:
                process = preloaded().start(command, self.directory, self.environment, nothing, log)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

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
