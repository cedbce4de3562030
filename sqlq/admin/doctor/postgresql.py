"""`sqlq doctor` on a PostgreSQL server: whether it takes writes and keeps them, and what slows it down."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sqlq.admin.doctor.finding import Finding, check, ok, span, to_do
from sqlq.config.constants import LOOKOUT_MS
from sqlq.config.durations import readable, written
from sqlq.database.database import Database
from sqlq.database.postgresql import health as healths
from sqlq.store.health import health

OLD_TRANSACTION_S = 300.0
"""From this age on an open transaction is named: vacuum can remove no row that died since it began."""
VERY_OLD_TRANSACTION_S = 3_600.0
FREE_CONNECTIONS = 10
DEAD_ROWS = 50_000
LISTEN_SECONDS = 2.0


class ServerCheck:
    """Examines the server of one database; each method is one question."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def primary(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            standby, read_only = (
                healths.is_standby(conn),
                healths.setting(conn, "default_transaction_read_only") == "on",
            )
        if standby:
            yield to_do(
                "primary",
                "this server is a standby: nothing can be enqueued or claimed here",
                "name the primary in the URL",
            )
        elif read_only:
            yield to_do(
                "primary",
                "transactions of this role are read-only: nothing can be claimed",
                "ALTER ROLE … RESET default_transaction_read_only",
            )
        else:
            yield ok("primary", "the server takes writes")

    def durability(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            commit, fsync, pages = (
                healths.setting(conn, name) for name in ("synchronous_commit", "fsync", "full_page_writes")
            )
        if fsync == "off":
            yield to_do(
                "durability",
                "fsync is off: a crash of the machine can lose acknowledged jobs, and the whole database",
                "set fsync = on in postgresql.conf",
            )
        elif pages == "off":
            yield to_do(
                "durability",
                "full_page_writes is off: a crash of the machine can damage tables",
                "set full_page_writes = on",
            )
        elif commit == "off":
            yield check(
                "durability",
                "synchronous_commit is off: a crash of the server can lose the jobs acknowledged in its "
                "last moments",
                "set it on for the roles that enqueue, if no job may be lost",
            )
        else:
            yield ok("durability", f"fsync is on, synchronous_commit is {commit}")

    def connections(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            used, limit = healths.connections(conn)
        said = f"{used} of {limit} connections are in use"
        if limit - used < FREE_CONNECTIONS:
            yield check(
                "connections",
                said,
                "raise max_connections, or put a pooler before the server; sqlq work -p N needs 2 × N + 2",
            )
        else:
            yield ok("connections", said)

    def autovacuum(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            on = healths.setting(conn, "autovacuum") == "on" and healths.setting(conn, "track_counts") == "on"
            without = healths.without_autovacuum(conn)
        if not on:
            yield to_do(
                "autovacuum",
                "autovacuum is off (or track_counts is): dead rows stay, and claims become slower and slower",
                "set autovacuum = on and track_counts = on",
            )
        elif without:
            yield to_do(
                "autovacuum",
                f"autovacuum is off for {', '.join(without)}",
                f"ALTER TABLE {without[0]} RESET (autovacuum_enabled)",
            )
        else:
            yield ok("autovacuum", "autovacuum is on")

    def creators(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            found = healths.creators(conn)
        for schema, role in found:
            yield check(
                "schemas",
                f"{role} may create in the schema {schema}, where statements of others look for functions",
                f"REVOKE CREATE ON SCHEMA {schema} FROM {role}",
            )
        if not found:
            yield ok("schemas", "their owners alone may create in the schemas that statements look into")

    def transactions(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            old = healths.old_transactions(conn, older_than_s=OLD_TRANSACTION_S)
            hidden = healths.hidden_sessions(conn)
        for session in old:
            who = f"pid {session.pid} ({session.program or 'no application_name'}, {session.state})"
            said = (
                f"{who} has had a transaction open for {span(session.seconds)}: no row that died since "
                "then can be removed"
            )
            remedy = f"end it where it was begun, or SELECT pg_terminate_backend({session.pid})"
            yield (to_do if session.seconds >= VERY_OLD_TRANSACTION_S else check)(
                "transactions", said, remedy
            )
        if hidden:
            said = f"could not look into {hidden} sessions of other roles"
            yield check("transactions", said, "GRANT pg_read_all_stats to the role in the URL")
        elif not old:
            yield ok("transactions", f"none has been open for more than {span(OLD_TRANSACTION_S)}")

    def prepared(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            waiting = healths.prepared_transactions(conn, older_than_s=OLD_TRANSACTION_S)
        for gid, seconds in waiting:
            yield to_do(
                "prepared",
                f"the prepared transaction {gid!r} has waited for {span(seconds)}: it holds locks, and "
                "dead rows with them",
                "COMMIT PREPARED or ROLLBACK PREPARED",
            )
        if not waiting:
            yield ok("prepared", "no prepared transaction was forgotten")

    def slots(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            idle = healths.idle_slots(conn)
        for name, age in idle:
            yield check(
                "slots",
                f"the replication slot {name} is idle, and keeps the dead rows of the last {age:,} "
                "transactions",
                f"start its replica, or SELECT pg_drop_replication_slot('{name}')",
            )
        if not idle:
            yield ok("slots", "no idle replication slot holds back vacuum")

    def listen(self) -> Iterator[Finding]:
        began = time.monotonic()
        heard = health.hears(self._database, seconds=LISTEN_SECONDS)
        if heard is None:
            yield check(
                "listen",
                "this driver cannot listen: workers find new jobs by polling",
                "use postgresql+psycopg:// in the URL",
            )
        elif heard:
            yield ok("listen", f"a NOTIFY arrives within {readable((time.monotonic() - began) * 1000)}")
        else:
            yield check(
                "listen",
                f"a NOTIFY did not arrive within {LISTEN_SECONDS:g} s, as behind PgBouncer in transaction "
                f"mode: workers find new jobs by polling, within {readable(LOOKOUT_MS)}",
                "if that is too slow, set SQLQ_LISTEN_URL to a URL of the database itself, past the pooler",
            )

    def dead_rows(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            rows = healths.dead_rows(conn)
        if rows is None:
            yield check("dead rows", "could not look: no statistics of the table jobs")
            return
        when = "" if rows.vacuumed_at is None else f", vacuumed {written(rows.vacuumed_at)}"
        said = f"the table jobs has about {rows.live:,} live and {rows.dead:,} dead rows{when}"
        if rows.dead > DEAD_ROWS and rows.dead > rows.live:
            yield check("dead rows", said, "end old transactions (see above), then VACUUM jobs")
        else:
            yield ok("dead rows", said)
