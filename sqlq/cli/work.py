"""`sqlq work`: a supervisor and its children, stopped by signals."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from sqlq.cli.context import Context
from sqlq.cli.output import counted

if TYPE_CHECKING:
    from sqlq.app import App
    from sqlq.worker.isolates import Isolates
    from sqlq.worker.options import WorkerOptions
    from sqlq.worker.supervisor import Supervisor

log = logging.getLogger("sqlq.worker")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command()
@click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="Serve this queue; repeat it for more, served in this order. Without it all are served, in rotation.",
)
@click.option("-c", "--concurrency", type=int, default=10, show_default=True, metavar="N", help="Run at most so many jobs at a time.")
@click.option("--lease", default="30s", show_default=True, metavar="DURATION", help="After a crash, others take a job over after so long.")
@click.option(
    "--grace",
    default="25s",
    show_default=True,
    metavar="DURATION",
    help="When stopped, let running jobs go on for so long; then give them back.",
)
@click.option("-p", "--processes", type=int, default=1, show_default=True, metavar="N", help="Run so many worker processes.")
@click.option("--drain", is_flag=True, help="Exit when nothing is available any more.")
@click.option("--max-jobs", type=int, metavar="N", help="Replace a worker process after about so many jobs.")
@click.option("--max-lifetime", metavar="DURATION", help="Replace a worker process after about so long.")
@click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Touch this file each second while all is well; sqlq health looks at it.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
@click.option("--ties", hidden=True)
@click.option("--isolate", type=int, hidden=True)
@click.pass_obj
def work(
    context: Context,
    /,
    queues: tuple[str, ...],
    processes: int,
    health_file: Path | None,
    log_format: Literal["text", "json"],
    log_level: str,
    ties: str | None,
    isolate: int | None,
    **options: Any,
) -> None:
    """Run jobs until stopped.

    A supervisor starts the worker processes, watches them, and replaces one that dies: its jobs go back at once. The first Ctrl-C
    (or SIGTERM) stops claiming, lets running jobs finish within the grace time, gives the rest back and exits; the second exits
    now, and other workers take over when the leases have run out. Logs go to stderr.
    """
    from sqlq.cli import logs

    options["queues"] = list(queues) or None
    if isolate is not None:
        logs.set_up(log_format, log_level)
        _isolate(context, isolate)
    elif ties is not None:
        logs.set_up(log_format, log_level)
        _child(context, ties, processes, options)
    else:
        checked = _checked(processes, options)
        context.require_app("work runs the tasks of an App")
        logs.set_up(log_format, log_level)
        _supervise(checked, processes, health_file)


def _checked(processes: int, options: dict[str, Any]) -> WorkerOptions:
    from sqlq.errors import ConfigurationError
    from sqlq.worker.options import WorkerOptions

    if not 1 <= processes <= 1_000:
        raise ConfigurationError(f"--processes is {processes}: it must be a whole number from 1 to 1,000")
    return WorkerOptions.of(**options, retention_ms=None)


# -- the supervisor --------------------------------------------------------------------------------------------------------


def _supervise(options: WorkerOptions, processes: int, health_file: Path | None) -> NoReturn:
    from sqlq.worker.supervisor import Supervisor, SupervisorOptions

    supervisor = Supervisor(
        [sys.executable, "-m", "sqlq", *sys.argv[1:]],
        SupervisorOptions(processes, options.lease_ms, options.grace_ms, health_file),
    )
    _stop_on_signals(supervisor)
    code = supervisor.run()
    if code == 0:
        ended = ", ".join(f"{number:,} {name}" for name, number in supervisor.tally.items() if number) or "no jobs"
        log.info("stopped: %s", ended, extra={"event": "stopped"})
    _exit(code)


def _stop_on_signals(supervisor: Supervisor) -> None:
    """Stop at the first signal, leave at the second, whatever the supervisor is doing.

    A handler in Python runs in the middle of whatever the main thread does, and would wait for ever for a lock that this
    thread holds. So the handlers do nothing, and a thread of its own reads the signals' numbers from a pipe.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)

    def listen() -> None:
        stopping = False
        while received := os.read(reading, 1):
            if received[0] not in SIGNALS:
                continue
            if stopping:
                log.warning("stopped at once; what ran is taken over when its lease has run out", extra={"event": "stopped"})
                supervisor.kill()
                _exit(128 + received[0])
            stopping = True
            log.info("stopping: what runs may finish; once more stops at once", extra={"event": "stopping"})
            supervisor.stop()

    threading.Thread(target=listen, name="sqlq-signals", daemon=True).start()


# -- its children, and theirs ----------------------------------------------------------------------------------------------


def _child(context: Context, ties: str, processes: int, options: dict[str, Any]) -> NoReturn:
    from sqlq.worker.blackbox import BlackBox
    from sqlq.worker.child import Supervised
    from sqlq.worker.link import Link, ignore_signals

    ignore_signals()
    link_fd, box_fd, generation, warm = (int(part) for part in ties.split(","))
    supervised = Supervised(Link.inherited(link_fd), BlackBox(box_fd))
    os.close(box_fd)
    isolates = _isolates(warm)
    app = context.app_with_tasks("work runs the tasks of an App")
    if generation == 0:
        supervised.announce = lambda: _announce(context, app, processes, options)
    worker = app.worker(**options, ties=supervised, isolates=isolates)
    _collect_less()
    try:
        worker.run(patient=generation > 0)
    finally:
        supervised.ended(vars(worker.tally))
    if worker.left_running:
        # handlers that cannot be stopped go on in threads; their jobs are given back, and the usual exit would let them run on
        _exit(0)
    app.close()
    sys.exit(0)


def _collect_less() -> None:
    """Let the garbage collector pass over what was imported, and look less often: a worker holds thousands of jobs at a time,
    none of them in a cycle, and looked at all of them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _announce(context: Context, app: App, processes: int, options: dict[str, Any]) -> None:
    queues: list[str] | None = options["queues"]
    named = f"queue{'s' if len(queues) > 1 else ''} {', '.join(queues)}" if queues else "all queues"
    slots = counted(options["concurrency"], "slot") + (f" in each of {processes} processes" if processes > 1 else "")
    log.info(
        "working on %s: %s, %s, %s; Ctrl-C stops",
        *(context.place(), named, slots, counted(len(app.tasks), "task")),
        extra={"event": "started"},
    )


def _isolates(warm: int) -> Isolates:
    from sqlq.worker.isolates import Isolates
    from sqlq.worker.link import spawn

    command = sys.argv[1:]
    at = command.index("--ties")
    command = [sys.executable, "-m", "sqlq", *command[:at], *command[at + 2 :]]
    return Isolates(lambda fd: spawn([*command, "--isolate", str(fd)], (fd,)), warm)


def _isolate(context: Context, fd: int) -> NoReturn:
    from sqlq.worker.isolates import serve
    from sqlq.worker.link import Link, ignore_signals

    ignore_signals()
    link = Link.inherited(fd)
    serve(link, context.app_with_tasks("work runs the tasks of an App").tasks)


def _exit(code: int) -> NoReturn:
    """Leave without waiting for anything but what was written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
