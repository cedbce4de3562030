"""The points at which a step of a job's life dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, text

import sqlq
from sqlq.model.checks import Rule
from sqlq.model.job import ClaimedJob, NewJob
from sqlq.model.outcome import Outcome, Settlement
from sqlq.store.jobs import insert, settle
from tests.faults import account, guard
from tests.faults.scorecard import record
from tests.kit import claim_on, wait_until

HOUR = 3_600_000


MOST = 400
"""No step has more points than this; beyond it something goes round in circles."""


Die = Callable[..., str | None]


class Points:
    """The points a step died at, each on a queue of its own, and the arguments of the step."""

    def __init__(self, app: sqlq.App, engine: Engine, die: Die, step: str) -> None:
        self.app, self.engine, self._die, self.step = app, engine, die, step
        self.moments: dict[int, str] = {}
        self.made = 0

    def all(self, prepare: Callable[[int], Any]) -> None:
        """Die at each point of the step; `prepare` takes the number and returns the step's argument."""
        for n in range(1, MOST):
            moment = self._die(self.step, n, prepare(n))
            self.wait_until_gone()
            if moment is None:
                break
            self.moments[n] = moment
        else:
            raise AssertionError(f"{self.step} has more than {MOST} moments")
        assert any("after COMMIT" in moment for moment in self.moments.values()), self.moments
        print(f"{self.step}: {len(self.moments)} moments")

    def took(self, n: int) -> bool:
        """Return whether the step's writes were committed when it died at this point, or did not die."""
        moments = sorted(self.moments)
        wrote = next(m for m in moments if self.moments[m].startswith("after WRITE"))
        return n >= next(m for m in moments if m > wrote and self.moments[m] == "after COMMIT")

    def wait_until_gone(self) -> None:
        """The server takes a while to notice that a client died, and holds its locks until then."""
        if self.engine.dialect.name != "sqlite":
            wait_until(lambda: self.others() == 0, what="the server noticing the death")

    def others(self) -> int:
        with self.engine.connect() as conn:  # anew: within a transaction the answer stays the same
            query = {
                "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
                "state LIKE 'idle in transaction%'",
                "mariadb": "SELECT count(*) FROM information_schema.innodb_trx t JOIN "
                "information_schema.processlist p ON p.id = t.trx_mysql_thread_id WHERE p.db = database() "
                "AND p.command = 'Sleep'",
            }[conn.dialect.name]
            return int(conn.execute(text(query)).scalar_one())

    def new(self, n: int, max_attempts: int = 3, *, followed: bool = False, limited: int = 0) -> list[int]:
        """Enqueue a job of the number's queue, or so many under a limit of which one may run."""
        new = NewJob("note", f'{{"args": [{n}]}}', f"q{n}", max_attempts)
        if followed:
            new = replace(new, on_success='{"task": "follow"}', on_failure='{"task": "follow"}')
        if limited:
            new = replace(new, limit_key=f"key {n}", rule=Rule(max_running=1))
        with self.app.database.begin() as conn:
            ids = [job.id for job in insert.insert(conn, [new] * max(1, limited))]
        self.made += len(ids)
        return ids

    def claimed(self, n: int, max_attempts: int = 3, *, followed: bool = False) -> ClaimedJob:
        self.new(n, max_attempts, followed=followed)
        return self.claim(n)

    def claim(self, n: int, outcome: Outcome | None = None) -> ClaimedJob:
        """Claim the job of a number's queue, and settle it if there is an outcome."""
        with self.app.database.begin() as conn:
            (job,) = claim_on(conn, [f"q{n}"], limit=1, owner=f"worker-{n}", lease_ms=HOUR)
            if outcome is not None:
                settle.settle(conn, [Settlement(job.id, job.lease_token, 1, outcome)])
        return job

    def finish(self) -> dict[int, list[Any]]:
        """Let the leases run out and a fresh worker do what is left; return the jobs of each number's
        queue."""
        guard.advance(self.engine, 3 * HOUR)
        with self.app.database.begin() as conn:
            settle.rescue(conn)
        guard.advance(self.engine, HOUR)
        self.app.worker(drain=True).run()
        guard.check(self.engine)
        with self.engine.connect() as conn:
            assert conn.execute(text("SELECT count(*) FROM jobs")).scalar_one() == 0, (
                "every job reached an end"
            )
        ended: dict[int, list[Any]] = {}
        for job in self.app.jobs.list(limit=10_000):
            ended.setdefault(int(job.queue.removeprefix("q")) if job.queue.startswith("q") else 0, []).append(
                job
            )
        lost = self.made - sum(len(found) for number, found in ended.items() if number)
        record(f"G2: dying at every moment of {self.step}", cases=len(self.moments), lost=lost)
        return ended

    def check_followed(self, ended: dict[int, list[Any]]) -> None:
        """Demand that each job of a number's queue that finished or failed was followed once, and no
        other."""
        jobs = [job for number, found in ended.items() if number for job in found]
        figures = account.followed(jobs, ended.get(0, []))
        account.demand(f"G14: dying at every moment of {self.step}", figures)
