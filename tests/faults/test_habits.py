"""Programs do much at import and in handlers without a thought of their worker. Its jobs run all the same,
and it stops as always."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

import sqlq
from sqlq.errors import MissingFileError
from tests.kit import needs, wait_until
from tests.kit.command import Command
from tests.kit.processes import ROOT, WorkerProcess, worker_process

pytestmark = [needs("cheap"), pytest.mark.integration]

STOPS_WITHIN_SECONDS = 15
"""A stop takes a tenth of a second, and five where a thread goes on. A busy machine takes longer."""

HABITS = {
    "sockets and signals": """
        import signal, socket, threading
        socket.setdefaulttimeout(0.5)
        if threading.current_thread() is threading.main_thread():
            def stops(number, frame):
                raise SystemExit(3)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stops)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            bell = socket.socketpair()
            bell[0].setblocking(False)
            signal.set_wakeup_fd(bell[0].fileno())
    """,
    "the interpreter": """
        import decimal, faulthandler, gc, sys, threading, warnings
        sys.setrecursionlimit(200)
        gc.disable()
        warnings.simplefilter("error")
        sys.set_int_max_str_digits(640)
        decimal.getcontext().prec = 1
        decimal.getcontext().traps[decimal.Inexact] = True
        threading.settrace(lambda *event: None)
        faulthandler.enable(sys.__stderr__)
        def hook(*raised):
            raise ValueError("hook")
        sys.excepthook = threading.excepthook = sys.unraisablehook = hook
    """,
    "the surroundings": """
        import locale, os, resource, sys, tempfile
        gone = tempfile.mkdtemp()
        os.chdir(gone)
        os.rmdir(gone)
        os.umask(0o777)
        os.nice(1)
        os.environ.clear()
        locale.setlocale(locale.LC_ALL, "C")
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
        sys.argv[:] = sys.path[:] = []
    """,
    "replaced functions": """
        import json, random, signal, time
        time.time = lambda: 0.0
        time.sleep = lambda seconds: None
        random.random = lambda: 0.0
        random.seed(0)
        signal.signal = lambda number, handler: None
        json.JSONEncoder.default = lambda self, value: str(value)
        dumps = json.dumps
        json.dumps = lambda value, **options: dumps(value, **{**options, "indent": 2})
    """,
    "logging": """
        import logging.config
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
        class Raises(logging.Handler):
            def emit(self, record):
                raise OSError("no log server answers")
        def refuses(record):
            raise KeyError("request_id")
        logging.getLogger().addHandler(Raises())
        logging.getLogger("sqlq.worker").addFilter(refuses)
        logging.getLogger("sqlq").addFilter(refuses)
    """,
    "logging no more": """
        import logging
        logging.disable(logging.CRITICAL)
        logging.shutdown()
    """,
    "closed streams": """
        import os, sys
        sys.stdout.close()
        sys.stderr.close()
        for fd in (0, 1, 2):
            if not os.path.samestat(os.fstat(fd), os.stat(os.devnull)):
                os.close(fd)
    """,
    "replaced streams": """
        import io, sys
        sys.stdout = io.StringIO()
        sys.stderr = sys.stdin = None
    """,
    "threads and loops": """
        import asyncio, atexit, multiprocessing, threading
        multiprocessing.set_start_method("spawn", force=True)
        forever = threading.Event()
        threading.Thread(target=forever.wait, daemon=True).start()
        def fails():
            raise ValueError("at exit")
        atexit.register(fails)
        try:
            asyncio.get_running_loop().stop()
        except RuntimeError:
            asyncio.set_event_loop(None)
    """,
    "threads and exits that never end": """
        import atexit, threading
        from sqlq.cli import processes
        processes.THREADS_SECONDS = processes.EXIT_SECONDS = 0.5
        forever = threading.Event()
        threading.Thread(target=forever.wait).start()
        atexit.register(forever.wait)
    """,
}

MODULE = """
import asyncio
import sqlq

app = sqlq.App()
{at_import}

@app.task
def habit():
{in_handler}

@app.task
async def habit_of_coroutine():
{in_handler}

@app.task(isolate=True)
def habit_in_isolation():
{in_handler}

@app.task(max_attempts=1)
def plain():
    print("plain")
    return 1.5

@app.task(max_attempts=1)
async def coroutine():
    await asyncio.sleep(0.001)
    print("coroutine")
    return 1.5

@app.task(max_attempts=1, isolate=True)
def isolated():
    print("isolated")
    return 1.5

@app.task(max_attempts=1)
def fails():
    raise ValueError("no")

@app.task
def up():
    pass
"""


def enqueue(app: sqlq.App, *names: str) -> list[int]:
    """Enqueue jobs by SQL: the test does not have their tasks."""
    with app.database.engine.begin() as conn:
        insert = text("INSERT INTO jobs (queue, task, payload) VALUES ('default', :task, '{}') RETURNING id")
        return [conn.execute(insert, {"task": f"m.{name}"}).scalar_one() for name in names]


def states(app: sqlq.App, ids: list[int]) -> list[str]:
    return [app.jobs.get(id).state.value for id in ids]


def await_end(app: sqlq.App, worker: WorkerProcess, ids: list[int]) -> list[str]:
    def have_ended() -> bool:
        return worker.process.poll() is not None or {*states(app, ids)} <= {"finished", "failed", "cancelled"}

    wait_until(have_ended, timeout=30, what="the jobs having ended")
    return states(app, ids)


@pytest.mark.parametrize("habit", HABITS)
def test_workers_bear_what_programs_do(app: sqlq.App, database_url: str, tmp_path: Path, habit: str) -> None:
    source = textwrap.dedent(HABITS[habit])
    module = MODULE.format(at_import=source, in_handler=textwrap.indent(source, "    "))
    (tmp_path / "m.py").write_text(module)
    with worker_process(tmp_path, "m:app", database_url, "-c", "4", "--grace", "3s", ready=False) as worker:
        expected = ["finished"] * 3 + ["failed"]
        for habits in (["up"], ["habit"], ["habit_of_coroutine"], ["habit_in_isolation"]):
            ids = enqueue(app, *habits)
            assert await_end(app, worker, ids) == ["finished"], worker.log.read_text()
            ids = enqueue(app, "plain", "coroutine", "isolated", "fails")
            assert await_end(app, worker, ids) == expected, worker.log.read_text()
            assert [app.jobs.get(id).result for id in ids[:3]] == [1.5] * 3
        assert worker.stop(STOPS_WITHIN_SECONDS) == 0


FORKS = """
import multiprocessing, os, signal, time
import sqlq

app = sqlq.App()
fork = multiprocessing.get_context("fork")

def square(number):
    return number * number

def takes_signals():
    child = fork.Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join(20)
    code, _ = child.exitcode, child.kill()
    return code

def pools():
    for _ in range(10):
        with fork.Pool(2) as pool:
            assert pool.map(square, [1, 2]) == [1, 4]

def falls_through():
    forked = os.fork()
    if forked == 0:
        return "of the child"
    os.waitpid(forked, 0)
    return "of the parent"

async def falls_through_coroutine():
    return falls_through()

for isolate in (False, True):
    for handler in (takes_signals, pools, falls_through, falls_through_coroutine):
        name = f"m.{handler.__name__}{'_alone' * isolate}"
        app.task(name=name, isolate=isolate, max_attempts=1, timeout="60s")(handler)
"""


def test_a_handlers_fork_is_a_usual_process(app: sqlq.App, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(FORKS)
    handlers = ("takes_signals", "pools", "falls_through", "falls_through_coroutine")
    with worker_process(tmp_path, "m:app", database_url, "-c", "1") as worker:
        for suffix in ("", "_alone"):
            # the jobs behind it would get an outcome of the child, or run twice
            ids = enqueue(app, *(name + suffix for name in handlers for _ in range(2)))
            await_end(app, worker, ids)
            expected = [-15, -15, None, None, *["of the parent"] * 4]
            assert [app.jobs.get(id).result for id in ids] == expected, worker.log.read_text()
        assert worker.stop(STOPS_WITHIN_SECONDS) == 0


PRINTS = """
import sys
import sqlq

app = sqlq.App()

@app.task(max_attempts=1)
def prints():
    print("a line that nobody reads", flush=True)

@app.task(max_attempts=1)
async def prints_more():
    sys.stdout.buffer.write(b"x" * 100_000)

@app.task(max_attempts=1, isolate=True)
def prints_alone():
    print("a line that nobody reads", flush=True)
"""


@pytest.mark.parametrize("broken", ["a full disk", "a reader that has gone"])
def test_a_broken_output_fails_no_job(app: sqlq.App, database_url: str, tmp_path: Path, broken: str) -> None:
    (tmp_path / "m.py").write_text(PRINTS)
    ids = enqueue(app, *("prints", "prints_more", "prints_alone") * 2)
    reading, writing = os.pipe()
    os.close(reading)
    if broken == "a full disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    args = [sys.executable, "-m", "sqlq", "-a", "m:app", "-d", database_url, "work", "--drain"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    with os.fdopen(writing, "wb") as out:
        pipe = subprocess.PIPE
        done = subprocess.run(args, cwd=tmp_path, env=env, stdout=out, stderr=pipe, timeout=60, check=False)
    assert done.returncode == 0
    assert states(app, ids) == ["finished"] * 6
    lines = [line for line in done.stderr.decode().splitlines() if "printed is dropped" in line]
    assert 2 <= len(lines) <= 3, "once in each process"


MOVES = """
import os
import sqlq

app = sqlq.App()

@app.task
def move():
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")

@app.task
def stay():
    pass
"""


@pytest.mark.parametrize("given", ["sqlite:///shop.db", "an engine"])
def test_a_relative_file_is_found_when_a_handler_has_changed_the_directory(
    app: sqlq.App, database_url: str, tmp_path: Path, given: str
) -> None:
    Path(make_url(database_url).database or "").rename(tmp_path / "shop.db")
    app.close()
    module = MOVES
    if given == "an engine":
        module = MOVES.replace("sqlq.App()", "sqlq.App(engine=create_engine('sqlite:///shop.db'))")
        module = f"from sqlalchemy import create_engine{module}"
    (tmp_path / "m.py").write_text(module)
    options = [] if given == "an engine" else ["-d", given]
    app.use(f"sqlite:///{tmp_path / 'shop.db'}")
    ids = enqueue(app, "move", "stay")
    Command(tmp_path).ok("-a", "m:app", *options, "work", "--drain", "-c", "1")
    assert states(app, ids) == ["finished"] * 2


WAITS = """
import threading
import sqlq

app = sqlq.App()

@app.task(max_attempts=1)
def ends(file: str):
    while not open(file).read():
        threading.Event().wait(0.01)
    return file
"""


def file_of(app: sqlq.App) -> Path:
    return Path(app.database.engine.url.database or "")


def replace_by(file: Path, fresh: Path) -> None:
    """Put another database in the place of one, whose logs would be no logs of that."""
    fresh.rename(file)
    for log in file.parent.glob(f"{file.name}-*"):
        log.unlink()


@pytest.fixture
def fresh(app: sqlq.App, tmp_path: Path) -> Iterator[sqlq.App]:
    """Another database, which can take the place of the first."""
    fresh = sqlq.App(f"sqlite:///{tmp_path / 'fresh.db'}")
    fresh.migrate()
    app.task(name="m.ends")(lambda file: None)
    (tmp_path / "m.py").write_text(WAITS)
    for name in ("old", "new"):
        (tmp_path / name).touch()
    yield fresh
    fresh.close()


@pytest.mark.parametrize("how", ["removed and made anew", "replaced"])
def test_a_database_file_made_anew_is_worked_on_by_all(
    app: sqlq.App, fresh: sqlq.App, database_url: str, tmp_path: Path, how: str
) -> None:
    """The new file has jobs of the same ids, and their first claims have the same tokens."""
    ends, file = app.tasks["m.ends"], file_of(app)
    with worker_process(tmp_path, "m:app", database_url, "-c", "4") as worker:
        old = app.enqueue(ends.new(str(tmp_path / "old")))
        wait_until(lambda: app.jobs.get(old.id).state == "running", what="the job running")
        fresh.close()
        if how == "removed and made anew":
            file.unlink()
            wait_until(lambda: worker.said("no database file"), what="the worker missing its file")
        replace_by(file, file_of(fresh))
        new = app.enqueue(ends.new(str(tmp_path / "new")))
        assert new.id == old.id
        wait_until(lambda: app.jobs.get(new.id).state == "running", what="the new job running")
        (tmp_path / "old").write_text("end")
        wait_until(lambda: worker.said("was replaced by another one"), what="the worker leaving")
        assert len(app.workers.list()) == 1
        assert app.jobs.get(new.id).state == "running"
        (tmp_path / "new").write_text("end")
        assert app.result(new, timeout="30s") == str(tmp_path / "new")
        assert worker.stop(STOPS_WITHIN_SECONDS) == 0


def test_a_write_to_another_file_is_refused_before_it_begins(app: sqlq.App, fresh: sqlq.App) -> None:
    """The write of an outcome may be the first to meet the new file."""
    worker = app.worker()
    worker._database.on_another_file = worker._another_file
    with worker._database.begin():
        pass
    fresh.close()
    file_of(fresh).rename(file_of(app))
    with pytest.raises(MissingFileError, match="replaced by another one"), worker._database.begin():
        pass


CLOSES = """
import os
import sqlq

app = sqlq.App()

@app.task(isolate=True, max_attempts=1)
def closes():
    os.closerange(3, 4096)

@app.task(isolate=True, max_attempts=1)
def returns():
    pass
"""


def test_an_isolated_handler_that_closes_all_descriptors_is_lost_alone(
    app: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "m.py").write_text(CLOSES)
    with worker_process(tmp_path, "m:app", database_url) as worker:
        assert await_end(app, worker, enqueue(app, "closes")) == ["failed"]
        assert await_end(app, worker, enqueue(app, "returns")) == ["finished"]
        assert worker.stop(STOPS_WITHIN_SECONDS) == 0
