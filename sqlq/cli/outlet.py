"""Lines to stderr, without ever waiting for its reader.

A terminal that was stopped, or a pipe whose reader sleeps, takes nothing for a while. The lines then wait in
memory up to a limit. Lines beyond the limit are counted and dropped. A thread writes the waiting lines when
stderr takes something again. No thread that logs waits, so no job does.
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
from functools import partial
from typing import TextIO

MOST_WAITING = 1_048_576
"""Characters that may wait."""
AT_ONCE = 4096 if not hasattr(select, "PIPE_BUF") else select.PIPE_BUF
"""A pipe takes so many bytes as a whole, so that lines of several processes do not mix."""
LAST_SECONDS = 1.0
"""A process that ends waits so long for a reader that takes nothing."""
LONGEST_SECONDS = 5.0
"""The same for one that reads slowly."""
LOOK_SECONDS = 60.0
GATHER_SECONDS = 0.01


class Outlet:
    """A stream for many threads. `put` takes lines, and `flush` writes those that go now."""

    def __init__(self, stream: TextIO | None, note: Callable[[int], str]) -> None:
        """`note` returns the line about so many dropped lines."""
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._fd = _descriptor(stream)
        self._write_now = _writer(self, stream, self._fd, self._encoding)
        self._note = note
        self._start_anew()
        _outlets.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a destructor may log in here
        self._lines: list[str] = []
        self._unwritten = bytearray()
        self._size = 0
        """Characters of the lines, and bytes, that are not written yet."""
        self._waiting = 0
        """The lines among them, and those that the notes among them count."""
        self._dropped = 0
        self._is_full = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Take a line, with its end, to be written with the next `flush`."""
        with self._lock:
            if self._is_full or self._size + len(line) > MOST_WAITING:  # guard: lines-are-bounded
                self._is_full = True
                self._dropped += 1
                return
            self._put_note()
            self._put(line, 1)

    def flush(self) -> None:
        """Write what can be written without waiting. The thread writes the rest."""
        with self._lock:
            if self._thread is None and not self._write():
                self._begin_thread()

    def draw(self, text: str) -> None:
        """Write a text that is of use only now, unless something waits."""
        with self._lock:
            if not self._size:
                self._put(text, 0)
                self._write()

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Write all lines, while the reader takes something at least each so many seconds."""
        last = time.monotonic() + LONGEST_SECONDS
        while True:
            with self._lock:
                if self._write():
                    return
            left = min(seconds, last - time.monotonic())
            if left <= 0 or not _takes(self._fd, left):  # guard: an-end-waits-for-no-reader
                return
            time.sleep(GATHER_SECONDS)

    # -- under the lock --------------------------------------------------------------------------------------

    def _put(self, text: str, lines: int) -> None:
        self._lines.append(text)
        self._size += len(text)
        self._waiting += lines

    def _put_note(self) -> None:
        if self._dropped:
            self._put(self._note(self._dropped), self._dropped)
            self._dropped = 0

    def _write(self) -> bool:
        """Write what the stream takes now. Return whether nothing is left."""
        try:
            while self._lines or self._unwritten:
                lines, self._lines = self._lines, []
                self._unwritten += "".join(lines).encode(self._encoding, "backslashreplace")
                del self._unwritten[: self._write_now(self._next())]
                self._size = len(self._unwritten)
                if self._is_full and self._size < MOST_WAITING // 2:
                    self._is_full = False
                    self._put_note()
        except BlockingIOError:
            return False
        except (
            OSError,
            ValueError,
        ):  # the reader is gone, the disk full, the stream closed: no reason to stop
            self._unwritten.clear()
            self._dropped += self._waiting
        self._size = self._waiting = 0
        self._is_full = False
        return True

    def _next(self) -> bytes:
        """Return whole lines for one write, or a part of a line that is too long for that."""
        end = len(self._unwritten)
        if end > AT_ONCE:
            end = self._unwritten.rfind(b"\n", 0, AT_ONCE) + 1 or AT_ONCE
        return bytes(self._unwritten[:end])

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="sqlq-stderr", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started now; the next line tries again
            return
        self._thread = thread

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if _takes(self._fd, LOOK_SECONDS):
                time.sleep(GATHER_SECONDS)  # a reader that has just begun makes room for more
            with self._lock:
                if self._write():
                    self._thread = None
                    return


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


def _writer(
    outlet: Outlet, stream: TextIO | None, fd: int | None, encoding: str
) -> Callable[[bytes], int | None]:
    """Return the function that writes the beginning of some bytes, and how many it wrote, to the stream. It
    raises BlockingIOError where it would have to wait."""
    if stream is None:
        return len
    if fd is None:
        return partial(_write_text, stream, encoding)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return partial(os.write, fd)
    if stat.S_ISSOCK(mode):
        return partial(_send, fd)
    own = _opened_anew(fd)
    if own is None:
        return partial(_write_if_it_takes, fd)
    weakref.finalize(outlet, os.close, own).atexit = False
    return partial(os.write, own)


def _opened_anew(fd: int) -> int | None:
    """Return a descriptor of the same pipe or terminal whose writes do not wait, None where there is none.

    The flag for that belongs to all processes that have inherited a descriptor, a shell for example. So the
    same pipe is opened anew."""
    try:
        own = os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.get_blocking(own) or not os.path.sameopenfile(fd, own):  # some systems only copy the descriptor
        os.close(own)
        return None
    return own


def _write_text(stream: TextIO, encoding: str, data: bytes) -> int:
    stream.write(data.decode(encoding, "replace"))
    stream.flush()
    return len(data)


def _send(fd: int, data: bytes) -> int:
    """Write to a socket, such as systemd's."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        return copy.send(data, socket.MSG_DONTWAIT)


def _write_if_it_takes(fd: int, data: bytes) -> int:
    """Write where the pipe has room. Another process may fill it in between, so the write may wait."""
    if not _takes(fd, 0):
        raise BlockingIOError
    return os.write(fd, data)


def _takes(fd: int | None, seconds: float) -> bool:
    """Wait until the stream takes something, at most so long. Return whether it does."""
    if fd is None:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


_outlets: weakref.WeakSet[Outlet] = weakref.WeakSet()


def _after_fork() -> None:
    for outlet in _outlets:
        outlet._start_anew()  # noqa: SLF001 - the parent has the thread, the lock and the lines that wait


os.register_at_fork(after_in_child=_after_fork)
