"""The settings for sqlq: the dict SQLQ, and the entry of DATABASES that holds the jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import load_backend
from sqlalchemy import URL

from sqlq.app.app import App
from sqlq.app.options import DirectCalls
from sqlq.database.dialects import dialect_at
from sqlq.errors import ConfigurationError, SqlqError, UnsupportedDatabaseError
from sqlq.model.checks import checked_bool
from sqlq.payload.encryption import How, Plain
from sqlq.worker.options import OPTIONS, SETTINGS

_OTHERS = (
    "client_encoding",
    "context",
    "cursor_factory",
    "dbname",
    "prepare_threshold",
    "user",
    "password",
)
"""The connection parameters that only Django uses, and those with a place of their own in a URL. libpq knows
the others."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The dict SQLQ of the settings; each key may be left out.

    `database` is the alias of the database that holds the jobs. The other keys are as in `sqlq.App`.
    SQLQ_KEYS and its like count where `keys`, `encryption` or `plain` is None. With `migrate_with_django`,
    `manage.py migrate` brings sqlq's tables up, too. `task_modules` names the module of each installed app
    that has its tasks. Options of `manage.py sqlq work` are keys, too; their variables come before them.
    """

    database: str = "default"
    schema: str | None = None
    retention: str | None = "7d"
    listen_url: str | None = None
    service: str | None = None
    defaults: Mapping[str, Any] | None = None
    queues: Mapping[str, Mapping[str, Any]] | None = None
    eager: bool | None = None
    direct_calls: DirectCalls = "allow"
    keys: Sequence[str] | None = field(default=None, repr=False)  # guard: djangos-keys-are-shown-nowhere
    encryption: How | None = None
    plain: Plain | None = None
    migrate_with_django: bool = True
    task_modules: Sequence[str] = ("tasks",)
    workers: Mapping[str, Any] = field(default_factory=dict)
    """The settings of workers, by the names of `SETTINGS`."""

    @classmethod
    def read(cls) -> Configuration:
        """Return the settings. Raises `ConfigurationError` for a key or value that cannot be."""
        return cls.of(getattr(settings, "SQLQ", {}))

    @classmethod
    def of(cls, options: Any) -> Configuration:
        """Return the settings in a dict. Raises `ConfigurationError` for a key or value that cannot be."""
        if not isinstance(options, Mapping):
            raise ConfigurationError(
                f'SQLQ in the settings is {options!r}: it is a dict, as in SQLQ = {{"database": "default"}}'
            )
        known = [*(each.name for each in fields(cls) if each.name != "workers"), *SETTINGS]
        for key in options:
            if key not in known:
                raise ConfigurationError(
                    f"SQLQ in the settings has the key {key!r}: it may have {', '.join(known)}"
                )
        configuration = cls(
            **{name: options[name] for name in options if name not in SETTINGS},
            workers={name: value for name in SETTINGS if (value := options.get(name)) is not None},
        )
        configuration._check()
        return configuration

    def of_the_app(self) -> dict[str, Any]:
        """Return the options of `sqlq.App` among the keys."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("database", "migrate_with_django", "task_modules", "workers")
        }

    def _check(self) -> None:
        if self.database not in connections.settings:
            raise ConfigurationError(
                f'SQLQ["database"] is {self.database!r}: it is a key of DATABASES, one of '
                f"{', '.join(map(repr, connections.settings))}"
            )
        modules = self.task_modules
        if not isinstance(modules, (list, tuple)) or not all(isinstance(name, str) for name in modules):
            raise ConfigurationError(
                f'SQLQ["task_modules"] is {modules!r}: it is a list of names, as in ["tasks", "emails"]'
            )
        try:
            checked_bool(self.migrate_with_django, "migrate_with_django")
            App("postgresql://", **self.of_the_app()).close()  # which connects to nothing
            for name, value in self.workers.items():
                OPTIONS[name].check(value, name)
        except ConfigurationError as error:
            raise ConfigurationError(f"SQLQ in the settings: {error}") from None


def identity_of(alias: str) -> tuple[Any, ...]:
    """Return what distinguishes one database from another under an alias, whose settings a test run changes.
    Makes no connection."""
    entry = connections.settings[alias]
    return *(entry[name] for name in ("NAME", "HOST", "PORT", "USER")), is_testing()


def is_testing() -> bool:
    """Whether Django's test environment is set up in this process, as its test runner and pytest-django do
    it."""
    utilities: Any = sys.modules.get("django.test.utils")
    return utilities is not None and hasattr(utilities._TestState, "saved_data")  # noqa: SLF001 - no public one


def url_of(alias: str) -> URL:
    """Return the URL of the database that Django connects to under an alias.

    Raises `UnsupportedDatabaseError` where that is none of sqlq's, and `ConfigurationError` where Django's
    own settings are not complete.
    """
    entry = connections.settings[alias]
    engine = entry["ENGINE"]
    vendor = load_backend(engine).DatabaseWrapper.vendor
    if vendor not in ("postgresql", "mysql", "sqlite"):
        raise UnsupportedDatabaseError(
            f"sqlq runs on PostgreSQL, MariaDB and SQLite, but DATABASES[{alias!r}] has the ENGINE "
            f'{engine!r}: name another alias in SQLQ["database"]'
        )
    try:
        parameters = connections.create_connection(alias).get_connection_params()
    except ImproperlyConfigured as error:
        raise ConfigurationError(f"DATABASES[{alias!r}] cannot be used: {error}") from error
    if vendor == "sqlite":
        return _sqlite(str(parameters["database"]))
    if vendor == "mysql":
        return _mariadb(parameters)
    return _postgresql(parameters, entry.get("OPTIONS", {}).get("assume_role"))


def _sqlite(name: str) -> URL:
    file, _, query = name.partition("?")
    if not name.startswith("file:"):
        return URL.create("sqlite", database=name)
    return URL.create("sqlite", database=file, query={**dict(parse_qsl(query)), "uri": "true"})


def _mariadb(parameters: Mapping[str, Any]) -> URL:
    """Return the URL of what mysqlclient is given, or PyMySQL in its place."""
    query = {name: str(parameters[name]) for name in _MARIADBS if parameters.get(name)}
    query |= {f"ssl_{name}": str(value) for name, value in (parameters.get("ssl") or {}).items()}
    return URL.create(
        f"mariadb+{'pymysql' if sys.modules['MySQLdb'].__name__ == 'pymysql' else 'mysqldb'}",
        username=parameters.get("user"),
        password=parameters.get("password"),
        host=parameters.get("host"),
        port=parameters.get("port"),
        database=parameters.get("database"),
        query=query,
    )


_MARIADBS = ("charset", "unix_socket", "read_default_file", "read_default_group", "connect_timeout")
"""Django's options of how to connect. sqlq sets all else on its own connections."""


def _postgresql(parameters: Mapping[str, Any], role: str | None) -> URL:
    """Return the URL of what libpq is given. The query has room for a socket's directory, several hosts and a
    service file."""
    query = {name: str(value) for name, value in parameters.items() if name not in _OTHERS and value}
    if role:
        quoted = role.replace("\\", r"\\").replace(" ", r"\ ")
        query["options"] = f"{query.get('options', '')} -c role={quoted}".strip()
    return URL.create(
        "postgresql+psycopg",
        username=parameters.get("user"),
        password=parameters.get("password"),
        database=parameters.get("dbname"),
        query=query,
    )


def check_settings(app_configs: Any = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return what is wrong with SQLQ, and with the database that it names."""
    try:
        configuration = Configuration.read()
        url = url_of(configuration.database)
        App(url, **configuration.of_the_app()).close()
    except SqlqError as error:
        return [checks.Error(str(error), id="sqlq.E001")]
    options = connections.settings[configuration.database].get("OPTIONS", {})
    if not dialect_at(url).in_a_file or str(options.get("transaction_mode")).upper() == "IMMEDIATE":
        return []
    return [
        checks.Warning(
            f"DATABASES[{configuration.database!r}] begins its transactions as readers, and SQLite refuses a "
            "reader that writes after somebody else, a worker for example, has written.",
            hint='Add "OPTIONS": {"transaction_mode": "IMMEDIATE"}, so that transactions wait for '
            "each other instead.",
            id="sqlq.W001",
        )
    ]
