"""The endpoint that Prometheus scrapes."""

from __future__ import annotations

import errno
import os
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sqlq.errors import ConfigurationError


def serve(collector: Collector, port: int, host: str, option: str) -> str:
    """Show a collector over HTTP, in threads of its own, until this process ends; return the URL.

    With port 0 the system chooses one. Raises `ConfigurationError` for a port or host that cannot be had,
    naming the `option` that gave it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server: Any = start_http_server(port, addr=host, registry=registry)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(_why_not(error, port, host, option)) from None
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics"


def text(collector: Collector) -> str:
    """Return what a scrape would get."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def _why_not(error: Exception, port: int, host: str, option: str) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"{option} {port}: another process listens there already; name a port that is free"
    if number == errno.EACCES:
        return f"{option} {port}: this user may not listen there; name a port from 1024 on"
    why = os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
    return f"nothing can listen on host {host}, port {port}: {why}; name an address of this machine"
