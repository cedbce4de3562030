"""Metrics for Prometheus: what workers count (`sqlq work --metrics-port`), and what only the database knows
(`sqlq metrics`). Needs prometheus_client, which comes with `pip install 'sqlq[metrics]'`.

`DatabaseCollector` lets an endpoint of your own show what the database knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlq.metrics.database import DatabaseCollector as DatabaseCollector

__all__ = ["DatabaseCollector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sqlq.metrics.database import DatabaseCollector

    return DatabaseCollector


def __dir__() -> list[str]:
    return [*globals(), *__all__]
