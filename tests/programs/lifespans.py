"""An App with a lifespan, and the notes of what each process did. `PLAY` selects an asynchronous one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import sqlq
from tests.programs.notes import nap

app = sqlq.App()


def acts(folder: Path) -> dict[int, list[str]]:
    """Return what each process has done, in order."""
    file, found = folder / "ran.txt", dict[int, list[str]]()
    for line in file.read_text().splitlines() if file.exists() else ():
        what, pid = line.split()
        found.setdefault(int(pid), []).append(what)
    return found


def note(what: str) -> None:
    with Path("ran.txt").open("a") as file:
        file.write(f"{what} {os.getpid()}\n")


def life() -> Iterator[int]:
    note("enter")
    yield os.getpid()
    note("leave")


async def alife() -> AsyncIterator[int]:
    note("enter")
    async with asyncio.timeout(None):
        yield os.getpid()
    await asyncio.sleep(0.01)
    note("leave")


app.lifespan(alife if os.environ.get("PLAY") == "async def" else life)


@app.task
def work() -> list[int]:
    note("job")
    return [sqlq.current_job().lifespan, os.getpid()]


@app.task(isolate=True)
async def alone() -> list[int]:
    note("job")
    return [sqlq.current_job().lifespan, os.getpid()]


@app.task
def wait() -> None:
    note("job")
    while not Path("go").exists():
        nap(0.01)
