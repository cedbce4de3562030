"""The endpoint that Prometheus scrapes."""

from __future__ import annotations

import logging
import threading

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sqlq.config.listen import listen

CONNECTIONS, SILENT_SECONDS = 32, 5
"""The most connections, each a descriptor of the process that renews leases, and for how long one may be
silent."""


def serve(collector: Collector, port: int, host: str) -> str:
    """Show a collector over HTTP, in threads of its own, until this process ends; return the URL.

    Raises `ConfigurationError` for a port or host that cannot be used."""
    logging.getLogger("waitress").setLevel(logging.ERROR)  # a queue of scrapes is no news
    server, url = listen(
        make_wsgi_app(_registry(collector)),
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
    return generate_latest(_registry(collector)).decode()


def _registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
