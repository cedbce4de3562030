"""`sqlq work --wait` and `sqlq migrate --wait`, started before their database."""

from __future__ import annotations

import errno
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

import pytest
from sqlalchemy import make_url

import sqlq
from tests.kit import needs, wait_until
from tests.kit.command import Command
from tests.kit.preloaded import Forked

pytestmark = needs("server")
WAITS = {"work": "the database does not answer (while starting: ", "migrate": "the database is not up yet ("}


@pytest.fixture
def down(restartable_server: Any, database_url: str) -> Iterator[Callable[[], None]]:
    """Stop the server; return what starts it."""
    restartable_server.stop()
    url, stopped = make_url(database_url), [restartable_server]

    def is_refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((str(url.host), url.port or 0)) == errno.ECONNREFUSED

    # a connection that it still accepts ends with another error than the later ones
    wait_until(is_refused, what="refused connections")
    yield lambda: stopped.pop().start()
    for server in stopped:
        server.start()


@contextmanager
def begun(run: Command, *words: str) -> Iterator[Popen[str] | Forked]:
    """Run a command meanwhile, from when it says that it waits."""
    with run.running("--app", "shop:app", *words) as process:
        wait_until(lambda: WAITS[words[0]] in run.log(), timeout=30)
        yield process


@pytest.mark.parametrize("words", [("work", "--drain"), ("migrate",), ("migrate", "--check")], ids=" ".join)
def test_a_command_waits_for_its_database_and_goes_on(
    sqlq_: Command, down: Callable[[], None], words: tuple[str, ...]
) -> None:
    with begun(sqlq_, *words, "--wait", "60s") as process:
        down()
        assert process.wait(60) == 0, sqlq_.log()
    assert sqlq_.log().count(WAITS[words[0]]) == 1
    assert {"work": "stopped: no jobs\n", "migrate": "at revision"}[words[0]] in sqlq_.log()


@pytest.mark.parametrize("words", [("work",), ("migrate",)], ids=" ".join)
def test_a_wait_that_times_out_ends_with_the_usual_error(
    sqlq_: Command, down: Callable[[], None], words: tuple[str, ...]
) -> None:
    began = time.monotonic()
    at_once = sqlq_.shop(*words).sentence()
    waited = sqlq_.shop(*words, "--wait", "1s")
    assert time.monotonic() - began >= 1
    assert waited.code == 1
    assert waited.err.splitlines()[-1] == f"sqlq: {at_once}"
    assert WAITS[words[0]] in waited.err


@pytest.mark.parametrize(("words", "code"), [(("work",), 0), (("migrate",), 130)], ids=["work", "migrate"])
def test_ctrl_c_ends_the_wait_quietly(
    sqlq_: Command, down: Callable[[], None], words: tuple[str, ...], code: int
) -> None:
    with begun(sqlq_, *words, "--wait", "10m") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == code, sqlq_.log()
    assert "Traceback" not in sqlq_.log()


@pytest.mark.slow
def test_a_worker_that_waits_touches_its_health_file(
    sqlq_: Command, down: Callable[[], None], app: sqlq.App
) -> None:
    with begun(sqlq_, "work", "--wait", "60s", "--health-file", "alive", "--start-timeout", "5s") as process:
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 10, what="longer than a start may take")
        assert sqlq_("health", "alive", "--max-age", "4s").code == 0
        down()
        wait_until(lambda: "working on" in sqlq_.log(), timeout=30, what="the worker")
        process.terminate()
        assert process.wait(30) == 0
