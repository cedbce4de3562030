"""`sqlq health`: is the worker here alive? For a container's liveness probe."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from sqlq.config.durations import milliseconds, readable
from sqlq.errors import ConfigurationError


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--max-age", default="30s", show_default=True, metavar="DURATION", help="Maximum age of the file."
)
def health(file: Path, max_age: str) -> None:
    """Exit with 0 if a worker with this health file is alive.

    The file is the one that its --health-file names; exits with 1 if the worker is not alive.

    It makes no query: a worker that waits for its database is alive, and killing it would help nobody.
    """
    allowed_ms = milliseconds(max_age, "--max-age")
    try:
        age_ms = max(0.0, time.time() - file.stat().st_mtime) * 1000
    except OSError as error:
        remedy = f"start the worker with sqlq work --health-file {shlex.quote(str(file))}"
        raise ConfigurationError(f"{file}: {error.strerror}; {remedy}") from None
    if age_ms > allowed_ms:
        raise ConfigurationError(
            f"the worker has last given a sign of life {readable(age_ms)} ago, allowed are "
            f"{readable(allowed_ms)}"
        )
    click.echo(f"alive: last sign {readable(age_ms)} ago")
