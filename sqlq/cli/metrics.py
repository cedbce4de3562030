"""`sqlq metrics`: what only the database knows, for Prometheus; and the endpoint of `sqlq work`."""

from __future__ import annotations

import logging
import signal
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sqlq.cli.context import Context
from sqlq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlq.worker.report.meter import Totals
    from sqlq.worker.supervise.supervisor import Supervisor

F = TypeVar("F", bound="Callable[..., Any]")
log = logging.getLogger("sqlq.worker")

HOST = "127.0.0.1"


def work_options(command: F) -> F:
    """Let `sqlq work` take where its metrics are shown."""
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Show metrics of all worker processes for Prometheus, at http://…:PORT/metrics.",
    )
    host = click.option(
        "--metrics-host", default=HOST, show_default=True, help="With --metrics-port: listen at this address."
    )
    return port(host(command))


def require_client(option: str) -> None:
    """Raise `ConfigurationError` where a package is not there."""
    try:
        import_module("prometheus_client")
        import_module("waitress")
    except ImportError:
        raise ConfigurationError(
            f"{option} needs prometheus_client and waitress: pip install 'sqlq-jobs[metrics]'"
        ) from None


def totals_for(port: int | None) -> Totals | None:
    """Return the sums of the worker processes; None without a port."""
    if port is None:
        return None
    require_client("--metrics-port")
    from sqlq.worker.report.meter import Totals

    return Totals()


def show(supervisor: Supervisor, port: int | None, host: str) -> None:
    """Serve the sums where a port is given. Raises `ConfigurationError` for a port that cannot be had."""
    if port is None:
        return
    from sqlq.metrics.serve import serve
    from sqlq.metrics.work import WorkCollector

    url = serve(WorkCollector(supervisor), port, host)
    log.info("metrics at %s", url)


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve them at http://…:PORT/metrics."
)
@click.option("--host", default=HOST, show_default=True, help="With --port: listen at this address.")
@click.pass_obj
def metrics(context: Context, port: int | None, host: str) -> None:
    """Show for Prometheus what only the database knows.

    How much waits in each queue and for how long, workers, failed jobs by reason, dead rows, the oldest
    transaction. With --port until stopped, else once, to stdout. One process for each database is enough;
    what the workers count they show themselves, see sqlq work --metrics-port.
    """
    require_client("sqlq metrics")
    from sqlq.metrics.database import DatabaseCollector
    from sqlq.metrics.serve import serve, text

    collector = DatabaseCollector(context.looking())
    collector.look()
    if port is None:
        click.echo(text(collector), nl=False)
        return
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: over.set())
    url = serve(collector, port, host)
    click.echo(f"metrics of {context.shown_url()} at {url}; Ctrl-C stops")
    over.wait()
