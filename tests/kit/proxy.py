"""A TCP proxy that plays a bad network between a worker and its server: it swallows bytes, breaks
connections, loses replies.

It receives the bytes that it swallows, so both kernels think that all is well: no TCP timeout finds this.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

from sqlalchemy import make_url

WRITES = (b"INSERT INTO ", b"UPDATE ", b"DELETE FROM ")
PREPARES = re.compile(rb"(_pg3_\d+)\0([^\0]+)\0")
RUNS_PREPARED = re.compile(rb"\0(_pg3_\d+)\0")
READY = b"Z\0\0\0\5I"
QUERY = b"\0\3"
"""How a packet of MariaDB's begins that has a statement, after its length."""
LINGER_ZERO = struct.pack("ii", 1, 0)
"""Makes `close` a reset, as a firewall does that has forgotten a connection."""


class Pipe:
    """One connection through the proxy, with a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self.asked = b""
        """The last bytes that the client sent."""
        self.answered = b""
        """The last bytes that the server sent, passed on or not."""
        self.listens = False
        self.made = False
        """Whether the server has let the client in."""
        self._swallow_reply = False
        self._in_transaction = False
        self._prepared: dict[bytes, bytes] = {}
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=self._pump, args=(client, server, self._to_server), daemon=True),
            threading.Thread(target=self._pump, args=(server, client, self._to_client), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, passes: Callable[[bytes], bool]) -> None:
        try:
            while data := source.recv(65536):
                if passes(data):
                    sink.sendall(data)
        except OSError:
            pass
        self.reset()

    def _to_server(self, data: bytes) -> bool:
        self.asked = (self.asked + data)[-65536:]
        self.made = self.made or data[3:5] == QUERY
        self.listens = self.listens or b'LISTEN "' in data
        if b"BEGIN" in data:
            self._in_transaction = True
        commits = b"COMMIT\0" in data or data.endswith(QUERY + b"COMMIT")  # not READ COMMITTED
        if commits or (not self._in_transaction and self._writes(data)):
            loss = self._proxy.loses(self)
            self.asked = b""
            if loss == "commit":
                self.reset()
            self._swallow_reply = loss == "reply"
        if commits or b"ROLLBACK" in data:
            self._in_transaction = False
        return not self._proxy.swallows(self, "to server")

    def _writes(self, data: bytes) -> bool:
        prepares = dict(PREPARES.findall(data))
        self._prepared |= prepares
        if not prepares and (runs := RUNS_PREPARED.search(data)):
            data = self._prepared[runs[1]]
            self.asked += data
        return not prepares and any(word in data for word in WRITES)

    def _to_client(self, data: bytes) -> bool:
        self.answered = (self.answered + data)[-65536:]
        self.made = self.made or READY in self.answered
        if self._swallow_reply:  # the request is done by now, and the client does not know it
            self.reset()
        return not self._proxy.swallows(self, "to client")

    def reset(self) -> None:
        """Break the connection on both sides."""
        for end in (self._client, self._server):
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
            except OSError:
                pass
            end.close()
        self._proxy.forget(self)

    def join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)


def every(link: Pipe) -> bool:
    return True


def made(link: Pipe) -> bool:
    """Whether a connection is open, and not on its way: to lose that one is a server that does not answer."""
    return link.made


class Proxy:
    """Passes connections on to a port of 127.0.0.1, until a test calls one of its methods.

    `only` chooses the concerned connections when their bytes come by.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._lock, self._entrance = threading.Lock(), threading.Lock()
        self._links: set[Pipe] = set()
        self._deaf: set[str] = set()
        self._only: Callable[[Pipe], bool] = every
        self._losses: list[str] = []
        self._lost_of: Callable[[Pipe], bool] = every
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def url(self, url: str) -> str:
        """Return the URL of the same database through this proxy."""
        return make_url(url).set(host="127.0.0.1", port=self.port).render_as_string(hide_password=False)

    def links(self, only: Callable[[Pipe], bool] = every) -> list[Pipe]:
        with self._lock:
            return [link for link in self._links if only(link)]

    # -- faults ----------------------------------------------------------------------------------------------

    def deaf(self, *directions: str, only: Callable[[Pipe], bool] = every) -> None:
        """Swallow what goes "to server", "to client", or both, on connections there are and those that
        come."""
        self._only = only
        self._deaf = set(directions or ("to server", "to client"))

    def hear(self) -> None:
        """Pass bytes on again; what was swallowed stays lost."""
        self._deaf = set()

    def drop(self, only: Callable[[Pipe], bool] = every) -> int:
        """Reset connections and return how many; the other sides have received the reset then."""
        with self._entrance:  # nobody comes back while others still have a connection
            links = self.links(only)
            for link in links:
                link.reset()
            for link in links:  # a socket that a thread still reads from is not closed yet
                link.join()
        return len(links)

    def lose(self, *what: str, only: Callable[[Pipe], bool] = every) -> None:
        """At each of the next commits reset the connection: before the server has it ("commit"), or has
        answered ("reply"). A write outside a transaction is its own commit."""
        with self._lock:
            self._losses, self._lost_of = list(what), only

    @property
    def losses(self) -> int:
        """How many of them are still to come."""
        return len(self._losses)

    # -- what links ask --------------------------------------------------------------------------------------

    def swallows(self, link: Pipe, direction: str) -> bool:
        return direction in self._deaf and self._only(link)

    def loses(self, link: Pipe) -> str | None:
        with self._lock:
            return self._losses.pop(0) if self._losses and self._lost_of(link) else None

    def forget(self, link: Pipe) -> None:
        with self._lock:
            self._links.discard(link)

    # -- life ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with self._entrance:
                try:
                    server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                    server.settimeout(None)
                except OSError:  # nobody there: neither are we
                    client.close()
                    continue
                with self._lock:
                    self._links.add(Pipe(self, client, server))

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)
        links = self.links()
        self.drop()
        for link in links:
            link.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
