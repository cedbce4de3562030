"""`sqlq doctor` on a PostgreSQL server: whether it takes writes and keeps them, and what slows it down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.finding import Answer, ServerChecks, check, in_units, ok, to_do
from sqlq.config.constants import LOOKOUT_MS
from sqlq.config.durations import counted, readable, span, written
from sqlq.config.urls import hosts
from sqlq.database.database import LOOKS, Database
from sqlq.database.dialects import refusal
from sqlq.database.postgresql import health as healths
from sqlq.database.postgresql.partitions import find
from sqlq.store.health import health

OLD_TRANSACTION_S = 300.0
"""From this age on an open transaction is named: vacuum can remove no row that died since it began."""
VERY_OLD_TRANSACTION_S = 3_600.0
DEAD_ROWS = 50_000
LISTEN_SECONDS = 2.0
WEAK = {
    "off": "a crash of the server can lose the jobs acknowledged in its last moments",
    "local": "commits wait for no standby, so that a failover can lose acknowledged jobs",
    "remote_write": "a standby that crashes may lose acknowledged jobs, since it need not have them on disk",
}
"""The danger to jobs at each value of synchronous_commit below on."""
SETTINGS = (
    *("default_transaction_read_only", "synchronous_commit", "fsync", "full_page_writes"),
    *("synchronous_standby_names", "autovacuum", "track_counts"),
)
MEND_COMMITS = "set synchronous_commit = on for the roles that enqueue, if no job may be lost"


class PostgreSQLChecks(ServerChecks):
    """Checks of the server of one database."""

    in_use = staticmethod(healths.connections)
    room = "raise max_connections, or put a pooler before the server"

    def in_general(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        of_server = (self.primary, self.hosts, self.durability, self.standbys, self.connections)
        more = (self.autovacuum, self.schemas, self.transactions, self.prepared, self.slots, self.listen)
        return *of_server, *more

    def of_tables(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        return (self.dead_rows, self.partitions)

    @cached_property
    def _settings(self) -> dict[str, str]:
        return self._ask(healths.settings, SETTINGS)

    @cached_property
    def _is_standby(self) -> bool:
        return self._ask(healths.is_standby)

    def primary(self) -> Iterator[Answer]:
        node = self._ask(healths.node)
        if self._is_standby:
            yield to_do(
                f"the server {node} is a standby: nothing can be enqueued or claimed here",
                "name the primary in the URL",
            )
        elif self._settings["default_transaction_read_only"] == "on":
            yield to_do(
                "transactions of this role are read-only: nothing can be claimed",
                "ALTER ROLE … RESET default_transaction_read_only",
            )
        else:
            yield ok(f"the server {node} takes writes")

    def hosts(self) -> Iterator[Answer]:
        url = self._database.engine.url
        if len(names := hosts(url)) == 1:
            return
        if url.query.get("target_session_attrs") not in ("read-write", "primary"):
            yield check(
                f"the URL names {len(names)} hosts and takes the first that answers, also a standby",
                "add target_session_attrs=read-write to the URL",
            )
        if self._database.address is None or self._database.address.engine is not None:
            return  # that connects in a way of its own
        alone = url.difference_update_query(["host", "port", "target_session_attrs"])
        found = []
        for name in names:
            host, _, port = name.rpartition(":")
            try:
                with (
                    Database.open(alone.set(host=host, port=int(port)), use=LOOKS) as one,
                    health.reading(one) as conn,
                ):
                    found.append(f"{name} is a {'standby' if healths.is_standby(conn) else 'primary'}")
            except SQLAlchemyError as error:
                yield check(f"the host {name} does not answer: {refusal(error)}", "start it, or take it out")
        if found:
            yield ok("; ".join(found))

    def durability(self) -> Iterator[Answer]:
        commit = self._settings["synchronous_commit"]
        if self._settings["fsync"] == "off":
            yield to_do(
                "fsync is off: a crash of the machine can lose acknowledged jobs, and the whole database",
                "set fsync = on in postgresql.conf",
            )
        elif self._settings["full_page_writes"] == "off":
            yield to_do(
                "full_page_writes is off: a crash of the machine can damage tables",
                "set full_page_writes = on",
            )
        elif commit in WEAK:
            yield check(f"synchronous_commit is {commit}: {WEAK[commit]}", MEND_COMMITS)
        else:
            weak = self._ask(healths.weak_commits)
            for who, level in weak:
                yield check(f"synchronous_commit is {level} for {who}: {WEAK[level]}", MEND_COMMITS)
            if not weak:
                yield ok(f"fsync is on, synchronous_commit is {commit}")

    def standbys(self) -> Iterator[Answer]:
        if self._is_standby:
            return
        names = self._settings["synchronous_standby_names"]
        found = self._ask(healths.standbys)
        if any(each.sync is None for each in found):
            yield check("could not look at the standbys", "GRANT pg_read_all_stats to the role in the URL")
        elif any(each.sync in ("sync", "quorum") for each in found):
            yield ok(f"commits wait for a standby (synchronous_standby_names is {names})")
        elif names:
            yield to_do(
                f"commits wait for a standby that is away (synchronous_standby_names is {names}): no job is "
                "acknowledged",
                "start it, or take it out of synchronous_standby_names",
            )
        elif found:
            yield check(
                f"{counted(len(found), 'standby follows', 'standbys follow')}, and commits wait for none: a "
                "failover loses the jobs acknowledged in its last moments",
                "set synchronous_standby_names; with Patroni synchronous_mode and synchronous_mode_strict",
            )
        else:
            yield ok("no standby follows this server")

    def autovacuum(self) -> Iterator[Answer]:
        on = all(self._settings[name] == "on" for name in ("autovacuum", "track_counts"))
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
        idle = [
            each
            for each in self._ask(healths.slots)
            if not each.active and (each.bytes, each.transactions) != (None, None)
        ]
        for each in idle:
            kept = [] if each.bytes is None else [f"{in_units(each.bytes)} of WAL"]
            if each.transactions is not None:
                kept.append(f"the dead rows of the last {each.transactions:,} transactions")
            yield check(
                f"the replication slot {each.name} is idle, and keeps {' and '.join(kept)}",
                f"start its replica, or SELECT pg_drop_replication_slot('{each.name}')",
            )
        if not idle:
            yield ok("no idle replication slot holds back vacuum or WAL")

    def listen(self) -> Iterator[Answer]:
        began = time.monotonic()
        heard = health.hears(self._database, seconds=LISTEN_SECONDS)
        if heard is None:
            yield check(
                "this driver cannot listen: workers find new jobs by polling",
                "use postgresql+psycopg:// in the URL",
            )
        elif heard:
            yield ok(f"a NOTIFY arrives within {span(time.monotonic() - began)}")
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

    def partitions(self) -> Iterator[Answer]:
        found = self._ask(find, self._database.schema)
        remedy = f"run sqlq migrate as {found.owner}"
        for name in found.bounded:
            yield to_do(
                f"a migration was broken off: {name} refuses jobs that finish some days from now", remedy
            )
        if not found.is_partitioned or found.unit is None:
            return
        said = f"finished jobs are in partitions of a {found.unit} each"
        lacking = len(found.missing) + (found.default is None)
        if lacking > 1:  # the last one ahead may be just due
            yield to_do(f"{said}, and {lacking} of the next ones are missing", remedy)
        elif found.rows_in_default:
            yield check(f"{said}, but the default one has about {found.rows_in_default:,} rows", remedy)
        elif not found.may_change:
            yield check(f"{said}, which this role cannot make", f"{remedy} at least each {found.unit}")
        else:
            yield ok(said)
