"""Finished jobs in partitions by time, for those who chose them at `sqlq migrate`. PostgreSQL only.

Maintenance makes partitions ahead, and drops those that are too old. No job waits for that: a row without a
partition goes into the default one, which is pruned row by row. A step waits 50 ms at most for a lock, since
others wait behind it, and is tried again later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from sqlq.database.postgresql import online
from sqlq.schema.qualify import in_catalog

log = logging.getLogger("sqlq")
PARTITION = re.compile(r"finished_jobs_(before|default|\d{8}(_\d{4})?)")
"""The names of partitions."""
AHEAD = {"day": 7, "week": 3, "month": 2}
"""How many partitions of each kind are made ahead."""
LOCK_MS = 50
HELD_MS = 100
"""How long a statement may take for which others wait."""
COMMENT = "sqlq makes partitions: "
"""The comment of a partitioned table before the unit."""
UNTIL = "finished_jobs_until"
"""The CHECK that bounds the rows of a table before it is a partition."""
CHECK_VIOLATION, QUERY_CANCELED, MAY_NOT = "23514", "57014", "42501"
LATER = (online.LOCK_NOT_AVAILABLE, online.DEADLOCK_DETECTED, QUERY_CANCELED)

Begin: TypeAlias = Callable[[], AbstractContextManager[Connection]]


class Partitions(NamedTuple):
    """The table of finished jobs and its partitions. Names and bounds are as SQL has them."""

    table: str
    is_partitioned: bool
    unit: str | None
    """The time of a partition: day, week or month. With None no more are made."""
    owner: str
    may_change: bool
    """Whether this role may make and drop partitions."""
    older_ms: int | None
    """The age from which rows are deleted one by one: that of the oldest partition that may stay."""
    default: str | None
    rows_in_default: int | None
    """About how many."""
    bounded: list[str]
    """The tables that a broken off migration has left with a CHECK."""
    old: list[str]
    """The partitions that may go, the oldest first."""
    missing: list[list[str]]
    """The name and the bounds of each that is to be made."""
    gap: list[str] | None
    """The time around now that has no partition, up to some days ahead: its bounds, and a name for it."""

    @property
    def needs_care(self) -> bool:
        """Whether each migration has something to do here."""
        return self.is_partitioned or bool(self.bounded)


def _moment(utc: str) -> str:
    """A time as text that means the same in every session."""
    return f"to_char({utc}, 'YYYY-MM-DD HH24:MI:SS.US') || '+00'"


def _name(utc: str) -> str:
    return f"'finished_jobs_' || replace(to_char({utc}, 'YYYYMMDD_HH24MI'), '_0000', '')"


_FIND = text(
    in_catalog(
        f"""
WITH history AS (
     SELECT c.oid, c.relkind, n.nspname, n.oid AS place, r.rolname,
            coalesce(:unit, substring(obj_description(c.oid, 'pg_class'),
                                      '{COMMENT}(day|week|month)')) AS unit,
            pg_has_role(r.oid, 'USAGE') AND has_schema_privilege(r.oid, n.oid, 'CREATE') AS may_change,
            CAST(:older_ms AS bigint) * interval '1 millisecond' AS age
       FROM pg_catalog.pg_class c
       JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
       JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
      WHERE n.nspname = :schema AND c.relname = 'finished_jobs'),
parts AS (
     SELECT p.oid, p.relkind, format('%I.%I', n.nspname, p.relname) AS name, bound,
            CAST(substring(bound, 'FROM \\(''([^'']+)''\\)') AS timestamp with time zone) AS low,
            CAST(substring(bound, 'TO \\(''([^'']+)''\\)') AS timestamp with time zone) AS high
       FROM history JOIN pg_catalog.pg_inherits i ON i.inhparent = history.oid
       JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid
       JOIN pg_catalog.pg_namespace n ON n.oid = p.relnamespace
      CROSS JOIN LATERAL pg_get_expr(p.relpartbound, p.oid) AS bound),
taken AS (
     SELECT coalesce(range_agg(tstzrange(low, high)), tstzmultirange()) AS times
       FROM parts WHERE bound <> 'DEFAULT'),
step AS (
     SELECT CAST('1 ' || unit AS interval) AS long,
            CASE unit {
            " ".join(f"WHEN '{unit}' THEN {number}" for unit, number in AHEAD.items())
        } END AS ahead,
            date_trunc(unit, statement_timestamp() AT TIME ZONE 'UTC') AS today,
            date_trunc(unit, (statement_timestamp() + interval '3 days') AT TIME ZONE 'UTC')
            + CAST('1 ' || unit AS interval) AS soon
       FROM history WHERE unit IS NOT NULL),
gaps AS (
     SELECT lower(gap) AT TIME ZONE 'UTC' AS low, upper(gap) AT TIME ZONE 'UTC' AS high
       FROM step CROSS JOIN LATERAL generate_series(today, today + (long * ahead), long) AS day
      CROSS JOIN taken CROSS JOIN LATERAL unnest(
            tstzmultirange(tstzrange(day AT TIME ZONE 'UTC', (day + long) AT TIME ZONE 'UTC')) - times
            ) AS gap)
SELECT format('%I.finished_jobs', nspname), relkind = 'p', unit, quote_ident(rolname), may_change,
       CAST(EXTRACT(epoch FROM CASE WHEN unit IS NULL THEN age ELSE statement_timestamp()
            - date_trunc(unit, statement_timestamp() - age, 'UTC') END) * 1000 AS bigint),
       (SELECT name FROM parts WHERE bound = 'DEFAULT'),
       (SELECT pg_stat_get_live_tuples(oid) FROM parts WHERE bound = 'DEFAULT'),
       ARRAY(SELECT format('%I.%I', nspname, c.relname)
               FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid
              WHERE k.conname = '{UNTIL}' AND k.connamespace = place),
       ARRAY(SELECT name FROM parts WHERE relkind = 'r' AND high <= (statement_timestamp() - age)
              ORDER BY high),
       ARRAY(SELECT ARRAY[format('%I.%I', nspname, {_name("low")}),
                          format('FROM (%L) TO (%L)', {_moment("low")}, {_moment("high")})]
               FROM gaps WHERE relkind = 'p' ORDER BY low),
       (SELECT ARRAY[coalesce({_moment("lower(gap) AT TIME ZONE 'UTC'")}, '1970-01-01'),
                     {_moment("least(upper(gap) AT TIME ZONE 'UTC', soon)")},
                     coalesce({_name("lower(gap) AT TIME ZONE 'UTC'")}, 'finished_jobs_before')]
          FROM step CROSS JOIN taken
         CROSS JOIN LATERAL unnest(tstzmultirange(tstzrange(NULL, NULL)) - times) AS gap
         WHERE gap OPERATOR(pg_catalog.@>) statement_timestamp())
  FROM history
"""
    )
)


def find(
    conn: Connection, schema: str | None, *, older_ms: int | None = None, unit: str | None = None
) -> Partitions:
    """Return the partitions of finished jobs; those may go whose rows are all older than `older_ms`. `unit`
    takes the place of the table's own."""
    given = {"schema": schema, "older_ms": older_ms, "unit": unit}
    return Partitions(*conn.execute(_FIND, given).one())


def run(conn: Connection, found: Partitions, statements: str) -> None:
    """Run statements in the transaction of a connection, as the owner of the table."""
    _execute(
        conn,
        f"SET LOCAL ROLE {found.owner}; SET LOCAL search_path = pg_catalog; "
        f"SET LOCAL lock_timeout = {LOCK_MS}; {statements}",
    )


def _execute(conn: Connection, statements: str) -> Any:
    return conn.execution_options(no_parameters=True).exec_driver_sql(statements)


def without_vacuum(name: str) -> str:
    """Return the statements that send an autovacuum away from a table. It goes after a second, and nobody
    else waits meanwhile."""
    return (
        f"SET LOCAL lock_timeout = {online.LOCK_TIMEOUT_MS}; "
        f"LOCK TABLE ONLY {name} IN SHARE UPDATE EXCLUSIVE MODE; SET LOCAL lock_timeout = {LOCK_MS}; "
    )


def keep_up(begin: Begin, found: Partitions, *, alone: bool = True) -> None:
    """Make the partitions that are missing, and drop the CHECK that a broken off migration has left. With
    `alone` it does so only while no migration is under way.

    A partition is left out while rows of its time are in the default one.
    """
    steps = [f"ALTER TABLE {name} DROP CONSTRAINT IF EXISTS {UNTIL}" for name in found.bounded]
    if found.is_partitioned and found.default is None:
        steps.append(_creation(found, f"{found.table}_default", "DEFAULT"))
    steps += [_creation(found, name, f"FOR VALUES {bounds}") for name, bounds in found.missing]
    for each in steps:
        _try(begin, found, partial(_execute, statements=each), alone=alone)


def _creation(found: Partitions, name: str, bounds: str) -> str:
    """Return the statements that make a partition. Only those who read the default one wait for them."""
    return (
        f"CREATE TABLE {name} (LIKE {found.table} INCLUDING ALL); SET LOCAL statement_timeout = {HELD_MS}; "
        f"ALTER TABLE {found.table} ATTACH PARTITION {name} {bounds}"
    )


def drop(begin: Begin, found: Partitions, name: str) -> bool | None:
    """Drop a partition, and return whether it is gone, or None if one of its rows has to stay."""
    has_to_stay = False

    def work(conn: Connection) -> None:
        nonlocal has_to_stay
        # without holding anybody up, and again when nobody can write any more
        for lock in ("", f"LOCK TABLE ONLY {found.table} IN ACCESS EXCLUSIVE MODE"):
            if lock:
                held = f"SET LOCAL statement_timeout = {HELD_MS}"
                _execute(conn, f"{without_vacuum(name)}{held}; {lock}")
            if has_to_stay := _has_to_stay(conn, name):  # guard: what-has-to-stay-keeps-its-partition
                return
        _execute(conn, f"DROP TABLE {name}")

    is_done = _try(begin, found, work)
    return None if has_to_stay else is_done


def _has_to_stay(conn: Connection, name: str) -> bool:
    """Whether a partition has steps of flows, or jobs with a retention of their own."""
    _execute(conn, "SET LOCAL enable_seqscan = off")  # two indexes have these rows alone
    some = f"SELECT 1 FROM {name} WHERE"
    query = f"SELECT EXISTS ({some} flow_id IS NOT NULL) OR EXISTS ({some} expires_at IS NOT NULL)"
    return bool(_execute(conn, query).scalar())


def _try(
    begin: Begin, found: Partitions, work: Callable[[Connection], object], *, alone: bool = True
) -> bool:
    """Do some work in a transaction, as the owner of the table; return whether it is done. It is tried again
    later where others use the table, and where the default partition has the rows."""
    try:
        with begin() as conn:
            if alone and not conn.execute(_LOCK, {"lock": online.MIGRATIONS}).scalar():
                return False
            run(conn, found, "")
            work(conn)
            return True
    except DBAPIError as error:
        state = online.sqlstate(error)
        if not state or state.startswith(("08", "57P")):
            raise
        if state not in (*LATER, CHECK_VIOLATION):
            log.warning("could not change the partitions of %s: %s", found.table, error.orig)
        return False


_LOCK = text("SELECT pg_catalog.pg_try_advisory_xact_lock(:lock)")
