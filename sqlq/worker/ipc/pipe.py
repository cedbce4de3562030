"""Messages between the processes of one worker: JSON lines over a socket pair. Its end means that the other
process is gone.

supervisor ◄──► child (a worker) ◄──► subprocess (one job at a time)
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from queue import SimpleQueue
from typing import Any, TypeAlias
from weakref import WeakSet

from sqlq.events import JobEvent
from sqlq.model.job import ClaimedJob, Progress
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Finished, Released, Retried, SelfCompleted
from sqlq.worker.ipc import forkserver
from sqlq.worker.ipc.forkserver import GROUP_SIGNALS, Forked
from sqlq.worker.threads.log import log

Message = dict[str, Any]
# the App may replace json.dumps and json.loads
_encode, _decode = json.JSONEncoder().encode, json.JSONDecoder().decode

_SENT: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Cancelled, ClaimedJob, Finished, ErrorText, Failed, Progress, Released, Retried, SelfCompleted),
        JobEvent,
    )
}


class Pipe:
    """One end of a socket pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)  # the App may have called socket.setdefaulttimeout; guard: pipes-have-no-timeout
        self._socket = end
        self._lines = end.makefile("rb")
        self._lock = threading.Lock()
        self._unsent = bytearray()

    @classmethod
    def pair(cls) -> tuple[Pipe, socket.socket]:
        """Return one end as a Pipe, and the other to be handed to a new process and then closed."""
        keep_standard_numbers()
        here, there = socket.socketpair()
        return cls(here), there

    @classmethod
    def inherited(cls, fd: int) -> Pipe:
        """Return the end that this process was started with."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    def send(self, **message: Any) -> bool:
        """Send a message, waiting until the other side takes it. Return whether it is there to do so."""
        with self._lock:
            self._unsent += _line(message)  # guard: pipe-messages-do-not-interleave
            try:
                self._socket.sendall(self._unsent)
            except OSError:
                return False
            finally:
                self._unsent.clear()
            return True

    def offer(self, *, droppable: bool = False, **message: Any) -> bool:
        """Send a message without waiting, because the other side may be stopped. The rest of it follows with
        the next `offer` or `flush`. A droppable message is left out while earlier ones are not sent; then
        this returns False."""
        with self._lock:
            self._flush()
            if droppable and self._unsent:  # guard: droppable-offers
                return False
            self._unsent += _line(message)
            self._flush()
            return True

    def flush(self) -> None:
        """Send the rest of earlier offers."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self, *, strictly: bool = False) -> Message | None:
        """Wait for the next message, passing over lines that are none; None when the other side is gone. With
        `strictly`, raises `ValueError` for such a line: it may have been the last message."""
        while True:
            try:
                line = self._lines.readline()
            except (OSError, ValueError):
                return None
            if not line.endswith(b"\n"):  # it died in the middle of a word; guard: cut-message-is-ignored
                return None
            with suppress(ValueError, RecursionError):
                message = _decode(line.decode())
                if isinstance(message, dict):
                    return message
            if strictly:  # guard: unreadable-isolate-is-refused
                raise ValueError("a word that is no message")
            log.warning("a line of another process of this worker is no message: it is ignored")

    def listen(self, thread_name: str, handle: Callable[[Message | None], None], sender: str) -> None:
        """Have `handle` take each message of the `sender`, and None when it is gone, in a thread of its own.
        Raises `RuntimeError` where no thread can start."""

        def run() -> None:
            message: Message | None = {}
            while message is not None:
                message = self.receive()
                try:
                    handle(message)
                except Exception:  # guard: pipe-reader-survives-a-bad-message
                    log.exception("a message of %s could not be followed", sender)

        threading.Thread(target=run, name=thread_name, daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor of this end."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, which ends a `receive` in either process."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()


def spawn(command: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes] | Forked:
    """Start a process of the same worker, by the fork server if there is one. It inherits these descriptors
    and stops by a message in its pipe.

    A terminal, or systemd, sends its signals to all processes of a group. The new one starts with them
    blocked, until `ignore_signals` has dealt with them, so that none meets it half started.
    """
    if forkserver.current is not None:
        try:
            return Forked(forkserver.current, command, fds)
        except OSError as error:  # guard: without-a-fork-server-all-goes-on
            log.debug("a process starts anew: %s", error)
            if isinstance(error, TimeoutError):  # each process would wait for it anew
                forkserver.current = None  # guard: fork-server-is-waited-for-once
                log.warning("the fork server does not answer: from now on processes start without it")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # guard: signals-blocked-at-spawn
    try:
        return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Let the signals pass that are meant for the supervisor. Their handlers do nothing: programs that a job
    starts would inherit signals that are ignored outright."""
    for number in GROUP_SIGNALS:
        handle_here(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def serve_signals(numbers: Iterable[int], act: Callable[[int], None]) -> SimpleQueue[int]:
    """Call `act` with the number of each of these signals, in a thread, which a 0 in the queue that is
    returned ends. Raises `RuntimeError` where no thread can start.

    A signal handler in Python runs in the main thread, and would wait for ever for a lock that this thread
    holds. `put` of this queue takes none.
    """
    received: SimpleQueue[int] = SimpleQueue()

    def serve() -> None:
        while number := received.get():
            act(number)

    threading.Thread(target=serve, name="sqlq-signals", daemon=True).start()
    for number in numbers:
        # guard: forked-children-take-signals-here
        handle_here(number, lambda number, frame: received.put(number))
    return received


_replaced: dict[int, tuple[Any, Any]] = {}
"""The handlers of sqlq, and those before them, by the numbers of their signals."""
_forking = threading.local()


def handle_here(number: int, handler: Callable[[int, Any], None]) -> None:
    """Handle a signal in this process. A child that somebody forks takes it as before, since it has no thread
    that would serve the handler."""
    _replaced[number] = handler, signal.signal(number, handler)


def _before_fork() -> None:
    # Python drops a signal that a child gets before its handlers are there; a blocked one waits.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _replaced)  # guard: forks-lose-no-signal


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for number, (handler, before) in _replaced.items():
        if signal.getsignal(number) is handler:  # guard: forked-children-take-signals
            signal.signal(number, before or signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def keep_standard_numbers() -> None:
    """Open the null device as stdin, stdout or stderr where a shell, or a handler, has closed them. Otherwise
    the next file would get their number, and child processes would write into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # the lowest number that is free; guard: closed-descriptors-are-replaced
            os.open(os.devnull, os.O_RDWR)


def _line(message: Message) -> bytes:
    return _encode(message).encode() + b"\n"


def packed(value: Any) -> Any:
    """Return a claimed job, an outcome or an event as JSON."""
    if isinstance(value, datetime):
        return {"is": "datetime", "at": value.isoformat()}
    if isinstance(value, bytes):  # SQLite lets them in
        return str(value)  # guard: bytes-go-over-a-link-as-text
    if isinstance(value, ClaimedJob):
        names: Iterable[str] = value._fields
    elif dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
    else:
        return value
    return {"is": type(value).__name__, **{name: packed(getattr(value, name)) for name in names}}


def unpacked(value: Any) -> Any:
    """Return the value that `packed` got."""
    if not isinstance(value, dict):
        return value
    fields = {name: unpacked(field) for name, field in value.items()}
    kind = fields.pop("is")
    return datetime.fromisoformat(fields["at"]) if kind == "datetime" else _SENT[kind](**fields)


Spawn: TypeAlias = "Callable[[int], subprocess.Popen[bytes] | Forked]"
"""Starts a process, which inherits the descriptor of its end of a pipe."""


_SPAWNING = threading.Lock()
_OWN: WeakSet[Process] = WeakSet()


def bury_orphans() -> None:
    """As process 1 of a container, bury the orphans that handlers, or a dead fork server, have left. It
    leaves the status of a child of its own to its owner."""
    with _SPAWNING:  # else it might see a process that has no owner yet
        own = {known.process.pid for known in _OWN if not isinstance(known.process, Forked)}
        # there may be no child now: the last one has died, and its replacement is not there yet
        with suppress(ChildProcessError):  # guard: process-1-has-no-child
            while (
                status := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None and status.si_pid not in own:
                os.waitpid(status.si_pid, 0)


class Process:
    """A subprocess and the pipe to it."""

    def __init__(self, start: Spawn, setup: Message | None = None) -> None:
        """`setup` is the first message to it."""
        self.link, there = Pipe.pair()
        if setup is not None:
            self.link.offer(**setup)
        try:
            with there, _SPAWNING:
                self.process = start(there.fileno())
                _OWN.add(self)
        except BaseException:  # the process may have too many open files
            self.link.close()
            raise

    def close(self) -> None:
        """Close the pipe. Shared memory stays: threads with an older list of children may still read it."""
        self.link.close()  # guard: link-of-a-dead-child-is-closed
