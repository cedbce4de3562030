"""examples/api_client: two workers of ten slots, and a server that counts and turns away what is too much."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sqlq
from tests.kit import wait_until
from tests.kit.processes import worker_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "api_client"
REQUESTS = 30


def test_the_example_server_queues_every_request(
    tmp_path: Path, database_url: str, app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    python = {
        **os.environ,
        "API_PORT": "0",
        "SQLQ_DATABASE_URL": database_url,
        "PYTHONPATH": str(EXAMPLE.parents[1]),
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=python, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    with subprocess.Popen(
        [sys.executable, "server.py"], cwd=folder, env=python, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().rsplit(maxsplit=1)[-1]
            monkeypatch.setenv("API_URL", f"http://127.0.0.1:{port}")
            assert f"{REQUESTS} requests wait" in run("client.py", str(REQUESTS))
            with (
                worker_process(folder, "client:app", database_url, "-c", "10"),
                worker_process(folder, "client:app", database_url, "-c", "10"),
            ):
                wait_until(
                    lambda: len(app.jobs.list(state="finished", limit=100)) == REQUESTS,
                    timeout=120,
                    what="answers",
                )
        finally:
            server.terminate()
    (known,) = app.limits.list()
    assert known.says == "3 running, 19/1s"
    said = [line.split() for line in (folder / "asked.txt").read_text().splitlines()]
    assert max(int(row[1]) for row in said) <= 3, "never more at a time, over both workers"
    moments = [float(row[0]) for row in said]
    asked_again = sum(row[2] == "503" for row in said)
    assert len(moments) == REQUESTS + asked_again
    assert asked_again > 0
    # of starts that are spread evenly a busy machine may bring some together, but it starts none early
    assert moments[-1] - moments[0] >= (len(moments) - 1) / 19 - 1
    assert re.search(rf"^{REQUESTS} answered, {asked_again} asked again", run("server.py", "--check"))
