"""The tests' own PostgreSQL does what every other test relies on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, text

from tests.kit import wait_until
from tests.kit.postgresql import OwnPostgreSQL, PostgreSQL

ROOT = Path(__file__).parents[2]


def run(url: str, *statements: str) -> object:
    """Run the statements in one transaction of a connection of their own and return the last one's first
    value, if it has rows."""
    with create_engine(url, poolclass=NullPool).begin() as connection:
        results = [connection.execute(text(statement)) for statement in statements]
        return results[-1].scalar() if results[-1].returns_rows else None


def test_databases_are_isolated_and_a_template_is_copied(postgresql: PostgreSQL) -> None:
    first = postgresql.create_database()
    run(first, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (42)")
    copy, other = postgresql.create_database(template=first), postgresql.create_database()
    with create_engine(other, poolclass=NullPool).connect():  # which does not hold up the drop
        run(copy, "UPDATE t SET n = 43")
        assert (run(first, "SELECT n FROM t"), run(copy, "SELECT n FROM t")) == (42, 43)
        assert run(other, "SELECT to_regclass('t')") is None
        for url in (first, copy, other):
            postgresql.drop_database(url)


def test_a_crash_keeps_committed_rows_and_the_port(restartable_postgresql: OwnPostgreSQL) -> None:
    url = restartable_postgresql.create_database()
    run(url, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (42)")
    started = run(url, "SELECT pg_postmaster_start_time()")
    restartable_postgresql.restart(mode="immediate")
    assert run(url, "SELECT pg_postmaster_start_time()") != started
    assert run(url, "SELECT n FROM t") == 42
    restartable_postgresql.drop_database(url)


@pytest.mark.integration
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_ended_by_a_signal_leaves_no_server(end: signal.Signals) -> None:
    program = """if True:
        import signal
        from tests.kit.postgresql import OwnPostgreSQL
        # a shell's background job starts with it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        server = OwnPostgreSQL()
        print(server.directory, server.port, flush=True)
        signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            assert child.stdout
            directory, port = child.stdout.readline().split()
            assert Path(directory).exists()
            os.killpg(child.pid, end)  # the whole group, as a terminal does
            child.wait(timeout=10)
        finally:
            child.kill()
    wait_until(lambda: not Path(directory).exists(), what=f"the guard removing {directory}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
