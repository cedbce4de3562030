"""Workers of the old and the new release side by side: each runs the tasks that it alone knows."""

from __future__ import annotations

from pathlib import Path

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
            wait_until(
                lambda: all(app.jobs.get(id).releases for id in ids), timeout=60, what="all put back once"
            )
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
