"""A doorbell tells the workers of a machine of new jobs, where the database sends no notifications.

It is a socket with one of a few names in Linux's abstract namespace, so it ends with its process and leaves
no file. Any process of the machine may ring, and a ring is only a hint: without one, or without a free name,
a poller looks at its interval. Processes in containers of their own do not hear each other."""

from __future__ import annotations

import hashlib
import socket
import sys
import time
from contextlib import suppress

from sqlalchemy import URL

NAMES = 8
"""How many pollers of a machine, and of databases of one name, have a doorbell."""
MAX_RINGS = 1000
STORM_SECONDS, REST_SECONDS = 0.001, 0.005
"""If a ring comes this soon after the last read, the reader rests, so that more of them gather."""


class Doorbell:
    """The doorbell of one poller."""

    _read_at = float("-inf")

    def __init__(self, url: URL | None) -> None:
        """Without a URL nobody rings."""
        self._socket = _socket()
        for name in [] if url is None else _names(url):
            with suppress(OSError):  # another poller has it
                self._socket.bind(name)
                break

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> bool:
        """Return whether anybody rang since the last call. Where all ring at once, it rests briefly."""
        rings = 0
        with suppress(OSError):  # there are no more
            while rings < MAX_RINGS:
                self._socket.recv(1)
                rings += 1
        if rings:
            if time.monotonic() - self._read_at < STORM_SECONDS:
                time.sleep(REST_SECONDS)
            self._read_at = time.monotonic()
        return rings > 0


def ring(url: URL) -> None:
    """Ring all doorbells of a database on this machine. Never raises, and never waits."""
    with suppress(OSError), _socket() as sender:
        for name in _names(url):
            with suppress(OSError):  # nobody there, or rung already
                sender.sendto(b"\0", name)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX if sys.platform == "linux" else socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(0)
    return made


def _names(url: URL) -> list[bytes]:
    if sys.platform != "linux":
        return []
    # by the database's name alone: processes may name one server differently
    key = hashlib.sha256(str(url.database).encode()).hexdigest()[:16]
    return [f"\0sqlq-{key}-{number}".encode() for number in range(NAMES)]
