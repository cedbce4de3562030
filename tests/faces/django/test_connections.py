"""Django's connections in a worker: each attempt has one that works, however long the worker was idle."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import create_engine, text

from tests.faces.django.project_of_tests import Project, settings_of
from tests.kit import needs, wait_until

pytestmark = pytest.mark.integration

TIMES = 8


@needs("sessions")
@pytest.mark.parametrize("max_age", [0, None], ids=["a connection each time", "connections that stay"])
@pytest.mark.parametrize("task", ["pay", "apay"])
def test_no_attempt_meets_a_connection_that_was_lost(
    project: Project, task: str, max_age: int | None
) -> None:
    mark = "shop_worker"
    given = settings_of(project.url, CONN_MAX_AGE=max_age, OPTIONS={"application_name": mark})
    project.set(DATABASE=given)
    engine = create_engine(project.url)
    with engine.begin() as conn:
        (order,) = conn.execute(text("INSERT INTO shop_order (paid) VALUES (false) RETURNING id")).one()

    def run_some() -> None:
        with engine.begin() as conn:
            for _ in range(TIMES):
                conn.execute(
                    text("INSERT INTO jobs (task, payload, max_attempts) VALUES (:task, :payload, 1)"),
                    {"task": f"shop.tasks.{task}", "payload": json.dumps({"args": [order]})},
                )
        wait_until(lambda: not count("jobs"), what="the jobs")

    def count(table: str) -> int:
        with engine.connect() as conn:
            return int(conn.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())

    with project.working("--concurrency", "3"):
        for _ in range(3):
            run_some()
            with engine.begin() as conn:  # of handlers and of the worker alike
                killed = conn.execute(
                    text(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                        "WHERE application_name = :mark"
                    ),
                    {"mark": mark},
                ).scalar_one()
            assert killed
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT attempts, outcome FROM finished_jobs")).all()
        failures = conn.execute(text("SELECT message FROM failed_jobs")).all()
    engine.dispose()
    assert not failures
    assert {tuple(row) for row in rows} == {(1, "finished")}
    assert len(rows) == 3 * TIMES
