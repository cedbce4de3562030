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
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.config.command_hint import escaped
from sqlq.config.constants import VERSION
from sqlq.config.listen import listen, with_health
from sqlq.database.dialects import refusal
from sqlq.errors import SqlqError
from sqlq.worker.report.meter import BOUNDS, REASONS
from sqlq.worker.supervise.supervisor import Supervisor


class Described(NamedTuple):
    """A metric and what describes it. The exposition adds _total to the names of counters."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter", "histogram"] = "gauge"

    @property
    def key(self) -> str:
        """Its name in the counts of workers."""
        return self.name.removeprefix("sqlq_").removesuffix("_seconds")


_VERSION = Described("sqlq_version_info", "The version of sqlq; always 1", ("version",))

OF_WORKERS = (
    Described(
        "sqlq_attempts",
        "Attempts that have ended, by event: finished, retried, failed, snoozed, "
        "released, cancelled, rescued (its worker died, it runs again), lost (its outcome did not count)",
        ("task", "queue", "outcome"),
        "counter",
    ),
    Described(
        "sqlq_failed",
        "Jobs that have failed for good: error, timeout, worker_lost, unknown_task, bad_payload, "
        "bad_signature",
        ("task", "queue", "reason"),
        "counter",
    ),
    Described("sqlq_claimed", "Jobs that workers have claimed", ("queue",), "counter"),
    Described(
        "sqlq_run_seconds", "How long an attempt's handler ran", ("task", "queue", "outcome"), "histogram"
    ),
    Described(
        "sqlq_wait_seconds",
        "From when a job was due to when its handler began, by the clocks of the database and of the worker",
        ("task", "queue"),
        "histogram",
    ),
    Described(
        "sqlq_settle_seconds",
        "From the handler's end to when the outcome was committed",
        ("queue",),
        "histogram",
    ),
    Described(
        "sqlq_claim_seconds",
        "How long a claim took, by what it found: jobs or nothing",
        ("found",),
        "histogram",
    ),
    Described("sqlq_slots", "How many jobs these worker processes run at a time"),
    Described("sqlq_slots_busy", "How many jobs ran at the last report of the processes"),
    Described("sqlq_processes", "Worker processes that are at work"),
    Described("sqlq_processes_lost", "Worker processes that have died", (), "counter"),
    _VERSION,
)
"""The metrics of `sqlq work --metrics-port`."""

OF_THE_DATABASE = (
    Described("sqlq_database_up", "Whether the database has answered: 1, or 0"),
    Described(
        "sqlq_jobs",
        "Jobs in a queue by state: available, scheduled, blocked, running, failed; counted up to 10,000, "
        "failed ones up to 100,000 and beyond that estimated",
        ("queue", "state"),
    ),
    Described(
        "sqlq_jobs_capped",
        "1 where sqlq_jobs was not counted to the end, or estimated, else 0",
        ("queue", "state"),
    ),
    Described("sqlq_oldest_wait_seconds", "How long the oldest available job has been due", ("queue",)),
    Described("sqlq_queue_paused", "Whether the queue is paused", ("queue",)),
    Described("sqlq_queue_served", "Whether a live worker serves the queue", ("queue",)),
    Described(
        "sqlq_workers",
        "Worker processes by their heartbeats: alive, or silent for more than 90 s and up to a day",
        ("state",),
    ),
    Described("sqlq_worker_slots", "How many jobs live workers run at a time"),
    Described("sqlq_schedules_overdue", "Schedules that have been due for more than 60 s"),
    Described("sqlq_limits_closed", "Keys of limits that are closed, by a SlowDown or an operator"),
    Described(
        "sqlq_failed_jobs", "Rows of failed_jobs by reason; estimated beyond 100,000 of an error", ("reason",)
    ),
    Described("sqlq_table_rows", "Rows of the table jobs, live or dead, as PostgreSQL estimates", ("kind",)),
    Described(
        "sqlq_oldest_transaction_seconds",
        "The age of the oldest open transaction that keeps dead rows from being removed (not on SQLite)",
    ),
    Described(
        "sqlq_unpurged_transactions",
        "Transactions whose old rows the server has not purged yet, its history list length (MariaDB)",
    ),
    Described("sqlq_wal_bytes", "The size of the write-ahead log (SQLite)"),
    Described("sqlq_replica_behind_seconds", "How far the replica is behind that is read from (PostgreSQL)"),
    _VERSION,
)
"""The metrics of `sqlq metrics`."""


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
    return [
        family(metric, value if isinstance(value, list) else [((), value)])
        for metric in OF_THE_DATABASE
        if (value := values.get(metric.key)) is not None
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

    Each scrape makes some short queries, whose counts have an end. Within a second it makes
    none. While the database does not answer, `sqlq_database_up` is 0 and the rest is missing.

    >>> from prometheus_client import REGISTRY  # doctest: +SKIP
    >>> REGISTRY.register(DatabaseCollector(app))  # doctest: +SKIP
    """

    _until = float("-inf")

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.RLock()
        self._last: list[Any] = []

    def describe(self) -> list[Any]:
        """Describe nothing, so that a registration makes no query."""
        return []

    def collect(self) -> Iterator[Any]:
        with self._lock:
            if monotonic() >= self._until:  # guard: scrapes-are-no-load
                try:
                    self.look()
                except (SQLAlchemyError, SqlqError) as error:
                    log.warning("the database does not answer a scrape: %s", refusal(error))
                    self._last = families({"database_up": 0, "version_info": VERSIONS})
            yield from self._last

    def look(self) -> None:
        """Query the database once, and keep the result. Raises the errors of the database."""
        with self._lock:
            try:
                self._last = self._query()
            finally:
                self._until = monotonic() + KEPT_SECONDS

    def _query(self) -> list[Any]:
        queues, workers = self._app.queues.list(), self._app.workers.list(silent=True)
        failed, burden, overdue, closed = self._app.queues._vitals()
        alive = [worker for worker in workers if worker.alive]
        values: dict[str, float | Labelled | None] = {
            "database_up": 1,
            "jobs": [((q.queue, state), getattr(q, state)) for q in queues for state in STATES],
            "jobs_capped": [
                ((q.queue, state), state in (*q.capped, *q.estimated)) for q in queues for state in STATES
            ],
            "oldest_wait": [((q.queue,), q.oldest_wait_seconds or 0.0) for q in queues],
            "queue_paused": [((q.queue,), q.paused) for q in queues],
            "queue_served": [((q.queue,), q.served) for q in queues],
            "workers": [(("alive",), len(alive)), (("silent",), len(workers) - len(alive))],
            "worker_slots": sum(worker.concurrency for worker in alive),
            "schedules_overdue": overdue,
            "limits_closed": closed,
            "failed_jobs": [
                ((reason,), n) for reason, n in ({**dict.fromkeys(REASONS, 0), **failed}).items()
            ],
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


def serve(collector: Collector, port: int, host: str, app: App | None = None) -> str:
    """Show a collector over HTTP, in threads of its own, until this process ends; return the URL.
    `/healthz` shows whether the database of `app` answers.

    Raises `ConfigurationError` for a port or host that cannot be used."""
    logging.getLogger("waitress").setLevel(logging.ERROR)  # a queue of scrapes is no news
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    metrics = make_wsgi_app(registry)
    server, url = listen(
        metrics if app is None else with_health(metrics, lambda: app.database.read(within_ms=2_000)),
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
