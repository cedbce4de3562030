"""Metrics from the database: waiting jobs and their age, workers, and the size of the tables."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from time import monotonic
from typing import Any

from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.database.dialects import refusal
from sqlq.errors import SqlqError
from sqlq.metrics import names
from sqlq.metrics.families import number, numbers, version

log = logging.getLogger("sqlq.metrics")

KEPT_SECONDS = 1.0
"""For so long a collector repeats its answer: several scrapers at once must not become a load."""
COMPLAINT_SECONDS = 60.0
STATES = ("available", "scheduled", "blocked", "running", "failed")


class DatabaseCollector(Collector):
    """Shows the metrics of `sqlq metrics` on an endpoint of your own: register it with prometheus_client.

    Each scrape makes some short queries, none of which counts further than 10,000. Within a second it makes
    none. While the database does not answer, `sqlq_database_up` is 0 and the rest is missing.

    >>> from prometheus_client import REGISTRY  # doctest: +SKIP
    >>> REGISTRY.register(DatabaseCollector(app))  # doctest: +SKIP
    """

    _until = _complain_at = float("-inf")

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._last: list[Any] = []

    def describe(self) -> list[Any]:
        """Describe nothing, so that a registration makes no query."""
        return []

    def collect(self) -> Iterator[Any]:
        with self._lock:
            if monotonic() >= self._until:  # guard: scrapes-are-no-load
                self._last = self._answer()
                self._until = monotonic() + KEPT_SECONDS
            yield from self._last

    def look(self) -> None:
        """Query the database once, and keep the result. Raises the errors of the database."""
        with self._lock:
            self._last = self._ask()
            self._until = monotonic() + KEPT_SECONDS

    def _answer(self) -> list[Any]:
        try:
            return self._ask()
        except (SQLAlchemyError, SqlqError) as error:
            if monotonic() >= self._complain_at:
                self._complain_at = monotonic() + COMPLAINT_SECONDS
                log.warning("the database does not answer a scrape: %s", refusal(error))
            return [number(names.UP, 0), version()]

    def _ask(self) -> list[Any]:
        queues, workers = self._app.queues.status(), self._app.workers.list(silent=True)
        vitals = self._app.queues.vitals()
        alive = [worker for worker in workers if worker.alive]
        states = Counter("alive" if worker.alive else "silent" for worker in workers)
        found = [
            number(names.UP, 1),
            numbers(names.JOBS, [((q.queue, state), getattr(q, state)) for q in queues for state in STATES]),
            numbers(
                names.CAPPED, [((q.queue, state), state in q.capped) for q in queues for state in STATES]
            ),
            numbers(names.OLDEST_WAIT, [((q.queue,), q.oldest_wait_seconds or 0.0) for q in queues]),
            numbers(names.PAUSED, [((q.queue,), q.paused) for q in queues]),
            numbers(names.SERVED, [((q.queue,), q.served) for q in queues]),
            numbers(names.WORKERS, [((state,), states[state]) for state in ("alive", "silent")]),
            number(names.WORKER_SLOTS, sum(worker.concurrency for worker in alive)),
            numbers(names.FAILED_JOBS, [((reason,), n) for reason, n in vitals.failed.items()]),
            version(),
        ]
        if vitals.rows is not None:
            kinds = {"live": vitals.rows.live, "dead": vitals.rows.dead}
            found.append(numbers(names.TABLE_ROWS, [((kind,), n) for kind, n in kinds.items()]))
        of_one_database = {
            names.OLDEST_TRANSACTION: vitals.oldest_transaction_seconds,
            names.UNPURGED: vitals.unpurged_transactions,
            names.WAL_BYTES: vitals.wal_bytes,
            names.REPLICA_BEHIND: vitals.behind_seconds,
        }
        found += [number(metric, n) for metric, n in of_one_database.items() if n is not None]
        return found
