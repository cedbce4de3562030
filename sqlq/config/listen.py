"""Listens for HTTP, for the dashboard and the metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from sqlq.errors import ConfigurationError, SqlqError

HEALTH_SECONDS = 1.0
Transaction = Callable[[], AbstractContextManager[Connection]]


def with_health(application: Any, read: Transaction) -> Any:
    """Return a WSGI application with `/healthz` before it, which needs no login: 200, or 503 and "database"
    while the database does not answer."""
    lock, until, status, word = threading.Lock(), float("-inf"), "", b""

    def call(environ: Any, start_response: Any) -> Any:
        nonlocal until, status, word
        if environ["PATH_INFO"] != "/healthz":
            return application(environ, start_response)
        with lock:
            if monotonic() >= until:  # guard: strangers-query-once-a-second
                status, word = "200 OK", b"ok"
                try:
                    with read() as conn:
                        conn.exec_driver_sql("SELECT 1")
                except (SQLAlchemyError, SqlqError):
                    status, word = "503 Service Unavailable", b"database"
                until = monotonic() + HEALTH_SECONDS
        start_response(status, [("Content-Type", "text/plain")])
        return [word]

    return call


def listen(application: Any, host: str, port: int, **bounds: int) -> tuple[Any, str]:
    """Return a server of waitress for a WSGI application, and its URL; with port 0 the system chooses one.

    Raises `ConfigurationError` for a port or host that cannot be used.
    """
    from waitress import create_server

    try:
        server = create_server(application, host=host, port=port, ident=None, **bounds)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"nothing can listen on host {host}, port {port}: {getattr(error, 'strerror', None) or error}; "
            "name a free port from 1024 on, and an address of this machine"
        ) from None
    several = getattr(server, "effective_listen", None)  # of a name that stands for several addresses
    port = several[0][1] if several else server.effective_port
    return server, f"http://{f'[{host}]' if ':' in host else host}:{port}/"
