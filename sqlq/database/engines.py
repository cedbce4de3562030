"""Engines of sqlq's own: at a URL, and beside a caller's engine."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, StaticPool

from sqlq.config.urls import in_memory, masked
from sqlq.database.dialects import dialect_at
from sqlq.database.sqlite.driver import may_only_be_read
from sqlq.database.timeouts import Use
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError

_AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}
"""Most statements are a transaction each, so PostgreSQL's connections rest in the mode for these."""
_POOL = {"pool_use_lifo": True, "pool_reset_on_return": None}
"""The connection used last is taken first, so that a thread stays with a server process that knows its
statements. There is nothing to roll back: SQLAlchemy ends its own transactions, and all other statements are
in autocommit."""
_PACKAGES = {"pymysql": "'sqlq-jobs[mariadb]'", "MySQLdb": "mysqlclient"}
"""The packages of drivers that have another name."""


def engine_at(url: URL, use: Use) -> Engine:
    """Return an engine for a URL that `urls.database_url` has accepted. Connects to nothing yet."""
    options: dict[str, Any] = {}
    if in_memory(url):
        options = {"poolclass": NullPool}  # never used, and SQLAlchemy might choose one with a warning
    elif not dialect_at(url).in_a_file:
        ends = dialect_at(url).driver.ends(url, use.connect_seconds)
        options = {**_AUTOCOMMIT, **_POOL, "connect_args": ends, "pool_size": use.pool_size}
    try:
        return create_engine(url, **options)
    except ModuleNotFoundError as error:
        raise UnsupportedDatabaseError(
            f"{masked(url)} needs the driver {error.name!r}, which is not installed: "
            f"pip install {_PACKAGES.get(error.name or '', error.name)}"
        ) from None
    except (ValueError, ArgumentError) as error:  # of parameters, for the driver or SQLAlchemy
        raise ConfigurationError(f"{masked(url)} cannot be used: {error}") from None


def engine_beside(engine: Engine, url: URL) -> Engine | None:
    """Return an engine with a pool of its own beside a caller's; None where sqlq opens the URL anew."""
    if (
        getattr(engine.dialect, "is_async", False)
        or isinstance(engine.pool, StaticPool)
        or in_memory(url)
        or (dialect_at(url).in_a_file and may_only_be_read(url))
    ):
        return None
    options = {} if dialect_at(url).in_a_file else _AUTOCOMMIT
    pool = engine.pool.recreate()
    # a caller's hook may leave a transaction open, in which nothing else could be set
    event.listen(pool, "connect", lambda driver, record: driver.commit())
    return create_engine(engine.url.set(database=url.database), pool=pool, **options)
