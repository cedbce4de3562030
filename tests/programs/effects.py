"""Writes of handlers that must be there exactly once: rows of a table beside sqlq's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

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


def have_effect(result: Any = None) -> None:
    """As a handler, write and complete the job, in one transaction."""
    job = sqlq.current_job()
    with effects_engine() as engine, job.completing(engine, result=result) as session:
        session.execute(text("INSERT INTO effects VALUES (:job)"), {"job": job.id})


def save_slice() -> int:
    """As a handler, write and save how far the job has come, in one transaction; return how far."""
    job = sqlq.current_job()
    with effects_engine() as engine, Session(engine) as session, session.begin():
        session.execute(text("INSERT INTO effects VALUES (:job)"), {"job": job.id})
        job.checkpoint(session, (job.cursor or 0) + 1)
    return int(job.cursor or 0)


@contextmanager
def effects_engine() -> Iterator[Engine]:
    """As a handler, have an engine of its own for the database of the effects."""
    engine = create_engine(os.environ[VARIABLE])
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    try:
        yield engine
    finally:
        engine.dispose()
