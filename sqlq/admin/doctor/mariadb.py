"""`sqlq doctor` on a MariaDB server: whether it takes writes and keeps them, and what delays jobs."""

from __future__ import annotations

from functools import partial

from sqlq.admin.doctor.finding import (
    OLD_TRANSACTION_S,
    Answers,
    Case,
    Check,
    check,
    old_transactions,
    to_do,
    troubles,
)
from sqlq.config.durations import span
from sqlq.database.mariadb import health
from sqlq.schema.tables import LARGEST_TOKEN

UNPURGED = 100_000
WRITES = {
    "read_only": {
        1: to_do(
            "this server is read-only, as a replica is: nothing can be enqueued or claimed here",
            "name the primary in the URL, or SET GLOBAL read_only = OFF on it",
        )
    }
}
DURABILITY = {
    "innodb_doublewrite": {
        0: to_do(
            "innodb_doublewrite is off: a crash of the machine can damage tables",
            "set innodb_doublewrite = ON",
        )
    },
    "innodb_flush_log_at_trx_commit": {
        level: check(
            f"innodb_flush_log_at_trx_commit is {level}: a crash can lose the jobs acknowledged in the last "
            "second",
            "set it to 1, if no job may be lost",
        )
        for level in (0, 2, 3)
    },
}


def binlog(case: Case) -> Answers:
    if case.query(health.setting, "log_bin") and case.query(health.setting, "binlog_format") == "STATEMENT":
        yield to_do(
            "binlog_format is STATEMENT: sqlq's transactions are READ COMMITTED, and cannot write then",
            "SET GLOBAL binlog_format = MIXED, and in the server's configuration",
        )


def purge(case: Case) -> Answers:
    if (number := case.query(health.unpurged_transactions)) > UNPURGED:
        yield check(
            f"the old rows of {number:,} transactions are not purged yet: claims read over them",
            "end old transactions (see above), or raise innodb_purge_threads",
        )


def tables(case: Case) -> Answers:
    for table, engine in case.query(health.other_engines):
        yield to_do(
            f"the table {table} is {engine}'s, which has no transactions: jobs can be lost or run twice",
            f"ALTER TABLE {table} ENGINE = InnoDB",
        )
    for table, collation in case.query(health.other_collations):
        yield to_do(
            f"the table {table} has text in {collation}, for which different names may be equal",
            f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {health.COLLATION}",
        )
    if (case.query(health.last_id) or 0) > LARGEST_TOKEN:
        yield to_do(health.LAST_ID, health.LOWER_IDS)


CHECKS = (
    Check("primary", partial(troubles, read=health.setting, settings=WRITES), "the server takes writes"),
    Check("binlog", binlog, "sqlq can write to the binary log"),
    Check(
        "durability", partial(troubles, read=health.setting, settings=DURABILITY), "commits wait for the disk"
    ),
    Check(
        "transactions",
        partial(old_transactions, read=health.old_transactions, remedy="KILL {}"),
        f"none has been open for more than {span(OLD_TRANSACTION_S)}",
    ),
    Check("purge", purge, "old rows are purged"),
    Check("tables", tables, f"all are InnoDB's, in {health.COLLATION}"),
)
