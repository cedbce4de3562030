"""The checks of the settings for `manage.py check`."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import connections

from sqlq.database.dialects import dialect_at
from sqlq.django.configuration import Configuration, url_of
from sqlq.errors import SqlqError


def check_settings(app_configs: Any = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return what is wrong with SQLQ, and with the database that it names."""
    try:
        found = Configuration.read()
    except SqlqError as error:
        return [checks.Error(str(error), id="sqlq.E001")]
    try:
        url = url_of(found.database)
    except SqlqError as error:
        return [checks.Error(str(error), id="sqlq.E002")]
    options = connections.settings[found.database].get("OPTIONS", {})
    if dialect_at(url).in_a_file:
        if found.schema is not None:
            return [
                checks.Error('SQLQ["schema"] is set, but SQLite has no schemas: leave it out', id="sqlq.E003")
            ]
        if str(options.get("transaction_mode")).upper() != "IMMEDIATE":
            return [
                checks.Warning(
                    f"DATABASES[{found.database!r}] begins its transactions as readers, and SQLite refuses a "
                    "reader that writes after somebody else, a worker for example, has written.",
                    hint='Add "OPTIONS": {"transaction_mode": "IMMEDIATE"}, so that transactions wait for '
                    "each other instead.",
                    id="sqlq.W001",
                )
            ]
    return []
