"""The processes of `sqlq work`: their command lines, their standard streams, and how they end."""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sqlq.config.command_hint import escaped

log = logging.getLogger("sqlq.worker")


def entitle(name: str | None, role: str) -> None:
    """Show the role of this process in ps and top, as in "sqlq: mail-1 worker", if setproctitle is
    installed."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(escaped(f"sqlq: {role}" if name is None else f"sqlq: {name} {role}"))


def conceal(text: str) -> None:
    """Overwrite a text in the command line of this process, which all users of the machine may read. The
    processes that it forks have the same command line."""
    secret = os.fsencode(text)
    with suppress(OSError):  # another system than Linux, or one that forbids it
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
        begin, position = int(fields[45]), Path("/proc/self/cmdline").read_bytes().find(secret)
        if position >= 0:
            with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
                memory.seek(begin + position)
                memory.write(b"*" * len(secret))


# -- standard streams, for whose reader no job waits ---------------------------------------------------------

WAIT_SECONDS = 1.0
AT_ONCE = select.PIPE_BUF
"""A pipe takes up to this number of bytes as a whole, so that lines of several processes do not mix."""


class StandardStream:
    """Writes to a descriptor. A reader that takes nothing for a second is waited for no more until it takes
    something again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)
        self._is_stuck = False
        self.error: OSError = TimeoutError("its reader takes nothing")
        """The reason why not all was written."""

    def write(self, data: bytes) -> int:
        """Return how many bytes were written. It raises nothing."""
        begin = 0
        try:
            while begin < len(data) and self._is_ready():
                end = len(data)
                if end - begin > AT_ONCE:  # whole lines, or a part of one that is too long
                    end = data.rfind(b"\n", begin, begin + AT_ONCE) + 1 or begin + AT_ONCE
                with suppress(BlockingIOError):  # another process was faster
                    begin += os.write(self._fd, data[begin:end])
        except OSError as error:  # the reader is gone, or the disk full; guard: prints-fail-no-job
            self.error = error
        return begin

    def _is_ready(self) -> bool:
        seconds = 0 if self._is_stuck else WAIT_SECONDS  # guard: jobs-wait-once-for-a-reader
        self._is_stuck = not self._room.poll(seconds * 1000)
        return not self._is_stuck


def nonblocking(fd: int) -> int:
    """Return a descriptor of the same file, to which a write does not block where that is possible.

    The flag belongs to all processes that have inherited a descriptor, a shell for example. So a pipe or a
    terminal is opened anew."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    try:
        return os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket, or another user's
        return fd


class _Prints(io.FileIO):
    """A standard stream for what handlers print. It drops what cannot be written: a full disk, or a reader
    that has gone, is no fault of the job."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._stream = StandardStream(fd)
        self._has_dropped = False

    def write(self, data: Any) -> int:
        if self._stream.write(bytes(data)) < len(data) and not self._has_dropped:
            self._has_dropped = True
            log.warning("what is printed is dropped, since it cannot be written: %s", self._stream.error)
        return len(data)


def bear_broken_streams() -> None:
    """Let no print of a handler in this process fail from now on."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            new: Any = io.TextIOWrapper(
                io.BufferedWriter(_Prints(old.fileno())),
                old.encoding,
                "backslashreplace",
                line_buffering=True,
            )
            new.close = new.flush  # it is other jobs', too
            setattr(sys, name, new)


# -- ends, whatever threads go on ----------------------------------------------------------------------------

THREADS_SECONDS = 5.0
"""How long a worker process waits at its end for threads that handlers have started."""
EXIT_SECONDS = 5.0
"""The same for functions that are called at its exit."""


def leave(code: int) -> NoReturn:
    """Leave without waiting for anything but what was written, and for that not long."""
    # a handler may have filled a pipe that nobody reads
    flushing = threading.Thread(target=_flush, daemon=True)
    try:
        flushing.start()
        flushing.join(1.0)
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
            # tracers and the like send then what they have gathered
            atexit._run_exitfuncs()  # noqa: SLF001 - Python itself calls them only when all threads have ended
            leave(code)

    last = threading.Timer(THREADS_SECONDS + EXIT_SECONDS, leave, (code,))  # guard: exits-have-an-end
    last.daemon = True
    with suppress(RuntimeError):  # where there is no thread to be had
        last.start()
        threading.Thread(target=run, name="sqlq-leave", daemon=True).start()


def _flush() -> None:
    for written in (*logging.getLogger().handlers, sys.stdout, sys.stderr):
        with suppress(Exception):  # a handler may have closed or replaced it
            written.flush()
