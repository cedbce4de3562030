"""A service that answers 429 is left alone by all processes until its time, whoever of them dies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit import wait_until
from tests.kit.scenario import Scenario
from tests.programs import calls
from tests.programs.notes import nap

pytestmark = [pytest.mark.integration, pytest.mark.each_database]
OPEN_FOR, CLOSED_SECONDS, ON_ITS_WAY_SECONDS = 25, 3, 1.5


class Provider(ThreadingHTTPServer):
    """After `OPEN_FOR` calls it answers 429 for `CLOSED_SECONDS`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.lock, self.calls, self.closed_at = threading.Lock(), 0, float("-inf")
        self.early: list[float] = []
        """How long after a first 429 each call came that came too early."""
        self.closes = 0
        super().__init__(("127.0.0.1", 0), Answer)

    def judge(self) -> int | None:
        """Return the seconds to wait, or None for a call that is answered."""
        with self.lock:
            now = time.monotonic()
            if now < self.closed_at + CLOSED_SECONDS:
                self.early.append(now - self.closed_at)
                return CLOSED_SECONDS
            self.calls += 1
            if self.calls % OPEN_FOR:
                return None
            self.closed_at, self.closes = now, self.closes + 1
            return CLOSED_SECONDS


class Answer(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        seconds = self.server.judge()
        nap(0.01)
        self.send_response(200 if seconds is None else 429)
        if seconds is not None:
            self.send_header("Retry-After", str(seconds))
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_service_is_left_alone_until_its_time(
    tmp_path: Path, database_url: str, provider: Provider
) -> None:
    chance = random.Random(20_261_128)
    most = 0
    with Scenario(tmp_path / "work", database_url, "calls") as work:
        url = f"http://127.0.0.1:{provider.server_port}/"
        work.enqueue_all(work.new("call", n, url) for n in range(4 * OPEN_FOR))
        with work.working_at(2, "--processes", "4", "-c", "2"):

            def is_closed_again(closes: int) -> bool:
                nonlocal most
                most = max(most, work.count("jobs WHERE blocked_by IS NULL"))
                return provider.closes > closes or work.is_done()

            for closes in range(3):
                work.kill_one(chance)
                wait_until(partial(is_closed_again, closes), timeout=60, what="the next 429")
            work.wait_done()
    assert provider.closes >= 3
    assert most <= calls.RUNNING
    assert [after for after in provider.early if after > ON_ITS_WAY_SECONDS] == []
    assert len(provider.early) <= provider.closes * (calls.RUNNING - 1), "what was on its way"
    assert work.count("failed_jobs") == 0
