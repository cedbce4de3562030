"""`sqlq doctor` on a PostgreSQL server: whether it takes writes and keeps them, and what delays jobs."""

from __future__ import annotations

import time
import uuid
from typing import Any

from sqlalchemy import text

from sqlq.admin.doctor.finding import (
    OLD_TRANSACTION_S,
    Answers,
    Case,
    Check,
    Finding,
    check,
    ok,
    old_transactions,
    to_do,
    troubles,
)
from sqlq.config.constants import POLLER_MS
from sqlq.config.durations import counted, readable, span, written
from sqlq.database.database import Database
from sqlq.database.postgresql import health
from sqlq.schema.qualify import in_catalog

DEAD_ROWS = 50_000
LISTEN_SECONDS = 2.0
WEAK = {
    "off": "a crash of the server can lose the jobs acknowledged in its last moments",
    "local": "commits wait for no standby, so that a failover can lose acknowledged jobs",
    "remote_write": "a standby that crashes may lose acknowledged jobs, since it need not have them on disk",
}
"""The danger to jobs at each value of synchronous_commit below on."""
MEND_COMMITS = "set synchronous_commit = on for the roles that enqueue, if no job may be lost"
MAY_SEE = "GRANT pg_read_all_stats to the role in the URL"
DURABILITY = {
    "fsync": {
        "off": to_do(
            "fsync is off: a crash of the machine can lose acknowledged jobs, and the whole database",
            "set fsync = on in postgresql.conf",
        )
    },
    "full_page_writes": {
        "off": to_do(
            "full_page_writes is off: a crash of the machine can damage tables", "set full_page_writes = on"
        )
    },
    "synchronous_commit": {
        level: check(f"synchronous_commit is {level}: {danger}", MEND_COMMITS)
        for level, danger in WEAK.items()
    },
}


def primary(case: Case) -> Answers:
    node = case.query(health.node)
    if case.query(health.is_standby):
        yield to_do(
            f"the server {node} is a standby: nothing can be enqueued or claimed here",
            "name the primary in the URL",
        )
    elif case.query(health.setting, "default_transaction_read_only") == "on":
        yield to_do(
            "transactions of this role are read-only: nothing can be claimed",
            "ALTER ROLE … RESET default_transaction_read_only",
        )
    else:
        yield ok(f"the server {node} takes writes")


def durability(case: Case) -> list[Finding]:
    return [*troubles(case, health.setting, DURABILITY)] or [
        check(f"synchronous_commit is {level} for {role}: {WEAK[level]}", MEND_COMMITS)
        for role, level in case.query(health.weak_commits)
    ]


def standbys(case: Case) -> Answers:
    if case.query(health.is_standby):
        return
    names, syncs = case.query(health.setting, "synchronous_standby_names"), case.query(health.standbys)
    if None in syncs:
        yield check("could not look at the standbys", MAY_SEE)
    elif not {"sync", "quorum"}.isdisjoint(syncs):
        yield ok(f"commits wait for a standby (synchronous_standby_names is {names})")
    elif names:
        yield to_do(
            f"commits wait for a standby that is away (synchronous_standby_names is {names}): no job is "
            "acknowledged",
            "start it, or take it out of synchronous_standby_names",
        )
    elif syncs:
        yield check(
            f"{counted(len(syncs), 'standby follows', 'standbys follow')}, and commits wait for none: a "
            "failover loses the jobs acknowledged in its last moments",
            "set synchronous_standby_names; with Patroni synchronous_mode and synchronous_mode_strict",
        )


def transactions(case: Case) -> Answers:
    yield from old_transactions(case, health.old_transactions, "SELECT pg_terminate_backend({})")
    if hidden := case.query(health.hidden_sessions):
        yield check(f"could not look into {hidden} sessions of other roles", MAY_SEE)


def listen(case: Case) -> Answers:
    began = time.monotonic()
    received = _receives(case.database, LISTEN_SECONDS)
    if received:
        yield ok(f"a NOTIFY arrives within {span(time.monotonic() - began)}")
    elif received is None:
        yield check(
            "this driver cannot listen: workers find new jobs by polling",
            "use postgresql+psycopg:// in the URL",
        )
    else:
        yield check(
            f"a NOTIFY did not arrive within {LISTEN_SECONDS:g} s, as behind PgBouncer in transaction mode: "
            f"workers find new jobs by polling, within {readable(POLLER_MS)}",
            "if that is too slow, set SQLQ_LISTEN_URL to a URL of the database itself, past the pooler",
        )


def _receives(database: Database, seconds: float) -> bool | None:
    """Whether a LISTEN on the workers' connection receives a NOTIFY from where jobs are enqueued. None where
    the driver cannot report notifications.

    It uses a channel of its own, so that no notification to workers is mistaken for its own.
    """
    channel = f"sqlq_doctor_{uuid.uuid4().hex[:16]}"
    with (
        database.for_listening() as ear,
        ear.connect(isolation_level="AUTOCOMMIT") as listening,
        database.connect(isolation_level="AUTOCOMMIT") as calling,
    ):
        driver: Any = listening.connection.driver_connection
        if not callable(getattr(driver, "notifies", None)):
            return None
        dbapi: Any = listening.dialect.loaded_dbapi
        try:
            listening.exec_driver_sql(f'LISTEN "{channel}"')
            # it waits for no standby that is away
            notify = "SELECT pg_notify(:channel, ''), set_config('synchronous_commit', 'off', true)"
            calling.execute(text(in_catalog(notify)), {"channel": channel})
            return any(each.channel == channel for each in driver.notifies(timeout=seconds))
        except dbapi.Error:  # the driver's own, since SQLAlchemy is not in between
            return False
        finally:
            listening.invalidate()  # a listening connection must not return to the pool


def dead_rows(case: Case) -> Answers:
    if (rows := case.query(health.dead_rows)) is None:
        return
    when = "" if rows.vacuumed_at is None else f", vacuumed {written(rows.vacuumed_at)}"
    message = f"the table jobs has about {rows.live:,} live and {rows.dead:,} dead rows{when}"
    if rows.dead > max(DEAD_ROWS, rows.live):
        yield check(message, "end old transactions (see above), then VACUUM jobs")
    else:
        yield ok(message)


CHECKS = (
    Check("primary", primary),
    Check("durability", durability, "fsync is on, and commits wait for the disk"),
    Check("standbys", standbys, "no standby follows this server"),
    Check("transactions", transactions, f"none has been open for more than {span(OLD_TRANSACTION_S)}"),
    Check("listen", listen),
    Check("dead rows", dead_rows),
)
