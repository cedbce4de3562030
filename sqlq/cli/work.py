"""`sqlq work`: a supervisor and its children, stopped by signals."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from sqlq.cli.context import Context
from sqlq.cli.leave import leave, leave_in_time
from sqlq.cli.metrics import show, totals_for, work_options
from sqlq.cli.options import wait_option
from sqlq.cli.output import naming_options, on_terminal
from sqlq.cli.title import entitle
from sqlq.config.durations import counted, milliseconds
from sqlq.errors import ConfigurationError, SqlqError

if TYPE_CHECKING:
    from subprocess import Popen

    from sqlq.app.app import App
    from sqlq.worker.ipc.forkserver import Forked
    from sqlq.worker.ipc.parent import Parent
    from sqlq.worker.options import WorkerOptions
    from sqlq.worker.run.isolated import IsolatedProcesses
    from sqlq.worker.supervise.fleet import Fleet
    from sqlq.worker.supervise.supervisor import SupervisorOptions

log = logging.getLogger("sqlq.worker")
LARGEST_WEIGHT = 1_000
SHORTEST_PATIENCE_MS = 5_000
START_TIMEOUT = "Touch the health file no more when a worker process does not begin to work for so long."
STUCK_AFTER = """Kill a worker process that gives no sign of life for so long; after 30s where it runs
nothing, or a job that is past its timeout."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop gracefully; the second one stops at once."""
AT_ONCE = (signal.SIGQUIT,)
PAUSING = (signal.SIGUSR2, signal.SIGTSTP)
"""The signals that pause. Ctrl-Z as well: a worker that it stopped would lose its leases, and its jobs would
run twice."""
RESUMING = (signal.SIGCONT,)
IGNORED = (signal.SIGUSR1,)
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
    help="Serve these queues, in this order: -q high,low, or -q high -q low; with weights in turns: "
    "-q high=3 -q low=1. Without it all are served, in rotation.",
)
@click.option(
    "-c",
    "--concurrency",
    type=int,
    default=10,
    show_default=True,
    metavar="N",
    help="Run at most so many jobs at a time in each worker process.",
)
@click.option(
    "--lease",
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="After a crash, others take a job over after so long.",
)
@click.option(
    "--grace",
    default="25s",
    show_default=True,
    metavar="DURATION",
    help="When stopped, let running jobs go on for so long; then give them back.",
)
@click.option(
    "-p",
    "--processes",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Run so many worker processes.",
)
@click.option("--drain", is_flag=True, help="Exit when nothing is available any more.")
@click.option("--max-jobs", type=int, metavar="N", help="Replace a worker process after about so many jobs.")
@click.option("--max-lifetime", metavar="DURATION", help="Replace a worker process after about so long.")
@click.option("--isolate", is_flag=True, help="Run each job in a process of its own, kept for the next one.")
@click.option("--isolate-jobs", type=int, metavar="N", help="End such a process after so many jobs.")
@click.option(
    "--max-rss", metavar="SIZE", help="Replace a worker process that uses more memory, as in 400MB."
)
@click.option("--max-idle", metavar="DURATION", help="Exit when nothing has come for so long.")
@click.option(
    "--poll", metavar="DURATION", help="Look for jobs so often when idle: 1.25s, of SQLite 50ms, without it."
)
@click.option(
    "--claim-batch", type=int, metavar="N", help="Claim at most so many jobs at a time; else 1,000."
)
@click.option(
    "--ahead", metavar="DURATION", help="Hold jobs that start within so long; 100ms without it, 0s for none."
)
@click.option(
    "--name", metavar="NAME", help="What this worker is called, in sqlq workers and by those who operate it."
)
@click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Touch this file each second while all is well; sqlq health looks at it.",
)
@wait_option
@click.option("--start-timeout", default="60s", show_default=True, metavar="DURATION", help=START_TIMEOUT)
@click.option("--stuck-after", default="10m", show_default=True, metavar="DURATION", help=STUCK_AFTER)
@click.option(
    "--spare",
    is_flag=True,
    help="Keep one more process ready, and one for a single job: what a dead process ran goes on at once.",
)
@click.option(
    "--reload", is_flag=True, help="For development: start the worker processes anew when code changes."
)
@click.option(
    "--reload-dir",
    "reload_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="With --reload: watch the code below this directory, instead of the current one, or that of your "
    "pyproject.toml.",
)
@work_options
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option(
    "--lines",
    is_flag=True,
    help="With --drain on a terminal: log a line for each job, instead of showing one line of progress.",
)
@click.option("--member", hidden=True)
@click.option("--supervision", hidden=True)
@click.option("--isolated-by", type=int, hidden=True)
@click.pass_obj
def work(
    context: Context,
    /,
    queues: tuple[str, ...],
    processes: int,
    health_file: Path | None,
    start_timeout: str,
    stuck_after: str,
    spare: bool,
    reload: bool,
    reload_dirs: tuple[Path, ...],
    metrics_port: int | None,
    metrics_host: str,
    log_format: Literal["text", "json"],
    log_level: str,
    lines: bool,
    wait: str,
    member: str | None,
    supervision: str | None,
    isolated_by: int | None,
    isolate_jobs: int | None,
    **options: Any,
) -> None:
    """Run jobs until stopped.

    A supervisor starts the worker processes, watches them, and replaces one that dies: its jobs go back at
    once. The first Ctrl-C (or SIGTERM) stops claiming, lets running jobs finish within the grace time,
    releases the rest and exits. The second exits now, and other workers take over when the leases have run
    out. SIGUSR2 (or Ctrl-Z) pauses, SIGCONT resumes. Logs go to stderr.
    """
    from sqlq.cli import logs

    _keep_numbers_of_closed()
    wait_ms = milliseconds(wait, "--wait")
    options["queues"] = _named_queues(queues)
    drawn = options["drain"] and not lines and log_format == "text" and log_level != "debug" and on_terminal()
    set_up_logs = partial(logs.set_up, log_format, log_level, drawn=drawn, app=member)
    if member is not None:
        context.app_option = f"{context.app_path}.{member}"
    if isolated_by is not None:
        _entitle(options, member)("isolate")
        _isolate(context, isolated_by, set_up_logs)
    elif supervision is not None:
        start_isolates = partial(_isolates, context, spare=spare, max_jobs=isolate_jobs)
        is_metered = metrics_port is not None
        _child(
            *(context, supervision, processes, start_isolates, options, set_up_logs),
            member=member,
            is_metered=is_metered,
            wait_ms=wait_ms,
        )
    else:
        from sqlq.worker.supervise.supervisor import SupervisorOptions

        if isolate_jobs is not None and isolate_jobs < 1:
            raise click.UsageError(f"--isolate-jobs is {isolate_jobs}: it must be at least 1")
        checked = _checked(processes, options)
        watched = _watched(context, reload, reload_dirs, {"--drain": options["drain"], "--spare": spare})
        from sqlq.worker.supervise.health_file import HealthFile

        supervising = SupervisorOptions(
            *(processes, checked.lease_ms, checked.grace_ms),
            *(None if health_file is None else HealthFile(health_file), spare),
            restarts=bool(watched),
            max_idle_ms=checked.max_idle_ms,
            start_ms=_patience("--start-timeout", start_timeout),
            stuck_ms=_patience("--stuck-after", stuck_after),
        )
        context.require_app("work runs the tasks of an App")
        _start_fork_server(context)
        set_up_logs()
        _refuse_unwritable(health_file)
        shown = (metrics_port, metrics_host)
        _supervise(context, checked, supervising, shown, drawn=drawn, watched=watched)


def _named_queues(given: tuple[str, ...]) -> list[str] | dict[str, int] | None:
    """Return the queues named in an order, or with their weights if one has a weight; those without have
    1."""
    names = [name.strip() for each in given for name in each.split(",")]
    parts = [name.rpartition("=") for name in names]
    if not any(equals for _, equals, _ in parts):
        return names or None
    weights: dict[str, int] = {}
    for name, equals, weight in parts:
        if equals and not (weight.isdecimal() and 1 <= int(weight) <= LARGEST_WEIGHT):
            raise click.UsageError(
                f"--queue has {name!r} with the weight {weight!r}: it is a whole number from 1 to "
                f"{LARGEST_WEIGHT:,}, as in -q high=3 -q low=1"
            )
        weights[name if equals else weight] = int(weight) if equals else 1
    return weights


def _keep_numbers_of_closed() -> None:
    """Open the null device as stdin, stdout or stderr where a shell has closed them. Otherwise the next file
    would get their number, and child processes would write into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # the lowest number that is free; guard: closed-stderr
            os.open(os.devnull, os.O_RDWR)


def _checked(processes: int, options: dict[str, Any]) -> WorkerOptions:
    from sqlq.worker.options import WorkerOptions

    if not 1 <= processes <= 1_000:
        raise click.UsageError(f"--processes is {processes}: it must be a whole number from 1 to 1,000")
    with naming_options(*options, "queue"):
        return WorkerOptions.of(**options, retention_ms=None)


def _patience(option: str, given: str) -> int:
    ms = milliseconds(given, option)
    if ms < SHORTEST_PATIENCE_MS:
        raise click.UsageError(f"{option} is {given}: it must be at least 5s, which a busy machine takes")
    return ms


def _watched(context: Context, reload: bool, given: tuple[Path, ...], unfit: dict[str, bool]) -> list[Path]:
    """Return the directories whose code --reload watches; none without it."""
    if not reload:
        if given:
            raise click.UsageError("--reload-dir says what --reload watches: give both")
        return []
    for option in (name for name, is_given in unfit.items() if is_given):
        raise click.UsageError(f"--reload is for workers that stay while code is written: leave out {option}")
    project = context.project  # its file is in this directory, or in one above
    return [path.absolute() for path in given] or [Path.cwd() if project is None else project.file.parent]


# -- the supervisor ------------------------------------------------------------------------------------------


def _supervise(
    context: Context,
    options: WorkerOptions,
    supervising: SupervisorOptions,
    metrics: tuple[int | None, str],
    *,
    drawn: bool,
    watched: list[Path],
) -> NoReturn:
    from sqlq.cli.progress import Progress, stopped
    from sqlq.worker.supervise.fleet import Fleet
    from sqlq.worker.supervise.supervisor import Supervisor

    entitle(options.name)("supervisor")
    totals = totals_for(metrics[0])
    command = [*context.program, *sys.argv[1:]]

    def supervisor_of(app: str | None) -> Supervisor:
        if app is None:
            return Supervisor(command, supervising, totals())
        # the health file, and the end for lack of jobs, are for all Apps together
        own = replace(supervising, health_file=None, max_idle_ms=None)
        return Supervisor([*command, "--member", app], own, totals(app))

    fleet = Fleet(
        supervisor_of,
        health_file=supervising.health_file,
        max_idle_ms=supervising.max_idle_ms,
        retries=not options.drain,
    )
    show(fleet, *metrics)
    if watched:
        from sqlq.cli import reload

        reload.start(watched, fleet.restart)
    _stop_on_signals(fleet)
    showing = Progress(fleet, options.queues, drawn=drawn) if options.drain else nullcontext()
    with showing:
        code = fleet.run()
    if code == 0:
        since = fleet.ready_since
        seconds = None if since is None else time.monotonic() - since
        log.info("stopped: %s", stopped(fleet.tally, seconds), extra={"event": "stopped"})
    leave(code)


def _start_fork_server(context: Context) -> None:
    """Have worker processes forked, but those of another program, as of manage.py."""
    from sqlq.cli import main
    from sqlq.worker.ipc import forkserver

    if tuple(context.program) == forkserver.PROGRAM:
        forkserver.start(main, [name for name in _DRIVERS if find_spec(name.partition(".")[0])])


_DRIVERS = ("psycopg",)
"""Drivers that the fork server imports, where they are installed."""


def _refuse_unwritable(health_file: Path | None) -> None:
    from sqlq.worker.supervise import health_file as health_files

    try:
        if health_file is not None:
            health_files.touch(health_file)
    except OSError as error:
        raise ConfigurationError(
            f"--health-file {health_file}: {error.strerror}; name a file in a directory that the worker may "
            "write to"
        ) from None


def _entitle(options: dict[str, Any], member: str | None) -> Callable[[str], None]:
    return entitle(" ".join(name for name in (options["name"], member) if name) or None)


def _stop_on_signals(fleet: Fleet) -> None:
    """Stop at the first signal, leave at the second, whatever the supervisor is doing.

    A signal handler in Python runs in the main thread, and would wait for ever for a lock that this thread
    holds. So the handlers do nothing, and another thread reads the signals' numbers from a pipe.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (*STOPPING, *AT_ONCE, *PAUSING, *RESUMING, *IGNORED):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: None)

    def listen() -> None:
        stopping_since = float("inf")
        while received := os.read(reading, 1):
            moment = time.monotonic()
            if received[0] in IGNORED:
                log.info("the signal %s is passed over", signal.Signals(received[0]).name)
            elif received[0] in PAUSING:
                fleet.pause()
            elif received[0] in RESUMING:
                fleet.resume()
            if received[0] not in (*STOPPING, *AT_ONCE):
                continue
            # guard: a-repeat-is-one-request
            if received[0] in AT_ONCE or moment >= stopping_since + REPEAT_SECONDS:
                log.warning(
                    "stopped at once; what ran is taken over when its lease has run out",
                    extra={"event": "stopped"},
                )
                fleet.kill()
                leave(128 + received[0])
            if stopping_since < moment:
                continue
            stopping_since = moment
            log.info("stopping: what runs may finish; once more stops at once", extra={"event": "stopping"})
            fleet.stop()

    threading.Thread(target=listen, name="sqlq-signals", daemon=True).start()


# -- its children, and theirs --------------------------------------------------------------------------------


def _child(
    context: Context,
    supervision: str,
    processes: int,
    start_isolates: Callable[[int], IsolatedProcesses],
    options: dict[str, Any],
    set_up_logs: Callable[[], None],
    *,
    member: str | None,
    is_metered: bool,
    wait_ms: int,
) -> NoReturn:
    from sqlq.worker.ipc.parent import Parent
    from sqlq.worker.ipc.pipe import Pipe, ignore_signals
    from sqlq.worker.ipc.shared_memory import SharedMemory

    ignore_signals()
    link_fd, box_fd, generation, warm, stands_by, began_ms, paused = map(int, supervision.split(","))
    supervised = Parent(
        Pipe.inherited(link_fd),
        SharedMemory(box_fd),
        began_at=began_ms / 1000,
        is_alone=processes == 1,
        is_metered=is_metered,
    )
    os.close(box_fd)
    show = _entitle(options, member)
    show("worker starting")
    supervised.show = lambda state: show(f"worker {state}")
    if (apps := context.apps(needs_code=True)) is not None:
        supervised.serves(list(apps))
        sys.exit(0)
    isolates = start_isolates(warm)
    app = _app(context)
    set_up_logs()
    if generation == 0:
        supervised.announce = lambda: _announce(context, app, processes, options)
    # the supervisor decides when to end for lack of jobs: it knows of all processes
    worker = app.worker(**{**options, "max_idle": None}, supervision=supervised, isolates=isolates)
    if paused:
        worker.pause()  # guard: a-replacement-is-paused-too
    _collect_less()
    if stands_by and not _stand_by(app, supervised):
        isolates.close()
        sys.exit(0)
    code = 1
    try:
        with naming_options("max_rss"):
            worker.run(patient=generation > 0 or wait_ms / 1000)
        code = 0
    finally:
        supervised.ended(vars(worker.tally))
        leave_in_time(code)  # guard: threads-keep-no-process
    if worker.left_running:
        # what cannot be stopped goes on in threads; jobs are released, and the usual exit would let
        # handlers run on
        leave(0)
    app.close()
    sys.exit(0)


def _app(context: Context) -> App:
    app = context.app_with_tasks("work runs the tasks of an App")
    app._code.direct_calls = "allow"  # as in any process of a worker
    return app


def _stand_by(app: App, supervised: Parent) -> bool:
    """Connect, and wait to be sent to work; return False when this process should end instead."""
    from sqlalchemy.exc import DBAPIError

    try:
        app.database.for_loops.require_tables()
    except (DBAPIError, SqlqError) as error:
        log.debug("the spare process could not connect yet: %s", error)
    return supervised.stand_by()


def _collect_less() -> None:
    """Let the garbage collector skip imported modules, and run less often. A worker holds thousands of jobs,
    none of them in a cycle, and the collector would visit all of them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _announce(context: Context, app: App, processes: int, options: dict[str, Any]) -> None:
    queues: list[str] | dict[str, int] | None = options["queues"]
    shown = [f"{n}={w}" for n, w in queues.items()] if isinstance(queues, dict) else queues
    named = f"queue{'s' if len(shown) > 1 else ''} {', '.join(shown)}" if shown else "all queues"
    slots = counted(options["concurrency"], "slot") + (
        f" in each of {processes} processes" if processes > 1 else ""
    )
    called = "" if options["name"] is None else f"{options['name']}: "
    log.info(
        "%sworking on %s: %s, %s, %s; Ctrl-C stops",
        *(called, context.shown_url(), named, slots, counted(len(app.tasks), "task")),
        extra={"event": "started"},
    )
    _warn_of_unknown_queues(app, list(queues or []))


def _warn_of_unknown_queues(app: App, queues: list[str]) -> None:
    """Warn of queues that no task, job or other worker names: a typing error waits for ever."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        unknown = app.queues.unknown(queues, but_for_twins=True)
    except (SQLAlchemyError, SqlqError) as error:  # the worker meets the same error, and reports it
        log.debug("the names of queues could not be looked up: %s", error)
        return
    for name in unknown:
        log.warning("no task of this App, no job and no other worker names the queue %s", name)


def _isolates(context: Context, warm: int, *, spare: bool, max_jobs: int | None) -> IsolatedProcesses:
    from sqlq.worker.ipc.pipe import spawn
    from sqlq.worker.run.isolated import IsolatedProcesses

    command = sys.argv[1:]
    at = command.index("--supervision")
    command = [*context.program, *command[:at], *command[at + 2 :]]

    def start(fd: int) -> Popen[bytes] | Forked:
        return spawn([*command, "--isolated-by", str(fd)], (fd,))

    return IsolatedProcesses(start, warm, spare=spare, max_jobs=max_jobs)


def _isolate(context: Context, fd: int, set_up_logs: Callable[[], None]) -> NoReturn:
    from sqlq.worker.attempt.attempt import Target
    from sqlq.worker.ipc.pipe import Pipe, ignore_signals
    from sqlq.worker.run.isolated import serve

    ignore_signals()
    link = Pipe.inherited(fd)
    app = _app(context)
    set_up_logs()
    address = app._connected.address
    target = Target(
        # opened when a handler wants results of its flow: it costs each process 50 ms
        lambda: app.database,
        address.seal,
        tasks=app.tasks,
        plan=app._code.additions.to_flow,
    )
    serve(link, target, app._code.lifespan)
