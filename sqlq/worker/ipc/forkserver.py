"""Processes that only fork: one of `sqlq work` for its worker processes, and one of each of these for its
subprocesses.

    sqlq work ──asks──► fork server (sqlq is imported) ──forks──► worker process
    worker process ──asks──► fork server (the App is imported) ──forks──► subprocess

Forked processes share the memory of what is imported, and begin without importing it again. A server is
forked from its owner while that has one thread, no connection and no open database file. So nothing is shared
that must not be. It ends with its owner. Without it, as where it was killed, processes start anew."""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

log = logging.getLogger("sqlq.worker")

GROUP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
"""Signals for the supervisor that a terminal, systemd or a person may send to all processes of a group."""
ANSWER_SECONDS = 3.0
"""How long the server may take to fork, or to send an exit code. A process then starts without it."""


class Forked:
    """A process that the fork server has forked, with what sqlq uses of `subprocess.Popen`."""

    _pidfd = -1

    def __init__(self, server: socket.socket, command: Sequence[str], fds: Sequence[int]) -> None:
        """Start a command with these descriptors under their numbers. Raises `OSError` where the server is
        gone, or stands still."""
        self.args = list(command)
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers.settimeout(ANSWER_SECONDS)
        self._ending = threading.Lock()
        try:
            with theirs:
                rights = array.array("i", [theirs.fileno(), *fds])
                request = json.dumps([self.args, list(fds)]).encode()
                server.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            if not (pid := self._answers.recv(16)):
                raise ConnectionError("the fork server is gone")
        except OSError:
            self._answers.close()
            raise
        self.pid = int(pid)
        try:
            # it shows the end even where the server is gone; guard: forked-process-outlives-its-server
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended already
            pass
        except OSError:  # as without a free descriptor: another process will have these pipes
            os.kill(self.pid, signal.SIGKILL)
            raise

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._answers.close()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, as `Popen.wait` does. Without the server it is that of a killed process."""
        if self._pidfd >= 0:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(None if timeout is None else max(0.0, timeout) * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._ending:  # several threads may wait
            if self.returncode is None:
                code = b""
                with suppress(OSError):
                    code = self._answers.recv(16)
                self.returncode = int(code or -signal.SIGKILL)
                self._answers.close()
            return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self._pidfd >= 0 and self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


current: socket.socket | None = None
"""The way to the server of this process, and of those that it has forked as long as they have no other."""


def start(
    run: Callable[[], None],
    program: Sequence[str],
    *,
    imported: Sequence[str] = (),
    private: Collection[int] = (),
) -> None:
    """Start a server for the commands of a program; `run` is its command line. The server imports these
    modules first, and does not have the `private` descriptors. None starts where forking may not be safe."""
    global current  # noqa: PLW0603 - a process has one server, and hands it on as it forks
    try:
        os.close(os.pidfd_open(os.getpid()))  # an old kernel, or a sandbox, may refuse it
        if shared := _must_not_be_shared(private):
            log.debug("no fork server: processes would share %s", shared)
            return
        door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ends, alive = os.pipe()
    except (AttributeError, OSError) as error:  # as on another system than Linux
        log.debug("no fork server: %s", error)
        return
    door.settimeout(ANSWER_SECONDS)  # its queue may be full
    current = door
    gc.disable()  # an import makes thousands of objects, and few of them are garbage
    for name in imported:
        importlib.import_module(name)
    gc.freeze()  # a collection would write to the pages that are shared
    gc.enable()
    if os.fork():
        inside.close()
        os.close(ends)
        return
    try:
        os.close(alive)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd in private:  # guard: a-fork-server-holds-no-pipe
            os.dup2(nothing, fd)  # the number stays taken: objects that know it may close it
        _serve(inside, ends, run, len(program))
    finally:
        os._exit(0)


def _must_not_be_shared(own: Collection[int]) -> str | None:
    """Name what an import of the App has opened and two processes must not share: a thread's locks, a
    connection, a database file. Datagrams, as of the system's log, may be shared."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:  # threads of libraries, too
        return "the locks of another thread"  # guard: forks-share-no-thread
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd <= 2 or fd in own:
            continue
        with suppress(OSError):  # that of the directory itself is closed by now
            file = os.fstat(fd)
            is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if is_writable and stat.S_ISREG(file.st_mode) and file.st_nlink:  # a memory file has no name
                return f"the file {entry.readlink()}, which is open for reading and writing"
            if stat.S_ISSOCK(file.st_mode):
                with socket.socket(fileno=os.dup(fd)) as end:
                    if end.type == socket.SOCK_STREAM:  # guard: forks-share-no-connection
                        return "a connection"
    return None


def _serve(inside: socket.socket, ends: int, run: Callable[[], None], program_length: int) -> None:
    """Fork for each request, and send its owner the id and the exit code of the process. Return when nobody
    holds the other end of `ends` any more."""
    show("sqlq-forks")
    # what is forked begins with these blocked, as what is spawned does
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    children: dict[int, tuple[int, socket.socket]] = {}
    """The ids and owners of processes, by their pidfds."""
    ready = select.poll()
    for fd in (inside.fileno(), ends):
        ready.register(fd, select.POLLIN)
    while True:
        events = {fd for fd, _ in ready.poll()}
        if ends in events:
            return
        for ended in events & children.keys():
            ready.unregister(ended)
            os.close(ended)
            pid, owner = children.pop(ended)
            with owner:
                _send(owner, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if inside.fileno() in events:
            request, (of_owner, *fds), *_ = socket.recv_fds(inside, 200_000, maxfds=8)
            owner = socket.socket(fileno=of_owner)
            try:
                # an owner that waited for too long has started another process
                pid = -1 if _is_gone(owner) else os.fork()
            except OSError:  # the machine has no process to spare
                pid = -1
            if pid == 0:
                if _is_gone(owner):  # meanwhile: two processes would have one pipe
                    os._exit(1)
                for end in (inside, owner, *(owner for _, owner in children.values())):
                    end.close()
                for fd in (ends, *children):
                    os.close(fd)
                command, numbers = json.loads(request)
                _renumber(fds, numbers)
                _become(command[program_length:], run)
            for fd in fds:
                os.close(fd)
            end_of = _end_of(pid) if pid > 0 else None
            if end_of is None:
                owner.close()  # so it starts a process of its own, or learns that there is none
                continue
            children[end_of] = pid, owner
            ready.register(end_of, select.POLLIN)
            _send(owner, pid)


def _end_of(pid: int) -> int | None:
    """Return a descriptor that shows the end of a new process. Where none is free, the process is killed."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None


def _is_gone(owner: socket.socket) -> bool:
    try:
        return owner.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _send(owner: socket.socket, number: int) -> None:
    with suppress(OSError):  # the owner is gone
        owner.send(b"%d" % number)


def show(name: str) -> None:
    """Have this name in `ps` and `top`, which would else show that of the first process.

    It has no blank: behind one, Python takes the nice value for the number of threads, and warns of forks.
    """
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _renumber(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Move descriptors to these numbers, and leave nothing on the standard input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers, default=0) + 1) for fd in (nothing, *fds)]
    for fd in (nothing, *fds):
        os.close(fd)
    for fd, number in zip(above, (0, *numbers), strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(arguments: Sequence[str], run: Callable[[], None]) -> NoReturn:
    """Be the process of a command, which ends as one of the interpreter's own would."""
    code: Any = 1
    try:
        show("sqlq-worker")
        sys.argv = [*(sys.argv[:1] or ["sqlq"]), *arguments]  # the App may have emptied it
        run()
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as Python does at its end
        atexit._run_exitfuncs()  # noqa: SLF001
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
