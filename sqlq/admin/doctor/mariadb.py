"""`sqlq doctor` on a MariaDB server: whether it takes writes and keeps them, and what slows it down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sqlq.admin.doctor.finding import Answer, ServerChecks, check, ok, to_do
from sqlq.config.durations import span
from sqlq.database.mariadb import health as healths

OLD_TRANSACTION_S = 300.0
"""From this age on an open transaction is named: the server can purge nothing that it may still read."""
VERY_OLD_TRANSACTION_S = 3_600.0
UNPURGED = 100_000
SMALLEST_PACKET = 16 << 20


class MariaDBChecks(ServerChecks):
    """Checks of the server of one database."""

    in_use = staticmethod(healths.connections)

    def in_general(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        of_server = (self.primary, self.binlog, self.durability, self.connections, self.sessions)
        return *of_server, self.packets, self.transactions, self.purge, self.cluster

    def of_tables(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        return (self.tables,)

    def primary(self) -> Iterator[Answer]:
        if self._ask(healths.variable, "read_only", of_server=True):
            yield to_do(
                "this server is read-only, as a replica is: nothing can be enqueued or claimed here",
                "name the primary in the URL, or SET GLOBAL read_only = OFF on it",
            )
        else:
            yield ok("the server takes writes")

    def binlog(self) -> Iterator[Answer]:
        written = self._ask(healths.variable, "log_bin", of_server=True)
        form = self._ask(healths.variable, "binlog_format")
        if written and form == "STATEMENT":
            yield to_do(
                "binlog_format is STATEMENT: sqlq's transactions are READ COMMITTED, and cannot write then",
                "SET GLOBAL binlog_format = MIXED, and in the server's configuration",
            )
        else:
            yield ok(f"the binary log is {form}" if written else "there is no binary log")

    def durability(self) -> Iterator[Answer]:
        flush, doublewrite = (
            self._ask(healths.variable, f"innodb_{name}", of_server=True)
            for name in ("flush_log_at_trx_commit", "doublewrite")
        )
        if not doublewrite:
            yield to_do(
                "innodb_doublewrite is off: a crash of the machine can damage tables",
                "set innodb_doublewrite = ON",
            )
        elif flush != 1:
            yield check(
                f"innodb_flush_log_at_trx_commit is {flush}: a crash can lose the jobs acknowledged in the "
                "last second",
                "set it to 1, if no job may be lost",
            )
        else:
            yield ok("innodb_flush_log_at_trx_commit is 1")

    def sessions(self) -> Iterator[Answer]:
        """Look at sqlq's own sessions, and at what callers get."""
        level, mode = (self._ask(healths.variable, name) for name in ("tx_isolation", "sql_mode"))
        others = self._ask(healths.variable, "sql_mode", of_server=True)
        if level != "READ-COMMITTED" or "STRICT_ALL_TABLES" not in mode:
            yield to_do(
                f"sqlq's sessions are {level}, with the sql_mode {mode}: something between it and the server "
                "resets them",
                "connect to the server itself, or by a pooler that keeps sessions",
            )
        elif "STRICT" not in others:
            yield check(
                "sql_mode is not strict: a job that a program of yours inserts may be cut short in silence",
                "add STRICT_TRANS_TABLES to sql_mode",
            )
        elif self._ask(healths.variable, "innodb_snapshot_isolation", of_server=True):
            said = "a transaction of yours that is REPEATABLE READ can meet error 1020"
            yield ok(f"sqlq's are READ COMMITTED, and strict; innodb_snapshot_isolation is ON: {said}")
        else:
            yield ok("sqlq's are READ COMMITTED, and strict")

    def packets(self) -> Iterator[Answer]:
        most = self._ask(healths.variable, "max_allowed_packet")
        said = f"max_allowed_packet is {most >> 10:,} KiB"
        if most < SMALLEST_PACKET:
            yield check(
                f"{said}: larger jobs, or batches of jobs, are refused", "set max_allowed_packet = 16M"
            )
        else:
            yield ok(said)

    def transactions(self) -> Iterator[Answer]:
        old = self._ask(healths.old_transactions, older_than_s=OLD_TRANSACTION_S)
        for session in old:
            said = (
                f"connection {session.number} ({session.who}, {session.state}) has had a transaction "
                f"open for {span(session.seconds)}: rows that died since then may not be purged"
            )
            remedy = f"end it where it was begun, or KILL {session.number}"
            yield (to_do if session.seconds >= VERY_OLD_TRANSACTION_S else check)(said, remedy)
        if not old:
            yield ok(f"none is older than {span(OLD_TRANSACTION_S)}")

    def purge(self) -> Iterator[Answer]:
        number = self._ask(healths.unpurged_transactions)
        said = f"the old rows of {number:,} transactions are not purged yet"
        if number > UNPURGED:
            remedy = "end old transactions (see above), or raise innodb_purge_threads"
            yield check(f"{said}: claims read over them", remedy)
        else:
            yield ok(said)

    def cluster(self) -> Iterator[Answer]:
        """Look at Galera, where the server is one of its nodes."""
        number = self._ask(healths.nodes)
        if number > 1:
            yield ok(
                f"the server is one of {number} nodes of Galera: workers of one queue at several nodes lose "
                "claims to one another, so point all workers of a queue to one node"
            )

    def tables(self) -> Iterator[Answer]:
        engines = self._ask(healths.other_engines)
        collations = self._ask(healths.other_collations)
        for table, engine in engines:
            yield to_do(
                f"the table {table} is {engine}'s, which has no transactions: jobs can be lost or run twice",
                f"ALTER TABLE {table} ENGINE = InnoDB",
            )
        for table, collation in collations:
            yield to_do(
                f"the table {table} has text in {collation}, for which different names may be equal",
                f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {healths.COLLATION}",
            )
        if not engines and not collations:
            yield ok(f"all are InnoDB's, in {healths.COLLATION}")
