"""`sqlq work`: a supervisor and its children, stopped by signals."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from sqlq.cli.commands.metrics import HOST, require_client
from sqlq.cli.context import Context
from sqlq.cli.options import file_option, flag, options, port_option, worker_option
from sqlq.cli.processes import entitle, leave
from sqlq.cli.terminal import logs
from sqlq.cli.terminal.output import naming_options, on_terminal
from sqlq.cli.terminal.progress import Progress, outcomes
from sqlq.errors import ConfigurationError
from sqlq.worker.ipc import forkserver
from sqlq.worker.ipc.pipe import keep_standard_numbers, serve_signals
from sqlq.worker.options import OPTIONS, WORK, WorkerOptions
from sqlq.worker.supervise.supervisor import Supervisor, touch
from sqlq.worker.threads.log import log

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop gracefully; the second one stops at once."""
PAUSING = (signal.SIGUSR2, signal.SIGTSTP)
"""The signals that pause. Ctrl-Z as well: a worker that it stopped would lose its leases, and its jobs would
run twice."""
GIVE_BACK_SECONDS = 2.0
"""How long the supervisor may take, after the second signal, to release the jobs of killed processes."""
REPEAT_SECONDS = 1.0
"""A signal that follows another so soon is the same request: `timeout`, for one, signals its child and the
group."""


@click.command()
@click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="Serve these queues in this order: -q high,low, or -q high -q low. Weights make the order random: "
    "-q high=3 -q low=1. Without it all are served, in rotation.",
)
@options(*map(worker_option, OPTIONS))
@file_option(
    "--health-file",
    help="Touch this file every second while the worker is healthy; sqlq health checks it.",
)
@port_option(
    "--metrics-port",
    help="Serve Prometheus metrics of all worker processes at http://…:PORT/metrics.",
)
@click.option("--metrics-host", default=HOST, show_default=True, help="Address for --metrics-port.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@flag(
    "--lines",
    help="With --drain on a terminal: log a line for each job instead of showing one line of progress.",
)
@click.option("--child", type=int, hidden=True)
@click.pass_obj
def work(
    context: Context,
    /,
    queues: tuple[str, ...],
    health_file: Path | None,
    metrics_port: int | None,
    metrics_host: str,
    log_format: Literal["text", "json"],
    log_level: str,
    lines: bool,
    child: int | None,
    **arguments: Any,
) -> None:
    """Run jobs until stopped.

    A supervisor starts the worker processes, watches them, and replaces one that dies: its jobs go back at
    once. The first Ctrl-C (or SIGTERM) stops claiming, lets running jobs finish within the grace time,
    releases the rest and exits. The second exits now, and other workers take over when the leases have run
    out. SIGUSR2 (or Ctrl-Z) pauses, SIGCONT resumes. Logs go to stderr.
    """
    keep_standard_numbers()
    if log_format == "json":
        context.json_log = {"form": log_format, "level": log_level}
    if child is not None:
        from sqlq.cli import worker_process

        worker_process.run(context, child)
    with naming_options():
        checked = WorkerOptions.of(_named_queues(queues), WORK, **arguments)
    drawn = checked.drain and not lines and log_format == "text" and log_level != "debug" and on_terminal()
    context.require_app("work runs the tasks of an App")
    _start_fork_server(context)
    log_options: dict[str, Any] = {"form": log_format, "level": log_level, "drawn": drawn}
    logs.set_up(**log_options)
    if "***" in (context.options(needs_app=False) or [""])[-1]:
        log.warning("-d has a password, which ps shows while sqlq starts: set SQLQ_DATABASE_URL instead")
    setup = {
        "app": context.app_option,
        "database_url": context.database_url,
        "log": log_options,
        # the supervisor decides when to end for lack of jobs: it knows of all processes
        "options": asdict(replace(checked, max_idle_ms=None)),
        "is_metered": metrics_port is not None,
    }
    _refuse_unwritable(health_file)
    entitle(checked.name, "supervisor")
    supervisor = Supervisor([*context.program, "work", "--child"], checked, setup, health_file)
    if metrics_port is not None:
        require_client("--metrics-port")
        from sqlq.metrics.collectors import WorkCollector, serve

        log.info("metrics at %s", serve(WorkCollector(supervisor), metrics_port, metrics_host))
    showing = Progress(supervisor, checked.queues, drawn=drawn) if checked.drain else nullcontext()
    _supervise(supervisor, showing)


def _named_queues(values: tuple[str, ...]) -> Any:
    """Return the queues named in an order, or with their weights if one has a weight; those without have
    1."""
    names = [name.strip() for value in values for name in value.split(",")]
    if not any("=" in name for name in names):
        return names or None
    parts = [(name if "=" in name else f"{name}=1").rpartition("=") for name in names]
    return {name: int(weight) if weight.isdecimal() else weight for name, _, weight in parts}


# -- the supervisor ------------------------------------------------------------------------------------------


def _supervise(supervisor: Supervisor, showing: AbstractContextManager[None]) -> NoReturn:
    codes = _stop_on_signals(supervisor)
    with showing:
        code = supervisor.run()
    code = codes[0] if codes else code
    if code == 0:
        log.info("stopped: %s", outcomes(supervisor), event="stopped")
    leave(code)


def _start_fork_server(context: Context) -> None:
    """Have worker processes forked, but those of another program, as of manage.py: its code would be there
    already."""
    if tuple(context.program) == Context.program:
        imported = ["sqlq.app.app", "sqlq.cli.worker_process", "sqlq.worker.worker"]
        if find_spec("psycopg"):
            imported += ["psycopg", "sqlq.database.postgresql.dialect"]
        forkserver.start(_as_module, context.program, imported=imported)


def _as_module() -> None:
    from sqlq.cli import main

    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd())  # as with `python -m`
    main()


def _refuse_unwritable(health_file: Path | None) -> None:
    try:
        if health_file is not None:
            touch(health_file)
    except OSError as error:
        raise ConfigurationError(
            f"--health-file {health_file}: {error.strerror}; name a file in a directory that the worker may "
            "write to"
        ) from None


def _stop_on_signals(supervisor: Supervisor) -> list[int]:
    """Stop at the first signal, leave at the second, whatever the supervisor is doing. The exit code of the
    second is in the list that is returned."""
    codes: list[int] = []
    stopping_since = inf

    def act(number: int) -> None:
        nonlocal stopping_since
        now = time.monotonic()
        # guard: repeated-signal-is-one-stop
        is_repeated = number in STOPPING and now >= stopping_since + REPEAT_SECONDS
        if number in PAUSING:
            supervisor.pause()
        elif number == signal.SIGCONT:
            supervisor.pause(paused=False)
        elif number == signal.SIGQUIT or is_repeated:
            log.warning("stopping at once: running jobs are released", event="stopping")
            codes.append(128 + number)
            supervisor.stop()  # it starts no other processes
            supervisor.kill()
            time.sleep(GIVE_BACK_SECONDS)  # the supervisor leaves earlier, unless its database is away
            log.warning(
                "stopped at once; what ran is taken over when its lease has run out",
                event="stopped",
            )
            leave(codes[0])
        elif number in STOPPING and stopping_since == inf:
            stopping_since = now
            log.info("stopping: what runs may finish; once more stops at once", event="stopping")
            supervisor.stop()

    numbers = [*STOPPING, *PAUSING, signal.SIGCONT, signal.SIGQUIT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it
        numbers.remove(signal.SIGHUP)
    serve_signals(numbers, act)
    return codes
