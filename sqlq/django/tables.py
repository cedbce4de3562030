"""sqlq's tables beside Django's: made when Django's have been migrated, and in tests emptied with them."""

from __future__ import annotations

import io
from typing import Any

from django.core.management import CommandError
from django.db import connections, transaction
from sqlalchemy import make_url

from sqlq.app.app import App
from sqlq.config.urls import in_memory
from sqlq.django.configuration import is_testing
from sqlq.errors import SchemaVersionError, SqlqError
from sqlq.schema.tables import metadata

_STAYS = frozenset({"sqlq_workers"})
"""Emptied by nothing: what is in it are the workers that run."""


def after_migrate(sender: Any, using: str, verbosity: int = 1, stdout: Any = None, **given: Any) -> None:
    """Bring sqlq's tables up after `manage.py migrate`. A flush sends the same signal, without a plan."""
    from sqlq.django.application import project_app

    app = project_app()
    if using == app.configuration.database and "plan" in given and app.configuration.migrate_with_django:
        try:
            before = _migrate(app, using)
        except SqlqError as error:
            raise CommandError(str(error)) from error
        if before is not _UP_TO_DATE and verbosity >= 1 and stdout is not None:
            stdout.write(f"  sqlq's tables: {'made' if before is None else f'brought up from {before}'}")


def before_flush(using: str) -> None:
    """Empty sqlq's tables before a flush in tests."""
    from sqlq.django.application import project_app

    app = project_app()
    if is_testing() and using == app.configuration.database:  # guard: jobs-are-flushed-in-tests-alone
        _empty(app, using)


_UP_TO_DATE = "up to date"


def _migrate(app: App, alias: str) -> str | None:
    """Bring the tables up and return the revision before, or `_UP_TO_DATE`."""
    if in_memory(app.url):
        return _make_in_memory(alias)
    if _are_there(app):  # without the half second that Alembic takes
        return _UP_TO_DATE
    return app.migrate()


def _are_there(app: App) -> bool:
    try:
        app.database.require_tables()
    except SchemaVersionError:
        return False
    return True


def _make_in_memory(alias: str) -> str | None:
    """Make the tables of a test's database in memory, which only Django's own connection can reach."""
    from sqlq.database import migrate

    connection = connections[alias]
    if _names() & set(connection.introspection.table_names()):
        return _UP_TO_DATE
    script = io.StringIO()
    migrate.write(make_url("sqlite://").get_dialect()(), script, None, "up", None, "head")
    connection.ensure_connection()
    connection.connection.executescript(script.getvalue())
    return None


def _names() -> set[str]:
    return {table.name for table in metadata.tables.values()}


def _empty(app: App, alias: str) -> None:
    connection = connections[alias]
    memory = in_memory(app.url)
    if not (_names() <= set(connection.introspection.table_names()) if memory else _are_there(app)):
        return
    schema = None if memory else app.database.schema
    quote = connection.ops.quote_name
    before = "" if schema is None else f"{quote(schema)}."
    with transaction.atomic(alias), connection.cursor() as cursor:
        for name in sorted(_names() - _STAYS):
            cursor.execute(f"DELETE FROM {before}{quote(name)}")  # noqa: S608 - names of our own tables
