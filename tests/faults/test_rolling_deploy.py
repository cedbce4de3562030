"""Workers of the old and the new release side by side: each runs the tasks that it alone knows.

The new release decides about schedules.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sqlq
from tests.kit import execute, wait_until
from tests.kit.processes import worker_process
from tests.kit.scenario import Scenario
from tests.programs import release_one, release_two

OLD, NEW = f"{release_one.__name__}:app", f"{release_two.__name__}:app"
EACH = 6


def test_old_and_new_workers_share_the_jobs_and_fail_none(tmp_path: Path, database_url: str) -> None:
    with Scenario(tmp_path / "work", database_url) as work:
        app = work.app

        def done() -> bool:  # the delay of the release passes
            waits = "reserved_at IS NULL AND releases > 0"
            execute(work.engine, f"UPDATE jobs SET available_at = created_at WHERE {waits}")
            return work.is_done()

        with worker_process(work.folder, OLD, work.url) as old:
            # Alone, so that it meets what it does not know.
            unknown = [release_two.fresh.new(n) for n in range(EACH)]
            ids = work.enqueue_all(unknown + [release_two.greet.new(n, loudly=True) for n in range(EACH)])
            wait_until(lambda: all(app.jobs.get(id).releases for id in ids), timeout=60, what="all put back")
            with worker_process(work.folder, NEW, work.url) as new:
                both = (release_one.greet, release_one.retired, release_one.before, release_two.after)
                ids += work.enqueue_all(task.new(n) for task in both for n in range(EACH))
                wait_until(done, timeout=60, what="all jobs done")
                assert (old.stop(), new.stop()) == (0, 0)
        ended = [app.jobs.get(id) for id in ids]
        assert {(job.state, job.attempts, len(job.errors)) for job in ended} == {("finished", 1, 0)}
        ran = [(note.key, note.n) for note in work.notes()]
        assert len(ran) == len(ids)
        assert {key for key, _ in ran} >= {"greet", "fresh", "retired", "after"}
        assert sorted(n for key, n in ran if key == "loudly") == [*range(EACH)]
        log = old.log.read_text()
        assert "no task is named 'work.fresh' here; put back for" in log
        assert "its arguments do not fit the handler here" in log
        assert "got an unexpected keyword argument 'loudly'" in log


@pytest.mark.integration
def test_the_new_release_decides_the_plan_in_a_rolling_deploy(
    app: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    def state(name: str) -> tuple[str, str]:
        found: dict[str, Any] = {each.name: each for each in app.schedules.list()}
        return (found[name].state, str(found[name].plan)) if name in found else ("", "")

    with worker_process(tmp_path, OLD, database_url) as old:
        wait_until(lambda: state("beat") == ("active", "every 1 s"), what="the old schedule")
        # workers that start within a second may be of one deploy
        wait_until(lambda: app.schedules.get("gone").ticks > 2, what="ticks of more than a second")
        with worker_process(tmp_path, NEW, database_url) as new:
            wait_until(lambda: state("beat") == ("active", "every 2 s"), what="the new schedule")
            assert state("gone")[0] == "retired"
            # an old child that dies is started anew with old code, and changes nothing back
            (child,) = old.children()
            known = {worker.pid for worker in app.workers.list()}
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: set(old.children()) - {child}, what="another child of the old supervisor")
            wait_until(lambda: {worker.pid for worker in app.workers.list()} - known, what="it is entered")
            ticks = app.schedules.get("beat").ticks
            wait_until(lambda: app.schedules.get("beat").ticks >= ticks + 2, what="two more ticks")
            assert state("beat") == ("active", "every 2 s")
            assert state("gone")[0] == "retired"
            assert (old.stop(), new.stop()) == (0, 0)
    had = Counter((job.schedule, job.scheduled_for) for job in app.jobs.list(limit=10_000))
    assert set(had.values()) == {1}
