"""What a scrape of metrics asks beside `sqlq status`: questions that stay short with tables of any size."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, bindparam, func, select

from sqlq.schema.tables import failed_jobs
from sqlq.store import counts, health
from sqlq.store.health import Rows
from sqlq.store.jobs import DIALECTS


class Vitals(NamedTuple):
    """Failed jobs by reason, among the newest 10,000; and what makes a database slow in the end. None for
    what this database does not have."""

    failed: dict[str, int]
    rows: Rows | None
    oldest_transaction_seconds: float | None
    wal_bytes: int | None


def vitals(conn: Connection) -> Vitals:
    failed = {str(reason): number for reason, number in conn.execute(_BY_REASON, {"limit": counts.MOST})}
    if DIALECTS[conn.dialect.name].one_writer:
        return Vitals(failed, None, None, _wal_bytes(conn))
    oldest = health.old_transactions(conn, older_than_s=0)
    return Vitals(failed, health.dead_rows(conn), oldest[0].seconds if oldest else 0.0, None)


def _wal_bytes(conn: Connection) -> int | None:
    file = health.database_file(conn)
    if file is None:
        return None
    try:
        return file.with_name(f"{file.name}-wal").stat().st_size
    except OSError:  # there is none while nobody is connected
        return 0


_newest = select(failed_jobs.c.reason).order_by(failed_jobs.c.id.desc()).limit(bindparam("limit")).subquery()
_BY_REASON = select(_newest.c.reason, func.count()).group_by(_newest.c.reason).order_by(_newest.c.reason)
