"""Alembic's own command runs this file in a checkout; `sqlq migrate` and a host project's Alembic do without
it."""

from __future__ import annotations

from alembic import context
from sqlalchemy import NullPool, create_engine

from sqlq.config import urls
from sqlq.database import migrate
from sqlq.schema import version

url = urls.database_url()

if context.is_offline_mode():
    schema = None if url.get_backend_name() == "sqlite" else urls.schema_name()
    context.configure(url=url, **migrate.options(schema))
    with context.begin_transaction():
        migrate.run_in(context.get_context())
else:
    with migrate.transaction(create_engine(url, poolclass=NullPool), urls.schema_name()) as connection:
        schema = version.effective_schema(connection, urls.schema_name())
        context.configure(connection=connection, **migrate.options(schema))
        migrate.run_in(context.get_context())
