"""The jobs of a task that a transaction sees, for the test kit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from sqlalchemy import Connection

from sqlq.database.dialect import in_schema
from sqlq.errors import SealError
from sqlq.model.job import NewJob
from sqlq.payload.encryption import Encryption
from sqlq.schema import version
from sqlq.store.jobs import lookup


def enqueued(
    conn: Connection, task: str, schema: str | None, seal: Encryption | None
) -> Iterator[tuple[int, NewJob]]:
    """Yield the jobs of a task that a transaction sees, with their ids, the oldest first. `seal` decrypts the
    payloads that it can."""
    version.require(conn, schema)
    with in_schema(conn, schema):
        rows = [*lookup.enqueued(conn, task)]
    for id, job in rows:
        if seal is not None:
            with suppress(SealError):
                job = job.with_payload(seal.opened("payload", job.task, job.queue, job.payload))
        yield id, job
