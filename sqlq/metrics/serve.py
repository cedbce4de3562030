"""The endpoint that Prometheus scrapes."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sqlq.errors import ConfigurationError

log = logging.getLogger("sqlq.metrics")

MOST_CONNECTIONS = 32
"""Each has a descriptor and a thread of the process that renews leases; one more is closed at once."""
SILENT_SECONDS, LONGEST_SECONDS = 5.0, 30.0
"""How long a connection may be silent, and how long it may take."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, *said: Any) -> None:
        log.debug(*said)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, few at a time, and none for long."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        asked = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = asked[0]
        self.ends: dict[socket.socket, float] = {}
        super().__init__((str(address[0]), int(address[1])), _Handler)
        self.set_app(make_wsgi_app(registry))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self.ends) < MOST_CONNECTIONS  # guard: few-scrape-at-a-time

    def process_request(self, request: Any, client_address: Any) -> None:
        self.ends[request] = time.monotonic() + LONGEST_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.ends.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        for request, end in list(self.ends.items()):
            if time.monotonic() > end:  # guard: no-connection-stays
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape was broken off")


def serve(collector: Collector, port: int, host: str, option: str) -> str:
    """Show a collector over HTTP, in threads of its own, until this process ends; return the URL.

    With port 0 the system chooses one. Raises `ConfigurationError` for a port or host that cannot be used,
    and names the `option` that set it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server = _Server(host, port, registry)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(_why_not(error, port, host, option)) from None
    threading.Thread(target=server.serve_forever, name="sqlq-metrics", daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics"


def text(collector: Collector) -> str:
    """Return the text of a scrape."""
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
