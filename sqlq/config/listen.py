"""Listens for HTTP, for the dashboard and the metrics."""

from __future__ import annotations

from typing import Any

from sqlq.errors import ConfigurationError


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
