"""Processes for one job at a time, which of them is kept for the next job, and what forks them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import sqlq
from sqlq.config.constants import MAX_RELEASES
from sqlq.errors import ConfigurationError
from sqlq.model.outcome import Cancelled, Finished, Outcome, Released, Retried, SelfCompleted
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.run import isolated
from sqlq.worker.run.executor import Executor
from sqlq.worker.run.isolated import NOT_STARTED_MS, IsolatedProcesses
from sqlq.worker.settle.settle import Counts
from tests.kit import for_each, needs, run_isolated, wait_until, worker_of
from tests.kit.command import Command
from tests.kit.isolated import DEAF, HANGS, ISOLATE, Spawned, forked
from tests.kit.preloaded import Forked
from tests.kit.processes import worker_process
from tests.kit.workers import listening


@pytest.fixture
def spawned() -> Iterator[type[Spawned]]:
    made: list[Spawned] = []

    class Noted(Spawned):
        def __init__(self, *program: str, **options: Any) -> None:
            super().__init__(*program, **options)
            made.append(self)

    yield Noted
    for each in made:
        each.isolates.close()


def test_a_job_that_needs_its_own_process_gets_an_unused_one(spawned: type[Spawned]) -> None:
    some = spawned()
    assert some.run() == Finished()
    assert some.run(alone=True) == Finished()
    assert len(some.processes) == 2
    wait_until(lambda: some.ended() == [False, True], what="the process of one job having ended")
    assert some.run() == Finished()
    assert some.run() == Finished()
    assert some.ended() == [False, True], "the other one is kept"
    assert some.isolates._all == set(some.isolates._idle), "and what has ended is forgotten"


@pytest.mark.parametrize("says", [b"no JSON\n", b'{"outcome": {"is": "of another release"}}\n'])
def test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost(
    spawned: type[Spawned], says: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    some = spawned(ISOLATE.replace("link.send(outcome=", f"link._socket.sendall({says!r}); dict(a="))
    lost = some.run()
    assert isinstance(lost, SelfCompleted)
    assert isinstance(lost.otherwise, Retried)
    assert lost.otherwise.reason == "worker_lost"
    assert "job 1: what its process says cannot be read; the process is killed" in caplog.text
    assert some.ended() == [True]


def test_a_job_is_due_at_once_when_its_process_dies_and_later_when_it_dies_again(
    spawned: type[Spawned],
) -> None:
    dying = ISOLATE.replace("link.send(outcome=", "sys.exit(3); dict(a=")
    some = spawned(dying)
    first, second = some.run(attempts=1), some.run(attempts=2)
    assert isinstance(first, SelfCompleted)
    assert isinstance(second, SelfCompleted)
    assert isinstance(first.otherwise, Retried)
    assert isinstance(second.otherwise, Retried)
    assert first.otherwise.delay_ms == 0
    assert second.otherwise.delay_ms > 0


def test_a_job_is_not_released_for_ever_when_its_subprocess_fails_to_start(spawned: type[Spawned]) -> None:
    some = spawned("raise SystemExit(3)")
    assert some.run() == Released(NOT_STARTED_MS)
    assert isinstance(some.run(releases=MAX_RELEASES), Retried)


def test_a_subprocess_that_hangs_at_its_start_is_killed_and_its_job_released(
    spawned: type[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "START_SECONDS", 0.1)
    some = spawned(HANGS)
    assert some.run() == Released(NOT_STARTED_MS)
    assert some.ended() == [True]


def test_a_process_that_has_begun_in_time_is_not_killed_for_its_start(spawned: type[Spawned]) -> None:
    some = spawned(ISOLATE.replace("(began=True)", "(began=True), link.receive()"))

    class Begun(Attempt):
        def mark_started(self) -> None:
            super().mark_started()
            (isolate,) = some.isolates._all
            some.isolates._kill_hanging(isolate, self)  # as the timer that fires now
            isolate.link.send(go=True)

    assert some.run(kind=Begun) == Finished()
    assert some.ended() == [False]


def test_a_job_is_not_released_for_ever_when_no_subprocess_can_start(spawned: type[Spawned]) -> None:
    def none(fd: int) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    some = spawned()
    some.spawn = none
    assert some.run() == Released(NOT_STARTED_MS)
    assert isinstance(some.run(releases=MAX_RELEASES), Retried)


def test_no_slot_waits_while_a_subprocess_starts(spawned: type[Spawned]) -> None:
    some, may_start, outcomes = spawned(at_a_time=2), threading.Event(), SimpleQueue[Outcome]()
    starting = threading.Semaphore(0)
    spawn = some.spawn

    def slow(fd: int) -> Any:
        starting.release()
        assert may_start.wait(30)
        return spawn(fd)

    some.spawn = slow
    executors = Executor(
        10, lambda _: None, lambda _, outcome: outcomes.put(outcome), lambda: True, some.isolates
    )
    executors.offer([some.job()])
    assert starting.acquire(timeout=30)
    coroutines = [some.job() for _ in range(4)]
    for job in coroutines:
        job.isolated, job.is_async = False, True
    offering = threading.Thread(target=executors.offer, args=([some.job(), *coroutines],))
    offering.start()
    for _ in coroutines:  # of an unknown task
        assert isinstance(outcomes.get(timeout=10), Retried | Released)
    may_start.set()
    assert [outcomes.get(timeout=30) for _ in range(2)] == [Finished()] * 2
    offering.join()
    executors.close()
    wait_until(lambda: some.ended() == [True, True])


def test_a_subprocess_that_starts_after_the_end_is_killed_and_its_job_released(
    spawned: type[Spawned],
) -> None:
    some = spawned()
    spawn = some.spawn

    def late(fd: int) -> Any:
        some.isolates.close()
        return spawn(fd)

    some.spawn = late
    assert some.run() == Released()
    wait_until(lambda: some.ended() == [True])


def test_a_subprocess_that_does_not_end_when_it_is_killed_keeps_no_slot(spawned: type[Spawned]) -> None:
    def stays(seconds: float | None = None) -> int:
        assert seconds is not None, "as long as it takes"
        raise subprocess.TimeoutExpired("it", seconds)

    some = spawned("pass")
    spawn = some.spawn

    def undead(fd: int) -> Any:
        process = spawn(fd)
        process.wait = stays
        return process

    some.spawn = undead
    assert some.run() == Released(NOT_STARTED_MS)
    Forked.wait(some.processes[0], 30)


BUSY = """
import os, sys, time
from sqlq.worker.ipc.pipe import Pipe
link = Pipe.inherited(int(sys.argv[1]))
link.send(up=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
link.receive()
link.send(began=True)
assert "cancel" in link.receive()
link.send(outcome={"is": "Cancelled", "reason": "asked to"})
link.receive()
"""


def test_a_cancel_waits_for_no_subprocess_that_does_not_read(spawned: type[Spawned], tmp_path: Path) -> None:
    """The job fills the pipe almost, so that the cancel follows when there is room."""
    reads = tmp_path / "reads"
    isolates = IsolatedProcesses(lambda fd: forked(BUSY, str(fd), str(reads), passed=fd))
    running, outcomes = spawned().job(), SimpleQueue[Outcome]()
    running.claimed = running.claimed._replace(payload="x" * 215_000)
    slot = threading.Thread(target=lambda: outcomes.put(run_isolated(isolates, running)))
    slot.start()
    wait_until(lambda: running._stop is not None, what="the job sent")
    cancelling = threading.Thread(target=running.cancel)
    cancelling.start()
    cancelling.join(10)
    waited = cancelling.is_alive()
    reads.touch()
    assert isinstance(outcomes.get(timeout=30), Cancelled)
    assert not waited
    slot.join()
    isolates.close()


def test_an_exception_of_the_subprocess_pool_costs_no_slot(
    spawned: type[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(running: Attempt, *_: object) -> Outcome:
        raise SystemExit

    some, ended = spawned(), threading.Event()
    monkeypatch.setattr(some.isolates, "execute", raises)
    outcomes: list[Outcome] = []

    def done(_: Attempt, outcome: Outcome) -> None:
        outcomes.append(outcome)
        ended.set()

    executors = Executor(1, lambda _: None, done, lambda: True, some.isolates)
    executors.offer([some.job()])
    assert ended.wait(30)
    executors.close()
    assert isinstance(outcomes[0], Retried)


COMPLETES = """
import os, sys, threading, time
from contextlib import suppress
from sqlalchemy import create_engine
import sqlq
from sqlq.worker.attempt.attempt import Target
from sqlq.worker.run.isolated import serve
from sqlq.worker.ipc.pipe import Pipe

app = sqlq.App()

@app.task(name="t", isolate=True, timeout=sys.argv[2], max_attempts=1)
def completes(end):
    job, engine = sqlq.current_job(), create_engine(app.database.engine.url)
    sqlq.configure_sqlite(engine, immediate=True)
    with job.completing(engine, "done"):
        pass
    while end == "late" and not job.should_stop():
        time.sleep(0.01)
    if end == "gone":
        os._exit(5)
    while end != "late":
        with suppress(BaseException):
            threading.Event().wait()

serve(Pipe.inherited(int(sys.argv[1])), Target(lambda: app.database, tasks=app.tasks))
"""


@needs("cheap")
@pytest.mark.parametrize(
    ("end", "timeout"),
    [("late", "5s"), ("killed", "5s"), ("gone", "1h"), ("the grace is over", "1h")],
    ids=lambda given: given.replace(" ", "_"),
)
def test_a_job_that_completed_itself_publishes_finished_however_its_attempt_ends(
    app: sqlq.App, end: str, timeout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "killed":
        monkeypatch.setattr("sqlq.worker.run.lease.OVERDUE_SECONDS", 0.2)

    def spawn(fd: int) -> Any:
        url = str(app.database.engine.url)
        return forked(COMPLETES, str(fd), timeout, passed=fd, SQLQ_DATABASE_URL=url)

    @app.task(name="t", isolate=True, timeout=timeout, max_attempts=1)
    def completes(end: str) -> None: ...

    told = listening(app)
    job = app.enqueue(completes.new(end))
    worker = worker_of(app, drain=True, isolates=IsolatedProcesses(spawn), grace="100ms")
    working = threading.Thread(target=worker.run)
    working.start()
    wait_until(lambda: app.jobs.get(job.id).state == "finished", what="the job completed")
    if end == "the grace is over":
        worker.stop()
    working.join(60)
    assert not working.is_alive()
    assert (app.jobs.get(job.id).result, worker.counts) == ("done", Counts(finished=1))
    assert [event.name for event in told] == ["started", "finished"]


@needs("cheap")
def test_a_subprocess_is_killed_before_its_job_is_released(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = Spawned(DEAF)
    settled: list[list[bool]] = []
    try:
        app.enqueue(app.task(name="t", isolate=True)(lambda: None).new())
        told = listening(app)
        worker = worker_of(app, isolates=spawned.isolates, grace="0s")
        settle = worker._settler.settle

        def noted(job: Attempt, outcome: Outcome) -> None:
            settled.append(spawned.ended())
            settle(job, outcome)

        monkeypatch.setattr(worker._settler, "settle", noted)
        with worker:
            wait_until(lambda: told, what="it has started")
        assert settled == [[True]]
        assert worker.counts == Counts(released=1)
    finally:
        spawned.isolates.close()


@for_each("isolate", ["always", 2, None])
def test_another_value_of_isolate_is_refused(isolate: Any) -> None:
    with pytest.raises(ConfigurationError, match='it is True, False, or "fresh"'):
        sqlq.App("sqlite:///none.db").task(name="t", isolate=isolate)(lambda: None)


SHOP = """
import os
import sqlq

app = sqlq.App()
ran = []

@app.task
def usual() -> list[int]:
    ran.append(os.getpid())
    return ran

@app.task(isolate="fresh")
def fresh() -> list[int]:
    ran.append(os.getpid())
    return ran
"""


@pytest.mark.parametrize("slots", ["1", "2"])
@needs("cheap")
def test_a_drain_runs_all_that_wait_for_processes_of_their_own(
    tmp_path: Any, database_url: str, slots: str
) -> None:
    """More of them than there are slots, and processes: it gives none back, to be run later."""
    run = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    (tmp_path / "shop.py").write_text(SHOP)
    app = sqlq.App(database_url)
    jobs = app.enqueue_many([app.named("shop.usual").new()] * 60)
    run.work("--isolate", "-c", slots)
    found = [app.jobs.get(job.id) for job in jobs]
    assert [(job.state, job.releases) for job in found] == [("finished", 0)] * 60
    app.close()


@needs("cheap")
def test_nothing_passes_from_one_job_to_the_next(tmp_path: Any, database_url: str) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    (tmp_path / "shop.py").write_text(SHOP)
    app = sqlq.App(database_url)
    fresh = [app.enqueue(app.named("shop.fresh").new()) for _ in range(2)]
    run.work("-c", "1")
    pids = [app.jobs.get(job.id).result for job in fresh]
    assert all(len(each) == 1 for each in pids), "none has seen what another left"
    assert len({each[0] for each in pids}) == 2
    assert os.getpid() not in {each[0] for each in pids}
    app.close()


PRELOADED = """
import os, socket, sqlite3, threading
from pathlib import Path
import sqlq

with open("imports", "a") as imports:
    imports.write(f"{os.getpid()}\\n")
opened = %s
app = sqlq.App()

@app.task(isolate="fresh")
def fresh() -> int:
    return os.getpid()
"""


@for_each(
    ("opened", "imports"),
    [
        ("open('log', 'a'), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", 1),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 3),
        ("socket.socketpair()", 3),
        ("sqlite3.connect('other.db')", 3),
    ],
)
@needs("cheap")
def test_subprocesses_are_forked_unless_the_import_has_opened_what_none_can_share(
    tmp_path: Any, database_url: str, opened: str, imports: int
) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    (tmp_path / "shop.py").write_text(PRELOADED % opened)
    (tmp_path / "imports").unlink(missing_ok=True)
    app = sqlq.App(database_url)
    jobs = [app.enqueue(app.named("shop.fresh").new()) for _ in range(2)]
    said = run.work("-c", "1", "--log-level", "debug")
    assert ("no fork server: processes would share " in said.err) is (imports > 1), said.err
    assert len({app.jobs.get(job.id).result for job in jobs}) == 2
    assert len((tmp_path / "imports").read_text().split()) == imports
    app.close()


ON_ONE_LOOP = """
import asyncio
import sys
import sqlq

app = sqlq.App()

async def exits():
    sys.exit(3)

@app.task(isolate=True, max_attempts=1)
async def starts():
    await asyncio.create_task(exits())

async def own_id():
    return sqlq.current_job().id

@app.task(isolate=True)
def returns_a_coroutine():
    return own_id()
"""


@needs("cheap")
def test_an_asyncio_task_of_a_handler_that_ends_the_program_ends_no_process(
    tmp_path: Any, database_url: str
) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    (tmp_path / "shop.py").write_text(ON_ONE_LOOP)
    app = sqlq.App(database_url)
    job = app.enqueue(app.named("shop.starts").new())
    run.work()
    done = app.jobs.get(job.id)
    assert (done.state, done.reason, done.exception) == ("failed", "error", "SystemExit")
    app.close()


@needs("cheap")
def test_a_coroutine_that_a_handler_returns_there_finds_its_job(tmp_path: Any, database_url: str) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    (tmp_path / "shop.py").write_text(ON_ONE_LOOP)
    app = sqlq.App(database_url)
    jobs = app.enqueue_many([app.named("shop.returns_a_coroutine").new()] * 2)
    run.work("-c", "1")
    assert [app.jobs.get(job.id).result for job in jobs] == [job.id for job in jobs]
    app.close()


STOPPED = """
import asyncio
import os
import threading
import time
import sqlq

app = sqlq.App()

def stay(why):
    try:
        with open(f"{why}.began", "w"):
            threading.Event().wait(100)
    finally:
        time.sleep(0.1)
        with open(f"{why}.ended", "w") as file:
            file.write(str(os.getpid()))

async def astay(why):
    try:
        with open(f"{why}.began", "w"):
            await asyncio.sleep(100)
    finally:
        with open(f"{why}.ended", "w") as file:
            file.write(str(os.getpid()))

app.task(isolate=True, max_attempts=1)(stay)
app.task(isolate=True, max_attempts=1)(astay)

@app.task(isolate=True, max_attempts=1)
def returns_a_coroutine(why):
    return astay(why)

@app.task(isolate=True)
def own_pid():
    return os.getpid()
"""


@needs("cheap")
@for_each("task", ["stay", "astay", "returns_a_coroutine"])
def test_a_stopped_handler_runs_its_finally_and_its_process_goes_on(
    tmp_path: Path, database_url: str, task: str
) -> None:
    """In each case within two seconds, and the process serves the next job."""
    folder = tmp_path / task
    folder.mkdir()
    (folder / "shop.py").write_text(STOPPED)
    app = sqlq.App(database_url)
    new = app.named(f"shop.{task}").new
    cancelled = app.enqueue(new("cancel"))
    with worker_process(folder, "shop:app", database_url, "-c", "1", "--grace", "0s") as worker:
        wait_until((folder / "cancel.began").exists, what="the handler running")
        assert app.jobs.cancel([cancelled.id]) == {cancelled.id: "requested"}
        late = app.enqueue(new("late").set(timeout="200ms"))
        next_pid = app.result(app.enqueue(app.named("shop.own_pid").new()), timeout="60s")
        released = app.enqueue(new("stop"))
        wait_until((folder / "stop.began").exists, what="another one running")
        assert worker.stop() == 0
    pids = {(folder / f"{why}.ended").read_text() for why in ("cancel", "late", "stop")}
    assert pids == {str(next_pid)}
    assert app.jobs.get(cancelled.id).state == "cancelled"
    assert app.jobs.get(late.id).reason == "timeout"
    assert app.jobs.get(released.id).reason == "worker_lost", "its only attempt"
    app.close()


# -- the process that forks worker processes -----------------------------------------------------------------


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
