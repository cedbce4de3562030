"""Lines to stderr, written by one thread, so that no job waits for a reader.

A thread that logs waits until its line is written, but not long. A terminal that was stopped, or a pipe whose
reader sleeps, takes nothing for a while. The lines then wait in memory up to a limit. Lines beyond the limit
are counted and dropped.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, TextIO

MOST_WAITING = 1_048_576
"""Characters that may wait."""
AT_ONCE = 4096 if not hasattr(select, "PIPE_BUF") else select.PIPE_BUF
"""A pipe takes so many bytes as a whole, so that lines of several processes do not mix."""
FLUSH_SECONDS = 0.1
"""A thread that logs waits so long until its line is written; not at all while the reader is slow."""
LAST_SECONDS = 1.0
"""A process that ends waits so long for a reader that takes nothing."""
LONGEST_SECONDS = 5.0
"""The same for one that reads slowly."""


class _Text(NamedTuple):
    text: str
    lines: int
    """The lines that are lost with it."""


class Outlet:
    """A stream for many threads. `put` takes lines, and `flush` has them written."""

    def __init__(self, stream: TextIO | None, note: Callable[[int], str]) -> None:
        """`note` returns the line about so many dropped lines."""
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._note = note
        self._start_anew()
        _outlets.add(self)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()  # its lock is re-entrant: a destructor may log in here
        self._texts: list[_Text] = []
        self._size = 0
        """Characters that are not written yet."""
        self._written = 0
        """Characters that left the queue."""
        self._dropped = 0
        self._is_full = False
        self._is_slow = False
        """Whether a flush has waited in vain since all was written."""
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Take a line, with its end, to be written with the next `flush`."""
        with self._changed:
            if self._is_full or self._size + len(line) > MOST_WAITING:  # guard: lines-are-bounded
                self._is_full = True
                self._dropped += 1
                return
            self._put_note()
            self._put(_Text(line, 1))

    def flush(self) -> None:
        """Have all lines written. Wait until they are, if the reader is not slow."""
        with self._changed:
            if not self._size or not self._wake() or self._is_slow:
                return
            self._is_slow = not self._changed.wait_for(lambda: not self._size, FLUSH_SECONDS)

    def draw(self, text: str) -> None:
        """Write a text that is of use only now, unless something waits."""
        with self._changed:
            if not self._size:
                self._put(_Text(text, 0))
                self.flush()

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Wait until all lines are written, while the reader takes something at least each so many
        seconds."""
        last = time.monotonic() + LONGEST_SECONDS
        with self._changed:
            is_awake = self._wake()
            while is_awake and self._size:
                before, left = self._written, min(seconds, last - time.monotonic())
                took = left > 0 and self._changed.wait_for(lambda: self._written > before, left)  # noqa: B023
                if not took:  # guard: an-end-waits-for-no-reader
                    return

    def _put(self, text: _Text) -> None:
        self._texts.append(text)
        self._size += len(text.text)

    def _put_note(self) -> None:
        if self._dropped:
            self._put(_Text(self._note(self._dropped), self._dropped))
            self._dropped = 0

    def _wake(self) -> bool:
        """Have the thread write. Return whether there is one to wait for."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sqlq-stderr", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now; the next line tries again
                return False
            self._thread = thread
        self._changed.notify_all()
        return threading.current_thread() is not self._thread

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                texts, self._texts = self._texts, []
            for part in _parts(texts, self._encoding):
                lost = 0
                try:
                    self._write(part.data)
                except OSError:  # the reader is gone, or the disk is full: lines are no reason to stop
                    lost = part.lines
                with self._changed:
                    self._dropped += lost
                    self._size -= part.size
                    self._written += part.size
                    if self._is_full and self._size < MOST_WAITING // 2:
                        self._is_full = False
                        self._put_note()
                    self._is_slow = self._is_slow and self._size > 0
                    self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            fd = self._stream.fileno()
        except (OSError, ValueError):
            self._stream.write(data.decode(self._encoding, "replace"))
            self._stream.flush()
            return
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another process has made the shared descriptor non-blocking
                select.select([], [fd], [])


class _Part(NamedTuple):
    """Some texts, as one write takes them."""

    data: bytes
    size: int
    lines: int


def _parts(texts: list[_Text], encoding: str) -> Iterator[_Part]:
    """Yield the texts as parts, each of which a pipe takes as a whole, unless one text is longer."""
    begin, size = 0, 0
    for end, (text, _) in enumerate(texts):
        length = len(text) if text.isascii() else len(text.encode(encoding, "backslashreplace"))
        if size + length > AT_ONCE and begin < end:
            yield _part(texts[begin:end], encoding)
            begin, size = end, 0
        size += length
    yield _part(texts[begin:], encoding)


def _part(texts: list[_Text], encoding: str) -> _Part:
    text = "".join(each.text for each in texts)
    return _Part(text.encode(encoding, "backslashreplace"), len(text), sum(each.lines for each in texts))


_outlets: weakref.WeakSet[Outlet] = weakref.WeakSet()


def _after_fork() -> None:
    for outlet in _outlets:
        outlet._start_anew()  # noqa: SLF001 - the parent has the thread, the lock and the lines that wait


os.register_at_fork(after_in_child=_after_fork)
