"""Signed and encrypted jobs under real processes that die."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.payload.encryption import HEAD, new_key
from tests.kit import wait_until
from tests.kit.processes import worker_process

pytestmark = pytest.mark.integration

SHOP = """
import os
import signal

import sqlq
from sqlalchemy import create_engine

app = sqlq.App()


@app.task
def heard(ended: sqlq.JobOutcome) -> str:
    return ended.task


@app.task(isolate=True)
def apart(card: str) -> str:
    with sqlq.current_job().completing(create_engine(app.database.engine.url), result=card):
        return str(os.getpid())


@app.task(max_attempts=1)
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_callback_of_a_job_whose_worker_died_is_signed(
    database_url: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor signs it, which imports no App."""
    monkeypatch.setenv("SQLQ_KEYS", new_key())
    (tmp_path / "encrypted_shop.py").write_text(SHOP)
    app = sqlq.App(database_url)
    with worker_process(tmp_path, "encrypted_shop:app", database_url, "-c", "1"):
        job = app.named("encrypted_shop.dies").new()
        app.enqueue(replace(job, on_failure='{"task": "encrypted_shop.heard"}'))
        ended = wait_until(
            lambda: [job for job in app.jobs.list() if job.task == "encrypted_shop.heard" and job.ended_at]
        )
    assert [(job.state, job.result) for job in ended] == [("finished", "encrypted_shop.dies")]
    with engine.connect() as conn:
        assert str(conn.scalar(text("SELECT payload FROM finished_jobs"))).startswith(HEAD)
    app.close()


def test_an_isolated_job_is_decrypted_and_its_result_encrypted(
    database_url: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its process has no connection of sqlq's to the queue."""
    monkeypatch.setenv("SQLQ_KEYS", new_key())
    monkeypatch.setenv("SQLQ_ENCRYPTION", "encrypt")
    (tmp_path / "encrypted_shop.py").write_text(SHOP)
    app = sqlq.App(database_url)
    job = app.enqueue(app.named("encrypted_shop.apart").new("4111-1111"))
    with worker_process(tmp_path, "encrypted_shop:app", database_url, "-c", "1"):
        wait_until(lambda: app.jobs.get(job.id).ended_at)
    assert app.result(job) == "4111-1111"
    with engine.connect() as conn:
        stored = conn.execute(text("SELECT payload, result FROM finished_jobs")).one()
    assert all(each.startswith(HEAD) and "4111" not in each for each in stored)
    app.close()
