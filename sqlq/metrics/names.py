"""The names of all metrics, with their labels. Dashboards and alerts depend on them: a name stays, and others
may be added."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Described(NamedTuple):
    """Name, kind and description of a metric. The exposition adds _total to the names of counters."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the counts of workers."""
        return self.name.removeprefix("sqlq_").removesuffix("_seconds")


_VERSION = Described("sqlq_version_info", "gauge", "The version of sqlq; always 1", ("version",))

OF_WORKERS = (
    Described(
        "sqlq_attempts",
        "counter",
        "Attempts that have ended, by event: finished, retried, failed, snoozed, "
        "released, cancelled, rescued (its worker died, it runs again), lost (its outcome did not count)",
        ("task", "queue", "outcome"),
    ),
    Described(
        "sqlq_failed",
        "counter",
        "Jobs that have failed for good: error, timeout, worker_lost, unknown_task, bad_payload, "
        "bad_signature",
        ("task", "queue", "reason"),
    ),
    Described("sqlq_claimed", "counter", "Jobs that workers have claimed", ("queue",)),
    Described(
        "sqlq_run_seconds", "histogram", "How long an attempt's handler ran", ("task", "queue", "outcome")
    ),
    Described(
        "sqlq_wait_seconds",
        "histogram",
        "From when a job was due to when its handler began, by the clocks of the database and of the worker",
        ("task", "queue"),
    ),
    Described(
        "sqlq_settle_seconds",
        "histogram",
        "From the handler's end to when the outcome was committed",
        ("queue",),
    ),
    Described(
        "sqlq_claim_seconds",
        "histogram",
        "How long a claim took, by what it found: jobs or nothing",
        ("found",),
    ),
    Described("sqlq_slots", "gauge", "How many jobs these worker processes run at a time"),
    Described("sqlq_slots_busy", "gauge", "How many jobs ran at the last report of the processes"),
    Described("sqlq_processes", "gauge", "Worker processes that are at work"),
    Described("sqlq_processes_lost", "counter", "Worker processes that have died"),
    _VERSION,
)
"""The metrics of `sqlq work --metrics-port`."""

OF_THE_DATABASE = (
    Described("sqlq_database_up", "gauge", "Whether the database has answered: 1, or 0"),
    Described(
        "sqlq_jobs",
        "gauge",
        "Jobs in a queue by state: available, scheduled, blocked, running, failed; counted up to 10,000",
        ("queue", "state"),
    ),
    Described(
        "sqlq_jobs_capped",
        "gauge",
        "1 where sqlq_jobs was not counted to the end, else 0",
        ("queue", "state"),
    ),
    Described(
        "sqlq_oldest_wait_seconds", "gauge", "How long the oldest available job has been due", ("queue",)
    ),
    Described("sqlq_queue_paused", "gauge", "Whether the queue is paused", ("queue",)),
    Described("sqlq_queue_served", "gauge", "Whether a live worker serves the queue", ("queue",)),
    Described(
        "sqlq_workers",
        "gauge",
        "Worker processes by their heartbeats: alive, or silent for more than 90 s and up to a day",
        ("state",),
    ),
    Described("sqlq_worker_slots", "gauge", "How many jobs live workers run at a time"),
    Described(
        "sqlq_failed_jobs", "gauge", "Rows of failed_jobs by reason, among the newest 10,000", ("reason",)
    ),
    Described(
        "sqlq_table_rows", "gauge", "Rows of the table jobs, live or dead, as PostgreSQL estimates", ("kind",)
    ),
    Described(
        "sqlq_oldest_transaction_seconds",
        "gauge",
        "The age of the oldest open transaction that keeps dead rows from being removed (not on SQLite)",
    ),
    Described(
        "sqlq_unpurged_transactions",
        "gauge",
        "Transactions whose old rows the server has not purged yet, its history list length (MariaDB)",
    ),
    Described("sqlq_wal_bytes", "gauge", "The size of the write-ahead log (SQLite)"),
    Described(
        "sqlq_replica_behind_seconds", "gauge", "How far the replica is behind that is read from (PostgreSQL)"
    ),
    _VERSION,
)
"""The metrics of `sqlq metrics`."""
