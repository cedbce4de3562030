"""Marks for what a test needs of its database."""

from __future__ import annotations

import pytest

from tests.kit.databases import DATABASES

ABILITIES = {
    "sqlite": {"file", "one_writer", "cheap"},
    "postgresql": {"server", "row_locks", "listen", "roles", "schemas", "plans", "sessions"},
    "mariadb": {"server", "row_locks"},
}
"""The abilities of each kind of database. Its name stands for its own SQL, settings and faults.

`file` and `one_writer`: the database is a file, which one transaction at a time may write. `cheap`: it is
made in a millisecond, for tests that any database would do for. `server`: it is reached over a network.
`row_locks`: transactions lock single rows, and others pass over these. `listen`: idle workers are notified.
`roles`: rights to tables and columns. `schemas`: tables of one name beside each other. `plans`: EXPLAIN
shows which pages a statement reads. `sessions`: a session sees what others do and wait for.
"""


def needs(*abilities: str, empty: bool = False) -> pytest.MarkDecorator:
    """Run a test on each tested database that has these abilities, or is of this name.

    Where none is tested, it runs on all that have them. `empty` is for tests of `empty_database_url`.
    """
    able = [kind for kind, has in ABILITIES.items() if {*abilities} <= {kind, *has}]
    assert able, f"no database has {abilities}"
    tested = [kind for kind in able if kind in DATABASES] or able
    return pytest.mark.parametrize("empty_database_url" if empty else "database_url", tested, indirect=True)
