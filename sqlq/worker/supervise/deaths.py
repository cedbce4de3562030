"""Releases at once the jobs of worker processes that died."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from time import monotonic

from sqlalchemy.exc import DBAPIError

from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.store.apart import lately
from sqlq.store.blockers import free_after
from sqlq.store.jobs import lease, settle
from sqlq.store.workers import notify, workers
from sqlq.worker.maintain.services import RESCUE_BATCH, at_once
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.threads.log import log

LOCKED_SECONDS = 0.05


@dataclass
class Dead:
    """A worker that died. The jobs that it had started count as attempts that lost their worker, or, if they
    are `late`, met their timeout. The rest never began."""

    worker: str
    started: set[Right] | None
    why: str
    until: float
    """After this its leases have run out."""
    late: Collection[Right] = ()
    """The started jobs that were past their timeouts."""
    held: list[Right] | None = None
    """The jobs that are still to be released; None until they were read."""


class Deaths:
    """The workers that died, and whose jobs are still to be released. It may fail: the rescue takes jobs that
    are not released here."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.waiting: list[Dead] = []
        self.counts: Counter[str] = Counter()
        """How the attempts of dead workers ended."""

    def release(self, database: Database) -> float:
        """Release a batch of each dead worker's jobs. Return in how many seconds there is more to do."""
        wait = inf
        for dead in list(self.waiting):
            try:
                rest = self._release_batch(database, dead)
            except Exception as error:  # guard: one-death-keeps-no-other-waiting
                if isinstance(error, DBAPIError) and database.dialect.driver.trouble(error).passes:
                    raise
                log.error("what worker %s held stays until its leases have run out: %s", dead.worker, error)
                rest = None
            if rest is None or monotonic() > dead.until:
                self.waiting.remove(dead)
            else:
                wait = min(wait, rest)
        return wait

    def _release_batch(self, database: Database, dead: Dead) -> float | None:
        """Release a batch. Return in how many seconds the next is due, None where nothing is left."""
        worker, why = dead.worker, dead.why
        began = monotonic()
        with database.begin() as conn:
            held = lease.owned(conn, worker) if dead.held is None else dead.held
            batch, later = held[:RESCUE_BATCH], held[RESCUE_BATCH:]
            # guard: only-what-started-counts
            started = {right for right in batch if dead.started is None or right in dead.started}
            back = settle.give_back(conn, set(batch) - started)
            taken = settle.lose(conn, started, why, late=dead.late) if started else []
            done = {id for id, _ in back} | {job.id for job in taken}
            fates = lease.fates(conn, [right for right in batch if right[0] not in done])
            refused = lately(conn, settle.LOST)["refused"]
            # guard: refused-settle-is-left-to-the-rescue
            locked = [r for r, fate in fates.items() if fate is lease.Fate.HELD and r[0] not in refused]
            left = later + locked  # guard: locked-rows-are-given-back-later
            if not left and not lease.owned(conn, worker):
                workers.leave(conn, worker)
            if done:
                notify.wake_others(conn)
        dead.held = left
        free_after(database, [job.row for job in taken if job.failed])
        self._reporter.rescued(taken, why)
        ended = Counter("failed" if job.failed else "retried" for job in taken)
        self.counts = self.counts + ended + Counter(released=len(back))  # guard: lost-jobs-are-counted
        if back:
            log.info("%d jobs that worker %s had not started are given back", len(back), worker)
        if later:
            return at_once(database, began)  # guard: all-jobs-of-a-dead-process-are-released
        return LOCKED_SECONDS if left else None
