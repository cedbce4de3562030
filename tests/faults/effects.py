"""Writes of a handler's that must be there exactly once for each job it completed: rows of a table beside
sqlq's."""

from __future__ import annotations

import os

from sqlalchemy import Engine, create_engine, text

import sqlq

VARIABLE = "SQLQ_TEST_EFFECTS"
"""Names the database of the effects."""


def create(engine: Engine) -> None:
    """Make the table."""
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE effects (job BIGINT)"))


def committed(engine: Engine) -> list[int]:
    """Return the ids of the jobs whose effects are there."""
    with engine.connect() as conn:
        return sorted(conn.scalars(text("SELECT job FROM effects")))


def have_effect() -> None:
    """As a handler, write and complete the job, in one transaction."""
    engine = create_engine(os.environ[VARIABLE])
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    try:
        with sqlq.current_job().completing(engine) as session:
            session.execute(text("INSERT INTO effects VALUES (:job)"), {"job": sqlq.current_job().id})
    finally:
        engine.dispose()
