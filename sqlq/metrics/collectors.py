"""The collectors of the metrics. One shows the counts of the workers of one `sqlq work`. The other shows from
the database waiting jobs and their age, workers, and the size of the tables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.config.command_hint import escaped
from sqlq.config.constants import VERSION
from sqlq.database.dialects import refusal
from sqlq.errors import SqlqError
from sqlq.metrics import names
from sqlq.metrics.names import Described
from sqlq.worker.report.meter import BOUNDS
from sqlq.worker.supervise.supervisor import Supervisor

log = logging.getLogger("sqlq.metrics")

KEPT_SECONDS = 1.0
"""A collector repeats its answer for this time: several scrapers at once must not become a load."""
COMPLAINT_SECONDS = 60.0
STATES = ("available", "scheduled", "blocked", "running", "failed")
Labelled = Iterable[tuple[Sequence[str], float]]


def numbers(metric: Described, values: Labelled) -> Any:
    """Return a counter or gauge with a value for each tuple of labels."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        family.add_metric([shown(label) for label in labels], value)
    return family


def number(metric: Described, value: float) -> Any:
    """Return a counter or gauge without labels."""
    return numbers(metric, [((), value)])


def version() -> Any:
    return numbers(names.VERSION, [((VERSION,), 1)])


def histogram(metric: Described, values: Iterable[tuple[Sequence[str], Sequence[float], float]]) -> Any:
    """Return a histogram of times: labels, the number in each bucket, and their sum."""
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(str, BOUNDS), "+Inf"]
    for labels, buckets, seconds in values:
        up_to = list(zip(bounds, accumulate(buckets), strict=True))
        family.add_metric([shown(label) for label in labels], up_to, seconds)
    return family


def shown(label: str) -> str:
    """Return a name that UTF-8 can carry and that steers no terminal: a row may hold anything."""
    return escaped(label)  # guard: labels-steer-no-terminal


@dataclass(eq=False)
class WorkCollector(Collector):
    """Shows the totals of all children, and their number."""

    _supervisor: Supervisor

    def collect(self) -> Iterator[Any]:
        supervisor = self._supervisor
        counts, times = supervisor.totals.now()
        now = {
            names.SLOTS: supervisor.slots,
            names.SLOTS_BUSY: supervisor.running,
            names.PROCESSES: supervisor.ready,
            names.PROCESSES_LOST: supervisor.lost,
        }
        for metric in names.OF_WORKERS:
            if metric in now:
                yield number(metric, now[metric])
            elif metric.kind == "histogram":
                yield histogram(metric, [(key[1:], *of) for key, of in times.items() if key[0] == metric.key])
            elif metric.kind == "counter":
                yield numbers(metric, [(key[1:], n) for key, n in counts.items() if key[0] == metric.key])
        yield version()


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
        queues, workers = self._app.queues.list(), self._app.workers.list(silent=True)
        failed, burden = self._app.queues._vitals()
        alive = [worker for worker in workers if worker.alive]
        found = [
            number(names.UP, 1),
            numbers(names.JOBS, [((q.queue, state), getattr(q, state)) for q in queues for state in STATES]),
            numbers(
                names.CAPPED, [((q.queue, state), state in q.capped) for q in queues for state in STATES]
            ),
            numbers(names.OLDEST_WAIT, [((q.queue,), q.oldest_wait_seconds or 0.0) for q in queues]),
            numbers(names.PAUSED, [((q.queue,), q.paused) for q in queues]),
            numbers(names.SERVED, [((q.queue,), q.served) for q in queues]),
            numbers(names.WORKERS, [(("alive",), len(alive)), (("silent",), len(workers) - len(alive))]),
            number(names.WORKER_SLOTS, sum(worker.concurrency for worker in alive)),
            numbers(names.FAILED_JOBS, [((reason,), n) for reason, n in failed.items()]),
            version(),
        ]
        if burden.rows is not None:
            kinds = {"live": burden.rows.live, "dead": burden.rows.dead}
            found.append(numbers(names.TABLE_ROWS, [((kind,), n) for kind, n in kinds.items()]))
        of_one_database = {
            names.OLDEST_TRANSACTION: burden.oldest_transaction_seconds,
            names.UNPURGED: burden.unpurged_transactions,
            names.WAL_BYTES: burden.wal_bytes,
            names.REPLICA_BEHIND: burden.behind_seconds,
        }
        found += [number(metric, n) for metric, n in of_one_database.items() if n is not None]
        return found
