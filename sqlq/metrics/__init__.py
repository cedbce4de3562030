"""Metrics for Prometheus: the counts of workers (`sqlq work --metrics-port`), and the state of the database
(`sqlq metrics`). Needs prometheus_client, which comes with `pip install 'sqlq-jobs[metrics]'`.

`DatabaseCollector` shows the state of the database on an endpoint of your own.
"""

from sqlq.metrics.collectors import DatabaseCollector

__all__ = ["DatabaseCollector"]
