"""The address of an App's database, from the arguments of its caller."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from sqlalchemy import URL, Engine

from sqlq.config.urls import database_url, schema_name, supported
from sqlq.config.urls import listen_url as url_to_listen_at
from sqlq.database.database import Address, Gate
from sqlq.database.dialects import dialect_at
from sqlq.errors import ConfigurationError
from sqlq.model.job import KEPT, Kept
from sqlq.payload.encryption import Seal

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


def address_of(
    url: str | URL | Kept | None = KEPT,
    engine: Engine | AsyncEngine | None = None,
    schema: str | None = None,
    listen_url: str | URL | None = None,
    *,
    kept: Set[str],
    gate: Gate,
    seal: Seal | None,
) -> Address:
    """Return the address of a database. Options `kept` from another address count only where they fit this
    one. Raises `ConfigurationError` for arguments that make no address."""
    if url is None and engine is None:  # guard: a-missing-variable-is-no-default
        raise ConfigurationError(
            "the database URL is None, as of os.environ.get for a variable that is not set: set it, or "
            "leave the argument out for SQLQ_DATABASE_URL, pyproject.toml or sqlite:///sqlq.db"
        )
    if not isinstance(url, Kept) and url is not None and engine is not None:
        raise ConfigurationError("App got both a url and an engine: give one of them")
    if engine is not None:
        sync = getattr(engine, "sync_engine", engine)
        if not isinstance(sync, Engine):
            raise ConfigurationError(
                f"App(engine=…) takes an Engine or AsyncEngine, not {type(engine).__name__}; a URL is "
                "given as App(url)"
            )
        where = supported(sync.url)
    else:
        where = database_url(None if isinstance(url, Kept) else url)
    if "schema" in kept and not dialect_at(where).has_schemas:
        schema = None
    if "listen_url" in kept and listen_url and database_url(listen_url).database != where.database:
        listen_url = None  # guard: where-to-listen-goes-with-the-database
    return Address(
        where if engine is None else None,
        engine,
        schema_name(schema, on=where),
        url_to_listen_at(listen_url),
        gate=gate,
        seal=seal,
    )
