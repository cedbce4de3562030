"""Workers of the old and the new release side by side: each runs the tasks that it alone knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

import sqlq
from tests.kit import wait_until
from tests.kit.processes import Project, worker_process

OLD = """
import os, sqlq
app = sqlq.App()

def leave(line):
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{line}\\n".encode())
    os.close(fd)

@app.task(name="work.greet", max_attempts=1)
def greet(n): leave(f"greet {n}")

@app.task(name="work.retired", max_attempts=1)
def retired(n): leave(f"retired {n}")

@app.task(name="work.before", max_attempts=1)
def before(n): leave(f"before {n}")
"""

NEW = """
from old import leave
import sqlq
app = sqlq.App()

@app.task(name="work.greet", max_attempts=1)
def greet(n, loudly=False): leave(f"greet {n}{'!' if loudly else ''}")

@app.task(name="work.fresh", max_attempts=1)
async def fresh(n): leave(f"fresh {n}")

@app.task(name="work.after", aliases=["work.before"], max_attempts=1)
def after(n): leave(f"after {n}")
"""


@pytest.fixture
def work(tmp_path: Path, database_url: str) -> Iterator[Project]:
    with Project(tmp_path / "work", database_url, OLD, "old") as work:
        (work.folder / "new.py").write_text(NEW)
        yield work


def test_old_and_new_workers_share_the_jobs_and_fail_none(work: Project) -> None:
    app, each = work.app, 6

    def make(name: str) -> sqlq.Task[..., None]:
        return app.task(name=name, max_attempts=1)(lambda n, loudly=False: None)

    greet, fresh, retired, before, after = (
        make(f"work.{name}") for name in ("greet", "fresh", "retired", "before", "after")
    )

    def done() -> bool:
        with app.database.begin() as conn:  # the delay of the release passes
            table = f"{app.database.schema}.jobs" if app.database.schema else "jobs"
            conn.execute(
                text(
                    f"UPDATE {table} SET available_at = created_at WHERE reserved_at IS NULL AND releases > 0"
                )
            )
            return conn.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0

    with worker_process(work.folder, "old:app", work.url) as old:
        # Alone, so that it meets what it does not know.
        jobs = app.enqueue_many(
            [fresh.new(n) for n in range(each)] + [greet.new(n, loudly=True) for n in range(each)]
        )
        wait_until(
            lambda: {app.jobs.get(job.id).releases > 0 for job in jobs} == {True},
            timeout=60,
            what="all put back once",
        )
        with worker_process(work.folder, "new:app", work.url) as new:
            jobs += app.enqueue_many(
                [task.new(n) for task in (greet, retired, before, after) for n in range(each)]
            )
            wait_until(done, timeout=60, what="all jobs done")
            assert (old.stop(), new.stop()) == (0, 0)
    ended = [app.jobs.get(job.id) for job in jobs]
    assert {(job.state, job.attempts, len(job.errors)) for job in ended} == {("finished", 1, 0)}
    ran = sorted(
        line.replace("before", "before or after").replace("after ", "before or after ")
        for line in lines(work)
    )
    assert len(ran) == len(jobs)
    assert {line.split()[0] for line in lines(work)} >= {"greet", "fresh", "retired", "after"}
    assert sorted(line for line in lines(work) if "!" in line) == [f"greet {n}!" for n in range(each)]
    log = old.log.read_text()
    assert "no task is named 'work.fresh' here; put back for" in log
    assert "its arguments do not fit the handler here" in log
    assert "got an unexpected keyword argument 'loudly'" in log


def lines(work: Project) -> list[str]:
    return (work.folder / "ran.txt").read_text().splitlines()
