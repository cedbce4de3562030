"""`sqlq work --wait` and `sqlq migrate --wait`, started before their database."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, make_url

import sqlq
from tests.kit import needs, wait_until
from tests.kit.command import Command
from tests.kit.preloaded import Forked, preloaded

pytestmark = needs("server")
WAITS = {"work": "the database does not answer (while starting: ", "migrate": "the database is not up yet ("}


@pytest.fixture
def down(restartable_server: Any, database_url: str) -> Iterator[Callable[[], None]]:
    """Stop the server; return what starts it."""
    restartable_server.stop()
    # a connection that it still accepts ends with another error than the later ones
    wait_until(lambda: is_refused(make_url(database_url)), what="refused connections")
    stopped = [restartable_server]

    def start() -> None:
        stopped.pop().start()

    yield start
    for server in stopped:
        server.start()


def is_refused(url: URL) -> bool:
    assert url.host is not None
    assert url.port is not None
    try:
        socket.create_connection((url.host, url.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


@contextmanager
def begun(run: Command, *words: str) -> Iterator[Forked]:
    """Run a command meanwhile; what it prints is in the file `said`."""
    with (run.directory / "said").open("w") as said:
        process = preloaded().start(["--app", "shop:app", *words], run.directory, run.environment, said, said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def said(run: Command) -> str:
    return Path(run.directory / "said").read_text()


@pytest.mark.parametrize("words", [("work", "--drain"), ("migrate",), ("migrate", "--check")], ids=" ".join)
def test_a_command_waits_for_its_database_and_goes_on(
    sqlq_: Command, down: Callable[[], None], words: tuple[str, ...]
) -> None:
    with begun(sqlq_, *words, "--wait", "60s") as process:
        wait_until(lambda: WAITS[words[0]] in said(sqlq_), timeout=30, what="the sentence")
        down()
        assert process.wait(60) == 0, said(sqlq_)
    assert said(sqlq_).count(WAITS[words[0]]) == 1
    assert {"work": "stopped: no jobs\n", "migrate": "at revision"}[words[0]] in said(sqlq_)


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
        wait_until(lambda: WAITS[words[0]] in said(sqlq_), timeout=30, what="the sentence")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == code, said(sqlq_)
    assert "Traceback" not in said(sqlq_)


@pytest.mark.slow
def test_a_worker_that_waits_touches_its_health_file(
    sqlq_: Command, down: Callable[[], None], app: sqlq.App
) -> None:
    with begun(sqlq_, "work", "--wait", "60s", "--health-file", "alive", "--start-timeout", "5s") as process:
        wait_until(lambda: WAITS["work"] in said(sqlq_), timeout=30, what="the sentence")
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 10, what="longer than a start may take")
        assert sqlq_("health", "alive", "--max-age", "4s").code == 0
        down()
        wait_until(lambda: "working on" in said(sqlq_), timeout=30, what="the worker")
        process.terminate()
        assert process.wait(30) == 0
