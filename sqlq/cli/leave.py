"""How the processes of `sqlq work` end, whatever threads go on in them."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

log = logging.getLogger("sqlq.worker")
FLUSH_SECONDS = 1.0
THREADS_SECONDS = 5.0
"""How long a worker process waits at its end for threads that handlers have started."""
EXIT_SECONDS = 5.0
"""The same for functions that are called at its exit."""


def leave(code: int) -> NoReturn:
    """Leave without waiting for anything but what was written, and for that not long."""
    from sqlq.cli import logs

    logs.finish()
    # a handler may have filled a pipe that nobody reads
    flushing = threading.Thread(target=_flush, daemon=True)
    try:
        flushing.start()
        flushing.join(FLUSH_SECONDS)
    finally:  # where there is no thread to be had
        os._exit(code)


def leave_in_time(code: int) -> None:
    """Have this process end soon, whatever threads go on. At its exit Python waits for some threads without
    end, such as that of an `asyncio.to_thread` whose coroutine met its timeout."""
    waited = threading.Event()
    atexit.register(waited.set)  # what is registered last is called first, when all threads have ended

    def run() -> None:
        if not waited.wait(THREADS_SECONDS):
            log.warning("a thread that a handler has started does not end: it is left behind")
            atexit._run_exitfuncs()  # noqa: SLF001 - tracers and the like send then what they have gathered
            leave(code)

    last = threading.Timer(THREADS_SECONDS + EXIT_SECONDS, leave, (code,))  # guard: exits-have-an-end
    last.daemon = True
    with suppress(RuntimeError):  # where there is no thread to be had
        last.start()
        threading.Thread(target=run, name="sqlq-leave", daemon=True).start()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a handler may have closed or replaced it
            stream.flush()
