"""Lines to stderr, without ever waiting for whoever reads them.

A terminal that was stopped, or a pipe whose reader has gone to sleep, takes nothing for a while. The lines
then wait in memory, up to a limit, past which they are counted and dropped; a thread writes them when stderr
takes something again. No thread that writes a line waits, so that no job does.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TextIO

MOST_WAITING = 1_048_576
"""Characters that may wait."""
AT_ONCE = 4096 if not hasattr(select, "PIPE_BUF") else select.PIPE_BUF
"""So many bytes go into a pipe as a whole or not at all, so that lines of several processes do not mix."""
LAST_SECONDS = 1.0
"""How long a process that ends waits for a reader that takes nothing."""
LONGEST_SECONDS = 5.0
"""The same for one that reads slowly."""
LOOK_SECONDS = 60.0
GATHER_SECONDS = 0.01


class Outlet:
    """A stream, written to by any thread. `put` takes lines, and `flush` writes what goes now."""

    def __init__(self, stream: TextIO | None, note: Callable[[int], str]) -> None:
        """`note` returns the line that says how many lines were dropped."""
        self._target = _target(stream)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._note = note
        self._start_anew()
        _outlets.add(self)

    def _start_anew(self) -> None:
        # entered again by a destructor that logs while this thread is in here
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._unwritten = bytearray()
        self._size = 0
        self._waiting = 0
        """Lines that are not written yet, but for the notes among them."""
        self._dropped = 0
        self._noted = 0
        """What the notes among these speak of."""
        self._full = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Take a line, with its end, to be written with the next `flush`."""
        with self._lock:
            if self._full or self._size + len(line) > MOST_WAITING:  # guard: lines-are-bounded
                self._full = True
                self._dropped += 1
                return
            if self._dropped:
                self._say_dropped()
            self._lines.append(line)
            self._size += len(line)
            self._waiting += 1

    def flush(self) -> None:
        """Write what can be written without waiting; the rest follows when there is room."""
        with self._lock:
            if self._thread is None and not self._write():
                self._follow_up()

    def draw(self, text: str) -> None:
        """Write what is of use only now, unless something waits."""
        with self._lock:
            if not (self._lines or self._unwritten):
                self._lines.append(text)
                self._write()

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Write what there is, while the reader takes something at least each so many seconds."""
        last = time.monotonic() + LONGEST_SECONDS
        while True:
            with self._lock:
                if self._write():
                    return
            left = min(seconds, last - time.monotonic())
            if left <= 0 or not self._target.wait(left):  # guard: an-end-waits-for-no-reader
                return
            time.sleep(GATHER_SECONDS)

    # -- under the lock --------------------------------------------------------------------------------------

    def _say_dropped(self) -> None:
        note = self._note(self._dropped)
        self._lines.append(note)
        self._size += len(note)
        self._noted += self._dropped
        self._dropped = 0

    def _write(self) -> bool:
        """Write what goes; say whether that is all."""
        try:
            while self._lines or self._unwritten:
                if self._lines:
                    lines, self._lines = self._lines, []
                    self._unwritten += "".join(lines).encode(self._encoding, "backslashreplace")
                written = self._target.write(self._next())
                if written is None:
                    return False
                del self._unwritten[:written]
                self._size = len(self._unwritten)
                if self._full and self._size < MOST_WAITING // 2:
                    self._full = False
                    self._say_dropped()
        except OSError:  # the reader is gone, or the disk is full: lines are no reason to stop
            self._unwritten.clear()
            self._dropped += self._waiting + self._noted
        self._size = self._waiting = self._noted = 0
        self._full = False
        return True

    def _next(self) -> bytes:
        """Return the lines to be written by one call."""
        most = self._target.at_once
        if len(self._unwritten) <= most:
            return bytes(self._unwritten)
        end = self._unwritten.rfind(b"\n", 0, most) + 1
        return bytes(self._unwritten[: end or most])

    def _follow_up(self) -> None:
        thread = threading.Thread(target=self._run, name="sqlq-stderr", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had now; the next line tries again
            return
        self._thread = thread

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if self._target.wait(LOOK_SECONDS):
                time.sleep(GATHER_SECONDS)  # a reader that has just begun makes room for more
            with self._lock:
                if self._write():
                    self._thread = None
                    return


class _Nowhere:
    """A stream that there is not, or that was closed."""

    at_once = MOST_WAITING

    def write(self, data: bytes) -> int | None:
        """Write the beginning of `data`, or nothing and return None where that would wait."""
        return len(data)

    def wait(self, seconds: float) -> bool:
        """Wait until something can be written, at most so long; say whether that is so."""
        return True


class _Stream(_Nowhere):
    """A stream without a descriptor, such as a test's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int | None:
        self._stream.write(data.decode(getattr(self._stream, "encoding", None) or "utf-8", "replace"))
        self._stream.flush()
        return len(data)


class _File(_Nowhere):
    """A file on a disk, which takes all."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int | None:
        return os.write(self._fd, data)


class _Pipe(_Nowhere):
    """A pipe or terminal, by a descriptor of our own that does not wait.

    Whether writing waits is not the descriptor's own matter, but of all processes that have inherited it, a
    shell among them; so the same pipe is opened anew.
    """

    at_once = AT_ONCE

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int | None:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return None

    def wait(self, seconds: float) -> bool:
        poll = select.poll()  # each is of one thread
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))


class _Inherited(_Pipe):
    """A pipe or terminal that cannot be opened anew: it is asked before, which leaves a gap in which another
    process may fill it."""

    def write(self, data: bytes) -> int | None:
        return os.write(self._fd, data) if self.wait(0) else None


class _Socket(_Pipe):
    """A socket, such as systemd's."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._socket = socket.socket(fileno=os.dup(fd))
        weakref.finalize(self, self._socket.close).atexit = False

    def write(self, data: bytes) -> int | None:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None


def _target(stream: TextIO | None) -> _Nowhere:
    if stream is None:
        return _Nowhere()
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError):
        return _Stream(stream)
    if stat.S_ISREG(mode):
        return _File(fd)
    if stat.S_ISSOCK(mode):
        return _Socket(fd)
    own = _opened_anew(fd)
    if own is None:
        return _Inherited(fd)
    pipe = _Pipe(own)
    weakref.finalize(pipe, os.close, own).atexit = False
    return pipe


def _opened_anew(fd: int) -> int | None:
    """Return a descriptor of the same pipe or terminal that does not wait; None where there is none to be
    had."""
    try:
        own = os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    # some systems only make a copy, which waits as the first one does
    if os.get_blocking(own) or not os.path.sameopenfile(fd, own):
        os.close(own)
        return None
    return own


_outlets: weakref.WeakSet[Outlet] = weakref.WeakSet()


def _after_fork() -> None:
    for outlet in _outlets:
        outlet._start_anew()  # noqa: SLF001 - what waits is the parent's to write, and so is its lock


os.register_at_fork(after_in_child=_after_fork)
