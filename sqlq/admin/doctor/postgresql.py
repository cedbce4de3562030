"""`sqlq doctor` on a PostgreSQL server: whether it takes writes and keeps them, and what slows it down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from sqlq.admin.doctor.finding import Answer, ServerChecks, check, ok, span, to_do
from sqlq.config.constants import LOOKOUT_MS
from sqlq.config.durations import readable, written
from sqlq.database.postgresql import health as healths
from sqlq.store.health import health

OLD_TRANSACTION_S = 300.0
"""From this age on an open transaction is named: vacuum can remove no row that died since it began."""
VERY_OLD_TRANSACTION_S = 3_600.0
DEAD_ROWS = 50_000
LISTEN_SECONDS = 2.0


class PostgreSQLChecks(ServerChecks):
    """Checks of the server of one database."""

    in_use = staticmethod(healths.connections)
    room = "raise max_connections, or put a pooler before the server"

    def in_general(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        of_server = (self.primary, self.durability, self.connections, self.autovacuum, self.schemas)
        return *of_server, self.transactions, self.prepared, self.slots, self.listen

    def of_tables(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        return (self.dead_rows,)

    def primary(self) -> Iterator[Answer]:
        standby = self._ask(healths.is_standby)
        read_only = self._ask(healths.setting, "default_transaction_read_only") == "on"
        if standby:
            yield to_do(
                "this server is a standby: nothing can be enqueued or claimed here",
                "name the primary in the URL",
            )
        elif read_only:
            yield to_do(
                "transactions of this role are read-only: nothing can be claimed",
                "ALTER ROLE … RESET default_transaction_read_only",
            )
        else:
            yield ok("the server takes writes")

    def durability(self) -> Iterator[Answer]:
        names = ("synchronous_commit", "fsync", "full_page_writes")
        commit, fsync, pages = (self._ask(healths.setting, name) for name in names)
        if fsync == "off":
            yield to_do(
                "fsync is off: a crash of the machine can lose acknowledged jobs, and the whole database",
                "set fsync = on in postgresql.conf",
            )
        elif pages == "off":
            yield to_do(
                "full_page_writes is off: a crash of the machine can damage tables",
                "set full_page_writes = on",
            )
        elif commit == "off":
            yield check(
                "synchronous_commit is off: a crash of the server can lose the jobs acknowledged in its "
                "last moments",
                "set it on for the roles that enqueue, if no job may be lost",
            )
        else:
            yield ok(f"fsync is on, synchronous_commit is {commit}")

    def autovacuum(self) -> Iterator[Answer]:
        on = all(self._ask(healths.setting, name) == "on" for name in ("autovacuum", "track_counts"))
        without = self._ask(healths.without_autovacuum)
        if not on:
            yield to_do(
                "autovacuum is off (or track_counts is): dead rows stay, and claims become slower and slower",
                "set autovacuum = on and track_counts = on",
            )
        elif without:
            yield to_do(
                f"autovacuum is off for {', '.join(without)}",
                f"ALTER TABLE {without[0]} RESET (autovacuum_enabled)",
            )
        else:
            yield ok("autovacuum is on")

    def schemas(self) -> Iterator[Answer]:
        found = self._ask(healths.creators)
        for schema, role in found:
            yield check(
                f"{role} may create in the schema {schema}, where statements of others look for functions",
                f"REVOKE CREATE ON SCHEMA {schema} FROM {role}",
            )
        if not found:
            yield ok("their owners alone may create in the schemas that statements look into")

    def transactions(self) -> Iterator[Answer]:
        old = self._ask(healths.old_transactions, older_than_s=OLD_TRANSACTION_S)
        hidden = self._ask(healths.hidden_sessions)
        for session in old:
            who = f"pid {session.number} ({session.who or 'no application_name'}, {session.state})"
            said = (
                f"{who} has had a transaction open for {span(session.seconds)}: no row that died since "
                "then can be removed"
            )
            remedy = f"end it where it was begun, or SELECT pg_terminate_backend({session.number})"
            yield (to_do if session.seconds >= VERY_OLD_TRANSACTION_S else check)(said, remedy)
        if hidden:
            said = f"could not look into {hidden} sessions of other roles"
            yield check(said, "GRANT pg_read_all_stats to the role in the URL")
        elif not old:
            yield ok(f"none has been open for more than {span(OLD_TRANSACTION_S)}")

    def prepared(self) -> Iterator[Answer]:
        waiting = self._ask(healths.prepared_transactions, older_than_s=OLD_TRANSACTION_S)
        for gid, seconds in waiting:
            yield to_do(
                f"the prepared transaction {gid!r} has waited for {span(seconds)}: it holds locks, and "
                "dead rows with them",
                "COMMIT PREPARED or ROLLBACK PREPARED",
            )
        if not waiting:
            yield ok("no prepared transaction was forgotten")

    def slots(self) -> Iterator[Answer]:
        idle = self._ask(healths.idle_slots)
        for name, age in idle:
            yield check(
                f"the replication slot {name} is idle, and keeps the dead rows of the last {age:,} "
                "transactions",
                f"start its replica, or SELECT pg_drop_replication_slot('{name}')",
            )
        if not idle:
            yield ok("no idle replication slot holds back vacuum")

    def listen(self) -> Iterator[Answer]:
        began = time.monotonic()
        heard = health.hears(self._database, seconds=LISTEN_SECONDS)
        if heard is None:
            yield check(
                "this driver cannot listen: workers find new jobs by polling",
                "use postgresql+psycopg:// in the URL",
            )
        elif heard:
            yield ok(f"a NOTIFY arrives within {readable((time.monotonic() - began) * 1000)}")
        else:
            yield check(
                f"a NOTIFY did not arrive within {LISTEN_SECONDS:g} s, as behind PgBouncer in transaction "
                f"mode: workers find new jobs by polling, within {readable(LOOKOUT_MS)}",
                "if that is too slow, set SQLQ_LISTEN_URL to a URL of the database itself, past the pooler",
            )

    def dead_rows(self) -> Iterator[Answer]:
        rows = self._ask(healths.dead_rows)
        if rows is None:
            yield check("could not look: no statistics of the table jobs")
            return
        when = "" if rows.vacuumed_at is None else f", vacuumed {written(rows.vacuumed_at)}"
        said = f"the table jobs has about {rows.live:,} live and {rows.dead:,} dead rows{when}"
        if rows.dead > DEAD_ROWS and rows.dead > rows.live:
            yield check(said, "end old transactions (see above), then VACUUM jobs")
        else:
            yield ok(said)
