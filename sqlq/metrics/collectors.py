"""The collectors of the metrics, and the endpoint that Prometheus scrapes. One collector shows the counts of
the workers of one `sqlq work`. The other shows from the database waiting jobs and their age, workers, and the
size of the tables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.config.command_hint import escaped
from sqlq.config.constants import VERSION
from sqlq.config.listen import listen
from sqlq.database.dialects import refusal
from sqlq.errors import SqlqError
from sqlq.metrics.names import OF_THE_DATABASE, OF_WORKERS, Described
from sqlq.worker.report.meter import BOUNDS
from sqlq.worker.supervise.supervisor import Supervisor

log = logging.getLogger("sqlq.metrics")

KEPT_SECONDS = 1.0
"""A collector repeats its answer for this time: several scrapers at once must not become a load."""
CONNECTIONS, SILENT_SECONDS = 32, 5
"""The most connections, each a descriptor of the process that renews leases, and for how long one may be
silent."""
STATES = ("available", "scheduled", "blocked", "running", "failed")
Labelled = list[tuple[Sequence[str], float]]
VERSIONS: Labelled = [((VERSION,), 1)]
FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def families(values: Mapping[str, float | Labelled | None]) -> list[Any]:
    """Return the metrics of the database that have values, by their keys."""
    pairs = [(metric, values.get(metric.key)) for metric in OF_THE_DATABASE]
    return [
        family(metric, value if isinstance(value, list) else [((), value)])
        for metric, value in pairs
        if value is not None
    ]


def family(metric: Described, values: Iterable[Sequence[Any]]) -> Any:
    """Return a metric with its numbers for each tuple of labels: one, or the buckets of a histogram and their
    sum."""
    family = FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
    for labels, *numbers in values:
        # UTF-8 can carry these names, and they steer no terminal: a row may hold anything
        family.add_metric([escaped(label) for label in labels], *numbers)  # guard: labels-steer-no-terminal
    return family


@dataclass(eq=False)
class WorkCollector(Collector):
    """Shows the totals of all children, and their number."""

    _supervisor: Supervisor

    def collect(self) -> Iterator[Any]:
        supervisor = self._supervisor
        counts, times = supervisor.totals.now()
        numbers: dict[Sequence[str], Sequence[Any]] = {
            ("slots",): [supervisor.slots],
            ("slots_busy",): [supervisor.running],
            ("processes",): [supervisor.ready],
            ("processes_lost",): [supervisor.lost],
            ("version_info", VERSION): [1],
            **{key: [count] for key, count in counts.items()},
        }
        bounds = [*map(str, BOUNDS), "+Inf"]
        for key, (buckets, seconds) in times.items():
            numbers[key] = list(zip(bounds, accumulate(buckets), strict=True)), seconds
        for metric in OF_WORKERS:
            yield family(metric, [(key[1:], *of) for key, of in numbers.items() if key[0] == metric.key])


class DatabaseCollector(Collector):
    """Shows the metrics of `sqlq metrics` on an endpoint of your own: register it with prometheus_client.

    Each scrape makes some short queries, none of which counts further than 10,000. Within a second it makes
    none. While the database does not answer, `sqlq_database_up` is 0 and the rest is missing.

    >>> from prometheus_client import REGISTRY  # doctest: +SKIP
    >>> REGISTRY.register(DatabaseCollector(app))  # doctest: +SKIP
    """

    _until = float("-inf")

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
                try:
                    self._last = self._query()
                except (SQLAlchemyError, SqlqError) as error:
                    log.warning("the database does not answer a scrape: %s", refusal(error))
                    self._last = families({"database_up": 0, "version_info": VERSIONS})
                self._until = monotonic() + KEPT_SECONDS
            yield from self._last

    def look(self) -> None:
        """Query the database once, and keep the result. Raises the errors of the database."""
        with self._lock:
            self._last = self._query()
            self._until = monotonic() + KEPT_SECONDS

    def _query(self) -> list[Any]:
        queues, workers = self._app.queues.list(), self._app.workers.list(silent=True)
        failed, burden = self._app.queues._vitals()
        alive = [worker for worker in workers if worker.alive]
        values: dict[str, float | Labelled | None] = {
            "database_up": 1,
            "jobs": [((q.queue, state), getattr(q, state)) for q in queues for state in STATES],
            "jobs_capped": [((q.queue, state), state in q.capped) for q in queues for state in STATES],
            "oldest_wait": [((q.queue,), q.oldest_wait_seconds or 0.0) for q in queues],
            "queue_paused": [((q.queue,), q.paused) for q in queues],
            "queue_served": [((q.queue,), q.served) for q in queues],
            "workers": [(("alive",), len(alive)), (("silent",), len(workers) - len(alive))],
            "worker_slots": sum(worker.concurrency for worker in alive),
            "failed_jobs": [((reason,), n) for reason, n in failed.items()],
            "oldest_transaction": burden.oldest_transaction_seconds,
            "unpurged_transactions": burden.unpurged_transactions,
            "wal_bytes": burden.wal_bytes,
            "replica_behind": burden.behind_seconds,
            "version_info": VERSIONS,
        }
        if burden.rows is not None:
            values["table_rows"] = [(("live",), burden.rows.live), (("dead",), burden.rows.dead)]
        return families(values)


# -- the endpoint that Prometheus scrapes -------------------------------------------------------------------


def serve(collector: Collector, port: int, host: str) -> str:
    """Show a collector over HTTP, in threads of its own, until this process ends; return the URL.

    Raises `ConfigurationError` for a port or host that cannot be used."""
    logging.getLogger("waitress").setLevel(logging.ERROR)  # a queue of scrapes is no news
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, url = listen(
        make_wsgi_app(registry),
        host,
        port,
        threads=2,
        connection_limit=CONNECTIONS,  # guard: few-scrape-at-a-time
        channel_timeout=SILENT_SECONDS,
        cleanup_interval=1,
    )
    threading.Thread(target=server.run, name="sqlq-metrics", daemon=True).start()
    return f"{url}metrics"


def text(collector: Collector) -> str:
    """Return the text of a scrape."""
    return generate_latest(collector).decode()
