"""Metrics for Prometheus: the counts of workers (`sqlq work --metrics-port`), and the state of the database
(`sqlq metrics`). Needs prometheus_client, which comes with `pip install 'sqlq-jobs[metrics]'`.

`DatabaseCollector` shows the state of the database on an endpoint of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlq.metrics.collectors import DatabaseCollector as DatabaseCollector

__all__ = ["DatabaseCollector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sqlq.metrics.collectors import DatabaseCollector

    return DatabaseCollector


def __dir__() -> list[str]:
    return [*globals(), *__all__]
