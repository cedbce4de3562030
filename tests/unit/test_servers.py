"""The tests' own PostgreSQL leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import wait_until

ROOT = Path(__file__).parents[2]


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
