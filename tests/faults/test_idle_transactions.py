"""A host that vanishes or is frozen in mid-transaction keeps its rows locked for a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, make_url

import sqlq
from tests.faults import guard
from tests.kit import claim, needs, wait_until
from tests.kit.processes import ROOT
from tests.kit.proxy import Proxy

pytestmark = needs("row_locks")

SECONDS = 2
CLAIM = f"""
import sys
from sqlq.config import constants
constants.IDLE_TRANSACTION_MS = {SECONDS * 1000}
import sqlq
from tests.kit import claim_on
database = sqlq.App(sys.argv[1]).database
with database.begin() as conn:
    (job,) = claim_on(conn, ["default"], limit=10, owner="the lost", lease_ms=30_000)
    print("claimed", flush=True)
    sys.stdin.readline()
print("committed", flush=True)
"""


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with Proxy(make_url(database_url).port or 0) as proxy:
        yield proxy


@pytest.mark.parametrize("way", ["frozen", "vanished"])
def test_a_host_that_is_lost_in_mid_transaction_frees_its_jobs(
    app: sqlq.App, engine: Engine, database_url: str, proxy: Proxy, way: str
) -> None:
    guard.install(engine)
    made = app.enqueue(app.task(name="t")(lambda: None).new())
    host = subprocess.Popen(
        [sys.executable, "-c", CLAIM, proxy.url(database_url)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == "claimed\n"
        if way == "frozen":
            host.send_signal(signal.SIGSTOP)
        else:
            proxy.deaf()
        assert claim(app) == []
        mine = wait_until(lambda: claim(app), timeout=30, what="the job's row being free")
        assert mine[0].lease_token == 1, "the claim of the lost host was rolled back"
        host.send_signal(signal.SIGCONT)
        proxy.hear()
        said, errors = host.communicate("\n", timeout=60)
        assert "committed" not in said
        assert "sqlalchemy.exc" in errors
        assert app.jobs.get(made.id).reserved_by == "me"
    finally:
        host.kill()
        host.communicate()
