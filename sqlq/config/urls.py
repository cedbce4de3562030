"""Where the database is: URLs, their variables, hosts and drivers, and URLs as they may be shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote_plus

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from sqlq.config import pyproject
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError

DEFAULT_URL = "sqlite:///sqlq.db"

_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "sqlite+aiosqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
}
"""sqlq's own connections are synchronous, and on PostgreSQL psycopg unless the URL names another synchronous
driver."""

_OWN = {
    "postgresql": ("PostgreSQL", "psycopg", "psycopg2"),
    "mariadb": ("MariaDB", "pymysql", "mysqldb"),
    "sqlite": ("SQLite", "sqlite3"),
}
"""The drivers that sqlq's own connections may have."""

_ASYNCPG_ONLY = (
    "async_fallback",
    "command_timeout",
    "direct_tls",
    "max_cacheable_statement_size",
    "max_cached_statement_lifetime",
    "prepared_statement_cache_size",
    "prepared_statement_name_func",
    "statement_cache_size",
    "timeout",
)
"""Parameters in a URL that psycopg would refuse to connect with."""


def database_url(argument: str | URL | None = None) -> URL:
    """Return the URL of the database: the argument, else SQLQ_DATABASE_URL, else that of [tool.sqlq] in
    pyproject.toml, else sqlite:///sqlq.db.

    Raises `ConfigurationError` for text that is no URL, and `UnsupportedDatabaseError` for a database sqlq
    does not run on.
    """
    value = argument if argument is not None else os.environ.get("SQLQ_DATABASE_URL") or None
    if value is not None:
        return supported(_read(value, "the database URL"))
    project = pyproject.find()
    if project is None or project.database_url is None:
        return supported(make_url(DEFAULT_URL))
    return supported(
        below(project.file.parent, _read(project.database_url, f"database-url in {project.file}"))
    )


def _read(value: str | URL, source: str) -> URL:
    if not isinstance(value, str | URL):
        raise ConfigurationError(
            f"{source} is text, or a URL of SQLAlchemy, not {type(value).__name__}; an engine is given as "
            "engine="
        )
    try:
        return make_url(value)
    except (ArgumentError, ValueError):  # ValueError: the port is no number
        raise ConfigurationError(
            f"{source} cannot be read: it has the form postgresql://user:password@host/database, "
            "mariadb://user:password@host/database or sqlite:///path/to/file.db; several hosts stand behind "
            "it, as in postgresql://user@/database?host=a:5432&host=b:5432&target_session_attrs=read-write"
        ) from None


def below(directory: Path, url: URL) -> URL:
    """Return the URL with the whole path of its SQLite file, if it is one."""
    return url.set(database=str(directory / (url.database or ""))) if is_file(url) else url


def is_file(url: URL) -> bool:
    """Whether this is an SQLite database named by a path."""
    return (
        url.get_backend_name() == "sqlite"
        and not in_memory(url)
        and not (url.database or "").startswith("file:")
    )


def supported(url: URL) -> URL:
    """Return the URL with the driver of sqlq's own connections. Raises `UnsupportedDatabaseError` for a
    database that cannot serve."""
    if url.drivername == "postgresql+asyncpg":
        url = url.set(
            query={
                "sslmode" if name == "ssl" else name: value
                for name, value in url.query.items()
                if name not in _ASYNCPG_ONLY
            }
        )
    if isinstance(password := url.query.get("password"), str):  # where drivers mask it, and let it count
        url = url.set(password=password).difference_update_query(["password"])
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    backend = url.get_backend_name()
    if backend == "mysql":
        raise UnsupportedDatabaseError(
            f"sqlq runs on MariaDB, not on MySQL, and {masked(url)} says mysql: for MariaDB write "
            f"{masked(url.set(drivername=url.drivername.replace('mysql', 'mariadb', 1)))}"
        )
    if backend not in _OWN:
        raise UnsupportedDatabaseError(
            f"sqlq runs on PostgreSQL, MariaDB and SQLite, not on {backend!r} ({masked(url)})"
        )
    title, *drivers = _OWN[backend]
    if (url.drivername.partition("+")[2] or "sqlite3") not in drivers:
        raise UnsupportedDatabaseError(
            f"sqlq connects to {title} by {' or '.join(drivers)}, not by {url.drivername!r}: "
            f"give the App {_DRIVERS.get(backend, backend)}://"
        )
    return url


def in_memory(url: URL) -> bool:
    """Whether this is an SQLite database in memory, which only the connection that made it sees."""
    return url.get_backend_name() == "sqlite" and (
        not url.database or ":memory:" in url.database or "mode=memory" in str(url)
    )


IN_MEMORY = (
    "an SQLite database in memory is seen by one connection only, so sqlq cannot open it, nor a worker run "
    "its jobs: name a file, as in sqlite:///sqlq.db (in a test, see sqlq.testing.create_tables)"
)
"""The message where sqlq needs a connection of its own to a database in memory."""


def listen_url(argument: str | URL | None = None) -> URL | None:
    """Return the URL to LISTEN at, where that is another than the database's: the argument, else
    SQLQ_LISTEN_URL, else None.

    Raises `ConfigurationError` for anything but a URL of PostgreSQL with the driver psycopg, the one that can
    LISTEN.
    """
    _, value = pyproject.setting(argument, "listen_url", "SQLQ_LISTEN_URL")
    if value is None:
        return None
    url = database_url(value)
    if url.drivername != "postgresql+psycopg":
        raise ConfigurationError(
            f"the URL to listen at is {masked(url)}: LISTEN is PostgreSQL's, so it has the form "
            "postgresql://…"
        )
    return url


def read_url(argument: str | URL | None = None, *, of: URL) -> URL | None:
    """Return the URL of the replica to read from: the argument, else SQLQ_READ_URL, else `read-url` in
    [tool.sqlq], else None. Only the argument may lead to another database than `of`."""
    _, value = pyproject.setting(argument, "read_url", "SQLQ_READ_URL", "read_url")
    if value is None:
        return None
    url = database_url(value)
    same = (url.get_backend_name(), url.database) == (of.get_backend_name(), of.database)
    return url if argument is not None or same else None  # guard: read-url-goes-with-the-database


def hosts(url: URL) -> list[str]:
    """Return the hosts that a URL names, each with its port, in the order in which they are tried.

    >>> hosts(make_url("postgresql://u@/shop?host=a:5433&host=b")), hosts(make_url("postgresql://u@a,b/shop"))
    (['a:5433', 'b:5432'], ['a:5432', 'b:5432'])
    """
    names, ports = _listed(url.query.get("host") or url.host), _listed(url.query.get("port") or url.port)
    default = 3306 if url.get_backend_name() == "mariadb" else 5432
    return [
        name if _PORT.search(name) else f"{name}:{port or default}"
        for name, port in zip(names, ports * len(names) if len(ports) == 1 else ports, strict=False)
    ]


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, tuple) else str(value or "").split(",")


def is_same_database(one: URL, other: URL) -> bool:
    """Whether two URLs name the same database of the same server, or of servers that take over from each
    other."""
    if (one.get_backend_name(), one.database) != (other.get_backend_name(), other.database):
        return False
    return not {*hosts(one)}.isdisjoint(hosts(other))


def masked(url: URL) -> str:
    """Return the URL as it may be shown: without its password, nor secrets among its parameters."""
    for name in filter(_SECRET.search, url.query):  # guard: secrets-among-parameters-are-masked
        url = url.update_query_dict({name: _MASK})
    return _rendered(url, hide_password=True).replace(quote_plus(_MASK), _MASK)


def has_secret(url: URL) -> bool:
    """Whether `masked` returns less than the whole URL."""
    return masked(url) != _rendered(url, hide_password=False)


def _rendered(url: URL, *, hide_password: bool) -> str:
    """Return the URL as people write it, with the commas and colons of its hosts."""
    address, mark, query = url.render_as_string(hide_password=hide_password).partition("?")
    return f"{address}{mark}{query.replace('%2C', ',').replace('%3A', ':')}"


_SECRET = re.compile("pass|secret|token|scram", re.IGNORECASE)
"""Parameters of drivers: password, sslpassword, passfile, oauth_client_secret, scram_client_key."""
_MASK = "***"
_PORT = re.compile(r":\d+(,|$)")


def shown(url: URL) -> str:
    """Return the URL as it may be shown to a person in another directory. It has no password, and an SQLite
    file has its whole path."""
    return f"sqlite:///{Path(url.database or '').absolute()}" if is_file(url) else masked(url)


def schema_name(argument: str | None = None) -> str | None:
    """Return the schema the tables live in, on MariaDB a database of the server: the argument, else
    SQLQ_SCHEMA, else None for the default one.

    It means nothing on SQLite. Raises `ConfigurationError` for anything but a lower-case identifier of at
    most 41 characters.
    """
    source, name = pyproject.setting(argument, "schema", "SQLQ_SCHEMA")
    if name is not None and not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", name):
        raise ConfigurationError(
            f"{source} is {name!r}: a schema is named by lower-case letters, digits and _, at most 41 of them"
        )
    return cast("str | None", name)


def search_path_of(url: URL) -> str | None:
    """Return the schema that is the whole search_path in a URL's options."""
    match = re.search(r'search_path\s*=\s*"?([a-z_][a-z0-9_]*)"?\s*(-|$)', str(url.query.get("options", "")))
    return match and match[1]
