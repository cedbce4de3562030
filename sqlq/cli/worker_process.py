"""The worker processes of `sqlq work`, and their subprocesses. The first message over the pipe of each has
its options."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from typing import NoReturn

from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.cli import root
from sqlq.cli.context import Context
from sqlq.cli.problems import explain
from sqlq.cli.processes import bear_broken_streams, entitle, leave, leave_in_time
from sqlq.cli.terminal import logs
from sqlq.cli.terminal.output import naming_options
from sqlq.config.durations import counted
from sqlq.errors import SqlqError
from sqlq.worker.attempt.attempt import Target
from sqlq.worker.ipc import forkserver
from sqlq.worker.ipc.parent import Parent, SharedMemory
from sqlq.worker.ipc.pipe import Message, Pipe, ignore_signals, keep_standard_numbers, spawn
from sqlq.worker.options import WorkerOptions
from sqlq.worker.run.isolated import IsolatedProcesses, serve
from sqlq.worker.threads.log import log


def run(context: Context, fd: int) -> NoReturn:
    """Work, or run single jobs for a worker, until the other end of the pipe is closed."""
    ignore_signals()
    bear_broken_streams()
    link = Pipe.inherited(fd)
    setup = link.receive()
    if setup is None:
        sys.exit(1)
    context.app_option, context.database_url = setup["app"], setup["database_url"]
    if setup["log"]["form"] == "json":
        context.json_log = setup["log"]
    is_worker = "box" in setup
    entitle(setup["options"]["name"], "worker" if is_worker else "isolate")
    if is_worker:
        _work(context, link, setup)
    forkserver.show("sqlq-isolate")
    app = _app(context)
    logs.set_up(**setup["log"])
    target = Target(
        # opened when a handler wants results of its flow: it costs each process 50 ms
        lambda: app.database,
        app._connected.address.encryption,
        tasks=app.tasks,
        plan=app._plan_of,
    )
    serve(link, target, app._lifespan)


def _work(context: Context, link: Pipe, setup: Message) -> NoReturn:
    supervised = Parent(
        link,
        SharedMemory(setup["box"]),
        began_at=setup["began_at"],
        is_alone=setup["options"]["processes"] == 1,
        is_metered=setup["is_metered"],
    )
    os.close(setup["box"])
    try:
        _run_worker(context, link, setup, supervised)
    except Exception as error:
        # the supervisor ignores it of a worker that has begun to work
        supervised.failed_to_start(explain(error, context) or f"{type(error).__name__}: {error}")
        raise


def _run_worker(context: Context, link: Pipe, setup: Message, supervised: Parent) -> NoReturn:
    app = _app(context)
    logs.set_up(**setup["log"])
    if setup["options"]["isolate"] or any(task.isolate for task in app.tasks.values()):
        forkserver.start(partial(root.run, context), context.program, private=[link.fileno()])
    isolates = IsolatedProcesses(
        lambda fd: spawn([*context.program, "work", "--child", str(fd)], (fd,)),
        setup={name: setup[name] for name in ("app", "database_url", "log", "options")},
    )
    options = WorkerOptions(**setup["options"])
    is_first = setup["generation"] == 0
    if is_first:
        supervised.announce = lambda: _announce(context, app, options)
    worker = app._worker(options, supervised, isolates)
    if setup["paused"]:
        worker.pause()  # guard: a-replacement-is-paused-too
    # A worker holds thousands of jobs, none of them in a cycle. The garbage collector would visit them and
    # the imported modules again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    code = 1
    try:
        with naming_options():
            worker.run(patient=options.wait_ms / 1000 if is_first else True)
        code = 0
    finally:
        supervised.ended(vars(worker.counts))
        leave_in_time(code)  # guard: threads-keep-no-process
    if worker.left_running:
        # what cannot be stopped goes on in threads; jobs are released, and the usual exit would let
        # handlers run on
        leave(0)
    app.close()
    sys.exit(0)


def _app(context: Context) -> App:
    app = context.app_with_tasks("work runs the tasks of an App")
    keep_standard_numbers()
    app._direct_calls = "allow"  # as in any process of a worker
    return app


def _announce(context: Context, app: App, options: WorkerOptions) -> None:
    """Report what this worker works on. Warn of queues that no task, job or other worker names: a typing
    error waits for ever."""
    queues = options.queues or ()
    named = f"queues {', '.join(queues)}" if queues else "all queues"
    slots = counted(options.concurrency, "slot")
    if options.processes > 1:
        slots += f" in each of {options.processes} processes"
    called = "" if options.name is None else f"{options.name}: "
    log.info(
        "%sworking on %s: %s, %s, %s; Ctrl-C stops",
        called,
        context.shown_url(),
        named,
        slots,
        counted(len(app.tasks), "task"),
        event="started",
    )
    try:
        unknown = app.queues._unknown(queues, but_for_twins=True)
    except (SQLAlchemyError, SqlqError):  # the worker meets the same error, and reports it
        return
    for name in unknown:
        log.warning("no task of this App, no job and no other worker names the queue %s", name)
