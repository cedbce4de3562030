"""`sqlq metrics`: what only the database knows, for Prometheus."""

from __future__ import annotations

import signal
import threading
from importlib import import_module

import click

from sqlq.cli.context import Context
from sqlq.cli.options import port_option
from sqlq.errors import ConfigurationError

HOST = "127.0.0.1"


def require_client(option: str) -> None:
    """Raise `ConfigurationError` where a package is not there."""
    try:
        import_module("prometheus_client")
        import_module("waitress")
    except ImportError:
        raise ConfigurationError(
            f"{option} needs prometheus_client and waitress: pip install 'sqlq-jobs[metrics]'"
        ) from None


@click.command()
@port_option("--port", help="Port to serve metrics at, as http://…:PORT/metrics.")
@click.option("--host", default=HOST, show_default=True, help="Address for --port.")
@click.pass_obj
def metrics(context: Context, port: int | None, host: str) -> None:
    """Show for Prometheus what only the database knows.

    How much waits in each queue and for how long, workers, failed jobs by reason, dead rows, the oldest
    transaction. With --port until stopped, else once, to stdout. One process for each database is enough;
    what the workers count they show themselves, see sqlq work --metrics-port.
    """
    require_client("sqlq metrics")
    from sqlq.metrics.collectors import DatabaseCollector, serve, text

    app = context.looking()
    collector = DatabaseCollector(app)
    collector.look()
    if port is None:
        click.echo(text(collector), nl=False)
        return
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: over.set())
    url = serve(collector, port, host, app)
    click.echo(f"metrics of {context.shown_url()} at {url}; Ctrl-C stops")
    over.wait()
