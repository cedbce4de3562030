"""The doorbell of a machine: it wakes the idle workers there, where the database sends no notifications.

It is a socket with one of a few names in Linux's abstract namespace, so it ends with its process and leaves
no file. Any process of the machine may ring it. Nothing depends on a ring: without one, or without a free
name, a poller looks at its interval. Containers share no doorbells."""

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
REST_SECONDS = 0.002
"""The shortest time between two rings, so that a flood of them makes few claims."""


class Doorbell:
    """The doorbell of one poller."""

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
        """Return whether anybody rang since the last call. After a ring it rests, so that others gather."""
        rang = False
        with suppress(OSError):  # there are no more
            for _ in range(MAX_RINGS):
                self._socket.recv(1)
                rang = True
        if rang:
            time.sleep(REST_SECONDS)
        return rang


def ring(url: URL) -> None:
    """Ring all doorbells of a database on this machine. Never raises, and never waits."""
    with suppress(OSError), _socket() as sender:
        for name in _names(url):
            with suppress(OSError):  # nobody there, or rung already
                sender.sendto(b"\0", name)


def _socket() -> socket.socket:
    new = socket.socket(socket.AF_UNIX if sys.platform == "linux" else socket.AF_INET, socket.SOCK_DGRAM)
    new.settimeout(0)
    return new


def _names(url: URL) -> list[bytes]:
    if sys.platform != "linux":
        return []
    # by the database's name alone: processes may name one server differently
    key = hashlib.sha256(str(url.database).encode()).hexdigest()[:16]
    return [f"\0sqlq-{key}-{number}".encode() for number in range(NAMES)]
