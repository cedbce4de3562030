"""Galera on one machine: nodes of the tests' own MariaDB, each in a directory and on ports of its own.

Debian's package galera-4 has the library. It is looked for where distributions put it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pymysql

from tests.kit.mariadb import OwnMariaDB
from tests.kit.postgresql import free_port


def library() -> Path | None:
    """Return the path of Galera's library; None where it is not installed."""
    return next(iter(sorted(Path("/usr").glob("l*/**/libgalera_smm.so"))), None)


class Node(OwnMariaDB):
    """A server that takes part in a cluster."""

    def __init__(self, *others: Node) -> None:
        provider = library()
        assert provider is not None
        self.channel, transfer = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._others = list(others)
        for other in others:
            other._others.append(self)
        options = f"gmcast.listen_addr=tcp://{self.channel};ist.recv_addr={transfer};gcache.size=128M"
        super().__init__(
            "--wsrep-on=ON",
            f"--wsrep-provider={provider}",
            f"--wsrep-provider-options={options}",
            f"--wsrep-node-address={self.channel}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-sst-receive-address=127.0.0.1:{free_port()}",
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
            account="nobody",  # as which a daemon of rsync's writes that root has started
        )

    def start(self, *settings: str) -> None:
        """Start the node where it stopped. The first one makes the cluster."""
        channels = ",".join(other.channel for other in self._others)
        address = f"--wsrep-cluster-address=gcomm://{channels}"
        super().start(address, *self._place(address), *settings)

    def _place(self, address: str) -> list[str]:
        """Return the option that names the last transaction that the node has, after its first start."""
        if not (self.directory / "data" / "grastate.dat").exists():
            return []
        recovery = subprocess.run(
            [*self._command, address, "--wsrep-recover"], capture_output=True, text=True, check=False
        )
        found = re.search(r"Recovered position: *(\S+)", recovery.stdout + recovery.stderr)
        assert found, recovery.stderr
        return [f"--wsrep-start-position={found[1]}"]

    def status(self, name: str) -> str:
        """Return a status variable of Galera's."""
        ((_, value),) = self.administer(f"SHOW STATUS LIKE 'wsrep_{name}'")
        return str(value)

    def _answers(self) -> bool:
        try:
            return self.status("ready") == "ON"
        except pymysql.Error:
            return False


@contextmanager
def cluster(number: int = 3) -> Iterator[Sequence[Node]]:
    """Run so many nodes of one cluster."""
    nodes: list[Node] = []
    try:
        for _ in range(number):
            nodes.append(Node(*nodes))
        yield nodes
    finally:
        for node in nodes:
            node.close()
