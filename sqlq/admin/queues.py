"""`app.queues`: to see how full the queues are, and to pause and resume them."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Row

from sqlq.admin.facet import Facet, audited
from sqlq.config.durations import Duration, milliseconds
from sqlq.database.database import Database
from sqlq.database.values import Burden
from sqlq.errors import ConfigurationError
from sqlq.model.checks import Rows
from sqlq.store import health, schedules
from sqlq.store.health import QUEUE_LIMIT, QueueStatus
from sqlq.store.jobs import lookup, operate
from sqlq.store.jobs.failed import groups
from sqlq.store.jobs.lookup import Selection, Waiting
from sqlq.store.limits import admit
from sqlq.store.workers import workers as worker_rows
from sqlq.store.workers.workers import ALL_QUEUES, Pause, Pauses, queues_of

__all__ = ["Pause", "Pauses", "QueueStatus", "Queues", "Waiting"]


class QueueStatuses(builtins.list[QueueStatus]):
    """The status of at most 1,000 queues, by name, and the number of the `others`."""

    others = 0


class Queues(Facet):
    """The queues in a database: `app.queues`."""

    def __init__(self, database: Database, declared: Callable[[], frozenset[str]] = frozenset) -> None:
        """`declared` returns the queues that the code of the App names."""
        super().__init__(database)
        self._declared = declared

    def list(self, *, exact: bool = False) -> QueueStatuses:
        """Return what each queue holds and whether a worker serves it; also queues that are empty but served
        by name. It leaves out queues beyond 1,000, those last that a worker or a pause names.

        A count ends at 10,000, or earlier where there are many queues and priorities, and `capped` names it
        then. Failed jobs are counted to 100,000, and beyond that estimated; `estimated` names such a number.
        With `exact` every job is counted.
        """
        with self._read() as conn:
            alive = worker_rows.alive(conn)
            pauses = worker_rows.paused(conn)
            named = _named(alive)
            first = named | pauses.named.keys()
            rows, others = (health.exact(conn), 0) if exact else health.capped(conn, first)
        everything = any(worker.queues is None for worker in alive)
        empty = first - {s.queue for s in rows}
        rows += [
            QueueStatus(name, 0, 0, 0, 0, 0, None, paused=name in pauses, served=False) for name in empty
        ]
        rows = [replace(row, served=everything or row.queue in named) for row in rows]
        rows.sort(key=lambda row: (row.queue not in first, row.queue))
        statuses = QueueStatuses(sorted(rows[:QUEUE_LIMIT], key=lambda row: row.queue))
        statuses.others = others + len(rows) - len(statuses)
        return statuses

    def _vitals(self) -> tuple[dict[str, int], Burden, int, int]:
        """Return what a scrape of metrics needs beside `list` and `workers`."""
        with self._read(within_ms=health.STATEMENT_TIMEOUT_MS) as conn:
            reasons = Counter[str]()
            for group in groups(conn, Selection())[0].values():
                reasons[group.newest.reason] += group.number
            burden = self._database.dialect.health.burden(conn)
            return reasons, burden, len(schedules.late(conn)), admit.closed(conn)

    def _unknown(self, names: Collection[str], *, but_for_twins: bool = False) -> builtins.list[str]:
        """Return the queues that neither the App's code nor a job, a pause or an alive worker names. With
        `but_for_twins` a worker that serves just these queues does not count: it may have the same
        mistake."""
        undeclared = [name for name in names if name not in self._declared()]
        if not undeclared:
            return []
        with self._read() as conn:
            workers = [
                worker
                for worker in worker_rows.alive(conn)
                if not but_for_twins or {*(queues_of(worker.queues) or ())} != {*names}
            ]
            known = _named(workers) | worker_rows.paused(conn).named.keys()
            return [name for name in undeclared if name not in known and not operate.holds_jobs(conn, name)]

    def _waiting(self, names: Collection[str] | None, *, limit: Rows) -> Waiting:
        """Count the due jobs of these queues, or of all; looks at no more than `limit` jobs."""
        return self._query(lookup.waiting, names, limit)

    # -- pause -----------------------------------------------------------------------------------------------

    @audited("queues pause")
    def pause(
        self,
        *names: str,
        all: bool = False,
        duration: Duration | None = None,
    ) -> builtins.list[str]:
        """Let no worker claim from these queues, or from any with `all`, until they are resumed, or for as
        long as `duration`. Return the queues that were not paused before. The newest end counts.

        Claimed jobs still run, and enqueueing goes on. A queue may be paused before anything else is known of
        it. A pause of all queues also counts for queues that are made later, and workers see it within 2 s.

        >>> app.queues.pause("mail", duration="10m")  # doctest: +SKIP
        ['mail']
        """
        lasting_ms = None if duration is None else milliseconds(duration, "duration")
        if lasting_ms == 0:
            raise ConfigurationError(
                "duration is zero: a pause has a length, or leave it out for one without end"
            )
        return self._switch(names, all, partial(worker_rows.pause_queue, lasting_ms=lasting_ms))

    @audited("queues resume")
    def resume(self, *names: str, all: bool = False) -> builtins.list[str]:
        """Let workers claim from these queues again, and wake those that are idle; return which were paused.
        With `all` the pause of all queues ends, and queues that are paused by name stay so."""
        return self._switch(names, all, worker_rows.resume_queue)

    def pauses(self) -> Pauses:
        """Return what is paused, since when and until when."""
        return self._query(worker_rows.paused)

    def _switch(self, names: Sequence[str], all: bool, switch: Callable[..., bool]) -> builtins.list[str]:
        if bool(names) == all:
            raise ConfigurationError("name at least one queue, or say all=True, and not both")
        checked = [ALL_QUEUES] if all else sorted(set(names))
        self._database.require_tables()
        # in one order everywhere, so that two operators cannot deadlock
        return self._database.run(lambda conn: [name for name in checked if switch(conn, name)])


def _named(alive: Sequence[Row[Any]]) -> set[str]:
    """Return the queues that workers serve by name."""
    return {name for worker in alive for name in queues_of(worker.queues) or ()}
