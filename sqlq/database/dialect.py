"""A database that sqlq runs on: a few facts, and what differs from other databases in three parts.

Another database writes the statements of `Sql` that have no default. The defaults need RETURNING, UPDATE …
FROM, ON CONFLICT and common table expressions. `Driver` is about connections, `Migrations` about tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlq.database.driver import Driver
from sqlq.database.migrations import Migrations
from sqlq.database.sql import Sql


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """One database. There is one of each, found with `dialects.dialect_of`, `dialect_at` or
    `dialect_named`."""

    name: str
    title: str
    """Its name for people."""
    oldest: tuple[int, ...]
    """The oldest version that sqlq runs on."""
    sql: Sql
    driver: Driver
    migrations: Migrations
    health: Any
    """The module with the queries about the state of its servers. `burden` returns the causes of a slow
    database, `indexes` those of our tables, and whether queries can use each; `OWN_INDEXES` are their names.
    `last_id` returns the newest id that the database has given a job, kept or not; None where that is
    unknown. `unfit` returns why this server breaks a promise of sqlq's, though it speaks like a supported
    one. `missing_grant` returns the advice for the role in a URL where an error means that it lacks a right
    of its kind."""
    in_a_file: bool = False
    """Whether a database is a file, without a server, schemas and roles.

    One transaction at a time may write there, and keeps all others waiting. A connection sees another's
    commit without a statement, and so needs no notification. An id is given again after a rollback.
    """
    notifies: bool = False
    """Whether a statement notifies idle workers."""
    has_kinds_of_roles: bool = False
    """Whether `store.rights` has the rights that each kind of role needs."""
    schemas_are_databases: bool = False
    locks_on_one_node: bool = False
    """Whether a cluster may have several writers, each with row locks of its own. They see what the others
    wrote, and not what they locked."""
