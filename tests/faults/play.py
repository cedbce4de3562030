"""A project whose handlers die, hang and hold the interpreter, and note each start."""

from __future__ import annotations

from typing import Any

from sqlq.model.job import NewJob
from tests.kit.processes import Project

MODULE = '''
import asyncio, atexit, os, signal, threading, time, sqlq
from sqlalchemy import create_engine, text

app = sqlq.App()
if os.path.exists("broken"):
    os._exit(3)

def note(what):
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what} {sqlq.current_job().id} {os.getpid()} {time.time()}\\n".encode())
    os.close(fd)

@app.task(backoff="0s")
def work(): note("work")

@app.task(max_attempts=3)
def poison():
    note("poison")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(backoff="0s")
def wait():
    """Runs until it is let go, in its first attempt."""
    note("wait")
    if sqlq.current_job().attempt == 1:
        until("go")

def until(file):
    while not os.path.exists(file) and not sqlq.current_job().should_stop():
        time.sleep(0.01)

@app.task(isolate=True, timeout="500ms", max_attempts=1)
def alone_too_long():
    note("alone")
    while True:
        try:
            time.sleep(60)
        except BaseException:
            note("deaf")

@app.task(isolate=True)
def alone():
    note("alone")
    return os.getpid()

@app.task(isolate=True, max_attempts=1)
async def alone_and_gone():
    note("alone")
    os._exit(5)

@app.task(timeout="500ms", max_attempts=1)
def stuck():
    note("stuck")
    while not os.path.exists("free"):
        time.sleep(0.01)

@app.task(timeout="200ms", max_attempts=1)
async def leaves_a_thread():
    note("thread")
    atexit.register(open, "left.txt", "w")
    await asyncio.to_thread(threading.Event().wait, 600)

@app.task
def deaf():
    """Does not look whether it should stop."""
    note("deaf")
    threading.Event().wait(120)

@app.task
def starve():
    """Holds the interpreter's lock for some leases."""
    note("starve")
    until = time.monotonic() + 6
    while time.monotonic() < until:
        sum(range(40_000_000))

@app.task(backoff="0s", max_attempts=50)
def pay(n):
    engine = create_engine(os.environ["SQLQ_TEST_EFFECTS"])
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    with sqlq.current_job().completing(engine) as session:
        session.execute(text("INSERT INTO effects (n) VALUES (:n)"), {"n": n})
        note("pay")
    engine.dispose()
'''


class Play(Project):
    """The project of `MODULE`."""

    def new(self, task: str, *args: Any) -> NewJob:
        if f"play.{task}" not in self.app.tasks:
            once = dict.fromkeys(("alone_too_long", "alone_and_gone", "stuck", "leaves_a_thread"), 1)
            attempts = {"poison": 3, "pay": 50, **once}.get(task, 5)
            timeout = "500ms" if task in ("alone_too_long", "stuck", "leaves_a_thread") else None
            self.app.task(name=f"play.{task}", max_attempts=attempts, timeout=timeout)(lambda *args: None)
        return self.app.tasks[f"play.{task}"].new(*args)

    def enqueue(self, task: str, *args: Any) -> int:
        return self.app.enqueue(self.new(task, *args)).id

    def ran(self) -> list[tuple[str, int, int, float]]:
        """Return the starts in order: handler, job, process and time."""
        return [(what, int(id), int(pid), float(at)) for what, id, pid, at in self.lines()]

    def starts(self, id: int) -> list[tuple[int, float]]:
        return [(pid, at) for _, job, pid, at in self.ran() if job == id]

    def started(self, id: int, times: int) -> bool:
        return len(self.starts(id)) >= times

    def is_past(self, starts: int) -> bool:
        return len(self.ran()) >= starts or self.live() == 0
