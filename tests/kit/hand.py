"""Do by hand what a worker does: claim jobs, renew their leases and settle them, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import execute_on
from sqlq.database.values import Claimant, ClaimOrder, ClaimRequest
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import ErrorText, Failed, Outcome, Settlement
from sqlq.schema.tables import CARRIED
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import LeaseState
from sqlq.store.workers import look


def claim_on(
    conn: Connection,
    names: Sequence[str] = ("default",),
    *,
    limit: int = 100,
    owner: str = "me",
    lease_ms: int = 30_000,
    max_attempts: str = "{}",
    order: ClaimOrder = "oldest",
) -> list[ClaimedJob]:
    """Claim at most `limit` due jobs of these queues for `owner`, and return them in the order they should
    start.

    Counts the attempt and raises the token. Commit before any handler runs. `max_attempts` is JSON with
    those of each task, for rows that have none of their own.
    """
    by = Claimant(owner, lease_ms, max_attempts)
    return lease.claim(execute_on(conn), dialect_of(conn), ClaimRequest(names, limit, order), by)


def claim(
    app: sqlq.App, owner: str = "me", limit: int = 100, *, queue: str = "default", lease_ms: int = 30_000
) -> list[Any]:
    """Claim in a transaction of its own."""
    with app.database.begin() as conn:
        return claim_on(conn, [queue], limit=limit, owner=owner, lease_ms=lease_ms)


def ids(rights: set[tuple[int, int]]) -> set[int]:
    return {id for id, _ in rights}


def settle(app: sqlq.App, jobs: Any, outcome: Outcome, *, tries: int = 1) -> set[int]:
    """Settle a claimed job, or several, and return the ids of those that were ours."""
    ended = [
        Settlement(job.id, job.lease_token, job.attempts, outcome, limit_key=job.limit_key)
        for job in ([jobs] if hasattr(jobs, "id") else jobs)
    ]
    return ids(app.database.run(lambda conn: settling.settle(conn, ended), tries=tries))


def failed(message: str = "boom", trace: str | None = None, exception: str = "ValueError") -> Failed:
    """Return the outcome of an attempt that raised for the last time."""
    return Failed("error", ErrorText(exception, message, trace))


BOOM = failed(trace="Traceback …")


def end(app: sqlq.App, outcome: Outcome, limit: int = 1, queue: str = "default") -> list[int]:
    """Claim and settle jobs of a queue as the worker w, and return their ids."""
    claimed = claim(app, "w", limit, queue=queue)
    settle(app, claimed, outcome)
    return [job.id for job in claimed]


def fate(app: sqlq.App, job: Any) -> LeaseState:
    with app.database.read() as conn:
        return lease.states_of(conn, [(job.id, job.lease_token)])[job.id, job.lease_token]


def expire(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET lease_expires_at = reserved_at WHERE reserved_at IS NOT NULL"))


def rescue(app: sqlq.App) -> list[settling.Rescued]:
    with app.database.begin() as conn:
        return settling.rescue(conn)


def fail_before(engine: Engine, id: int) -> None:
    """Have a job's id stand in failed_jobs already, so that the database refuses its end there."""
    columns = ", ".join(map(engine.dialect.identifier_preparer.quote, CARRIED))
    with engine.begin() as conn:
        conn.execute(
            text(
                f"INSERT INTO failed_jobs ({columns}, reason, exception, message) "
                f"SELECT {columns}, 'worker_lost', 'E', 'm' FROM jobs WHERE id = {id}"
            )
        )


def blocked(app: sqlq.App) -> int:
    return len(app.jobs.list(state="blocked", limit=1000))


class Hand:
    """An App with two tasks, and a worker's hand: claims and settles jobs without running anything."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.tasks = {
            name: app.task(name=name, max_attempts=3)(lambda n=0, copy=False: None)
            for name in ("send", "pack")
        }

    def enqueue(self, count: int = 1, task: str = "send", **options: Any) -> list[int]:
        new = self.tasks[task].new
        return [job.id for job in self.app.enqueue_many([new(i).set(**options) for i in range(count)])]

    def claim(
        self, *queues: str, limit: int = 10_000, owner: str = "worker", lease_ms: int = 30_000
    ) -> list[ClaimedJob]:
        """Claim what is due in these queues, or in all."""
        names = queues or list(look.due_in(self.app.database, look.KnownQueues()))
        with self.app.database.begin() as conn:
            return claim_on(conn, names, limit=limit, owner=owner, lease_ms=lease_ms)

    def settle(self, jobs: Any, outcome: Outcome) -> set[int]:
        return settle(self.app, jobs, outcome, tries=50)

    def end(self, outcome: Outcome = BOOM) -> list[int]:
        """Claim what is due, and end it."""
        claimed = self.claim()
        assert self.settle(claimed, outcome) == {job.id for job in claimed}
        return sorted(job.id for job in claimed)

    def ended(self, count: int = 1, outcome: Outcome = BOOM, task: str = "send", **options: Any) -> list[int]:
        """Enqueue jobs that are the first of their queue, and end them."""
        ids = self.enqueue(count, task, **options)
        claimed = self.claim(options.get("queue", "default"), limit=count)
        assert [job.id for job in claimed] == ids
        assert self.settle(claimed, outcome) == {*ids}
        return ids

    def states(self, ids: Sequence[int]) -> list[str]:
        return [str(self.app.jobs.get(id).state) for id in ids]
