"""`sqlq work --reload`: a change of the code starts the worker processes anew, and nothing else does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import sqlq
from sqlq.cli.reload import forget_compiled, is_code
from sqlq.model.job import State
from tests.faces.command import SHOP, Command
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def code(result: str) -> str:
    """The shop, whose task `shop.send` returns this now."""
    return SHOP.replace('return f"{order_id} {copy} {note}"', f'return "{result}"')


Said = Callable[[str], None]


@pytest.fixture
def said(sqlq_: Command) -> Said:
    """Waits until the worker has logged a text, after those that were waited for before."""
    heard = 0

    def said(words: str) -> None:
        nonlocal heard

        def found() -> int:
            return sqlq_.log().find(words, heard) + 1

        heard = wait_until(found, what=words) + len(words)

    return said


@pytest.fixture
def send(sqlq_: Command, app: sqlq.App) -> Callable[[], object]:
    """Enqueues `shop.send`, and returns what it returns."""
    task = app.task(name="shop.send", queue="mail")(lambda order_id: None)

    def send() -> object:
        job = app.enqueue(task.new(7))
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what=f"job {job.id} to finish")
        return app.jobs.get(job.id).result

    return send


def save(run: Command, text: str) -> None:
    (run.directory / "shop.py").write_text(text)


def test_new_code_runs_and_running_jobs_finish(
    sqlq_: Command, app: sqlq.App, said: Said, send: Callable[[], object]
) -> None:
    save(sqlq_, code("one"))
    with sqlq_.working("--reload", anew=True) as worker:
        said("working on")
        long = app.enqueue(app.task(name="wait")(lambda name: None).new("a"))
        sqlq_.wait_for("a.started")
        assert send() == "one"
        save(sqlq_, code("two"))
        said("shop.py changed: the worker processes start anew")
        said("is at work")
        assert send() == "two"
        assert app.jobs.get(long.id).state == State.RUNNING
        sqlq_.touch("a.go")
        wait_until(lambda: app.jobs.get(long.id).state == State.FINISHED, what="what ran before the change")
        worker.terminate()
        assert worker.wait(60) == 0
    assert app.jobs.get(long.id).attempts == 1
    assert "ERROR" not in sqlq_.log()
    assert "WARNING" not in sqlq_.log()


@pytest.mark.integration
def test_a_job_is_released_to_the_new_code_after_the_grace_time(
    sqlq_: Command, app: sqlq.App, said: Said
) -> None:
    with sqlq_.working("--reload", "--grace", "100ms", anew=True):
        said("working on")
        long = app.enqueue(app.task(name="wait")(lambda name: None).new("a"))
        sqlq_.wait_for("a.started")
        save(sqlq_, SHOP.replace("while not", 'while name != "a" and not'))
        wait_until(lambda: app.jobs.get(long.id).state == State.FINISHED, what="the new code to run it")
    assert (app.jobs.get(long.id).attempts, app.jobs.get(long.id).releases) == (1, 1)


BROKEN = {
    "syntax": ("def send(:\n", "cannot be imported: SyntaxError: invalid syntax (shop.py, line 1)"),
    "import": ("import no_such_module\n", "No module named 'no_such_module' (shop.py, line 1)"),
    "lifespan": (
        SHOP + "\n@app.lifespan\ndef broken():\n    raise LookupError('no pool')\n    yield\n",
        "LookupError: no pool",
    ),
}


@pytest.mark.integration
@pytest.mark.variants
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("at_first", [True, False])
def test_reload_reports_broken_code_and_retries_at_the_next_change(
    sqlq_: Command, said: Said, send: Callable[[], object], broken: str, at_first: bool
) -> None:
    text, sentence = BROKEN[broken]
    if at_first:
        save(sqlq_, text)
    with sqlq_.working("--reload", anew=True) as worker:
        if not at_first:
            said("working on")
            assert send() == "7 False "
            save(sqlq_, text)
        said(sentence)
        said("exited with code 1: another starts when the code changes")
        save(sqlq_, code("mended"))
        assert send() == "mended"
        worker.terminate()
        assert worker.wait(60) == 0
    assert sqlq_.log().count(sentence) <= 2, "once, and in a traceback"


def test_a_worker_that_waits_for_a_change_can_be_stopped(sqlq_: Command, said: Said) -> None:
    save(sqlq_, "def send(:\n")
    with sqlq_.working("--reload", anew=True) as worker:
        said("another starts when the code changes")
        worker.terminate()
        assert worker.wait(60) == 0


@pytest.mark.integration
def test_a_change_while_a_process_starts_replaces_it(
    sqlq_: Command, said: Said, send: Callable[[], object]
) -> None:
    """It is stopped before it is at work, and its end then is no failure."""
    held = "import os, time\nfrom pathlib import Path\n"
    held += "Path('pid').write_text(str(os.getpid()))\nPath('importing').touch()\n"
    save(sqlq_, held + "while not Path('go').exists():\n    time.sleep(0.01)\nos._exit(3)\n")
    with sqlq_.working("--reload", anew=True) as worker:
        sqlq_.wait_for("importing")
        save(sqlq_, code("two"))
        said("is at work")
        assert send() == "two"
        sqlq_.touch("go")
        first = int((sqlq_.directory / "pid").read_text())
        wait_until(lambda: not psutil.pid_exists(first), what="the first one to end, and to be noticed")
        assert send() == "two"
        worker.terminate()
        assert worker.wait(60) == 0
    assert "exited" not in sqlq_.log()


@pytest.mark.integration
def test_a_change_of_the_same_size_and_time_is_loaded(
    sqlq_: Command, said: Said, send: Callable[[], object]
) -> None:
    """Python takes what it has compiled of a file with the same size and time for the same."""
    del sqlq_.environment["PYTHONDONTWRITEBYTECODE"]
    file = sqlq_.directory / "shop.py"
    save(sqlq_, code("one"))
    before = file.stat()
    with sqlq_.working("--reload", anew=True):
        said("working on")
        assert send() == "one"
        other = sqlq_.directory / "other"
        other.write_text(code("two"))
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(file)  # as editors do
        said("is at work")
        assert send() == "two"


@pytest.mark.integration
def test_reload_watches_another_directory(
    sqlq_: Command, tmp_path: Path, said: Said, send: Callable[[], object]
) -> None:
    library = sqlq_.directory / ".hidden" / "library"
    library.mkdir(parents=True)
    (library / "words.py").write_text("RESULT = 'one'\n")
    sqlq_.environment["PYTHONPATH"] += os.pathsep + str(library)
    save(sqlq_, "import words\n" + SHOP.replace('return f"{order_id} {copy} {note}"', "return words.RESULT"))
    with sqlq_.working("--reload", "--reload-dir", ".hidden/library", anew=True):
        said("working on")
        (sqlq_.directory / "other.py").touch()
        (library / "words.py").write_text("RESULT = 'another'\n")
        said("words.py changed")
        said("is at work")
        assert send() == "another"
    assert "other.py" not in sqlq_.log()


@pytest.mark.integration
def test_a_wrong_use_of_reload_is_reported_in_one_sentence(sqlq_: Command) -> None:
    leave_out = "--reload is for workers that stay while code is written: leave out"
    assert sqlq_.shop("work", "--reload", "--drain").misuse() == f"{leave_out} --drain"
    assert sqlq_.shop("work", "--reload", "--spare").misuse() == f"{leave_out} --spare"
    assert "give both" in sqlq_.shop("work", "--reload-dir", ".").misuse()
    (sqlq_.directory / "watchfiles.py").write_text("raise ModuleNotFoundError('watchfiles')\n")
    missing = sqlq_.shop("work", "--reload").sentence()
    assert missing == "--reload needs watchfiles: pip install 'sqlq[reload]'"
    (sqlq_.directory / "watchfiles.py").write_text("def watch(*_, **__):\n    raise OSError('too many')\n")
    assert sqlq_.shop("work", "--reload").sentence() == (
        f"--reload cannot watch {sqlq_.directory}: too many; name a directory with less below it, as in "
        "--reload-dir shop"
    )


def test_is_code_accepts_python_files_of_the_watched_roots(database_url: str) -> None:
    roots = [Path("/home/.ann/shop")]
    for name in ("shop.py", "tasks/mail.py"):
        assert is_code(roots[0] / name, roots)
    for name in (
        "shop.db",
        "shop.py~",
        ".#shop.py",
        "__pycache__/a.py",
        ".venv/lib/x.py",
        "v/site-packages/x.py",
    ):
        assert not is_code(roots[0] / name, roots)
    assert not is_code(Path("/elsewhere/shop.py"), roots)


def test_forget_compiled_accepts_missing_files(database_url: str, tmp_path: Path) -> None:
    forget_compiled(tmp_path / "none.py")
    (tmp_path / "__pycache__").touch()  # no directory
    forget_compiled(tmp_path / "none.py")
