"""sqlq's tables beside Django's: made when Django's have been migrated, and in tests emptied with them."""

from __future__ import annotations

import io
from typing import Any

from django.core.management import CommandError
from django.db import connections, transaction
from sqlalchemy import make_url

from sqlq.app.app import App
from sqlq.config.urls import in_memory
from sqlq.database import migrate
from sqlq.django.application import project_app
from sqlq.django.configuration import is_testing
from sqlq.errors import SchemaVersionError, SqlqError
from sqlq.schema.tables import TABLE_NAMES


def after_migrate(sender: Any, using: str, verbosity: int = 1, stdout: Any = None, **options: Any) -> None:
    """Bring sqlq's tables up after `manage.py migrate`. A flush sends the same signal, without a plan."""
    app = project_app()
    is_meant = using == app.configuration.database and app.configuration.migrate_with_django
    try:
        if not is_meant or "plan" not in options or _are_there(app, using):
            return
        if in_memory(app.url):  # where only Django's own connection reaches
            script = io.StringIO()
            migrate.write(make_url("sqlite://").get_dialect()(), script, None, "up", None, "head")
            connections[using].ensure_connection()
            connections[using].connection.executescript(script.getvalue())
        else:
            app.migrate()
    except SqlqError as error:
        raise CommandError(str(error)) from error
    if verbosity >= 1 and stdout is not None:
        stdout.write("  sqlq's tables: up to date now")


def before_flush(using: str) -> None:
    """Empty sqlq's tables before a flush in tests."""
    app = project_app()
    is_meant = is_testing() and using == app.configuration.database  # guard: jobs-are-flushed-in-tests-alone
    if not is_meant or not _are_there(app, using):
        return
    quote = connections[using].ops.quote_name
    schema = None if in_memory(app.url) else app.database.schema
    before = "" if schema is None else f"{quote(schema)}."
    with transaction.atomic(using), connections[using].cursor() as cursor:
        for name in sorted({*TABLE_NAMES} - {"sqlq_workers"}):  # which has the workers that run
            cursor.execute(f"DELETE FROM {before}{quote(name)}")  # noqa: S608 - names of our own tables


def _are_there(app: App, alias: str) -> bool:
    """Whether the tables are there, without the half second that Alembic takes."""
    if in_memory(app.url):  # where only Django's own connection can look
        return set(connections[alias].introspection.table_names()) >= {*TABLE_NAMES}
    try:
        app.database.require_tables()
    except SchemaVersionError:
        return False
    return True
