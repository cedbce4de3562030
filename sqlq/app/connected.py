"""The address of an App's database, and all parts of the App that depend on it, those for operators too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL, Engine

from sqlq.app.declare import Declares
from sqlq.config.urls import below, database_url, schema_name, supported
from sqlq.config.urls import listen_url as url_to_listen_at
from sqlq.database.database import Address, Database
from sqlq.database.timeouts import ANY, LOOKS, Use
from sqlq.enqueue.enqueue import Enqueuer
from sqlq.errors import ConfigurationError
from sqlq.model.job_options import KEPT, Kept
from sqlq.payload.encryption import Encryption
from sqlq.results.results import Results

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlq.admin.facet import Audit
    from sqlq.admin.flows import Flows
    from sqlq.admin.jobs import Jobs
    from sqlq.admin.limits import Limits
    from sqlq.admin.queues import Queues
    from sqlq.admin.schedules import Schedules
    from sqlq.admin.workers import Workers
    from sqlq.app.inline import Here

F = TypeVar("F")
log = logging.getLogger("sqlq")


class Connected:
    """The parts of an App for one address. `App.use` replaces it as a whole. Each part is made when it is
    first used."""

    def __init__(self, address: Address, app: Parts, use: Use = ANY) -> None:
        self.address = address
        self._use = use
        self._app = app
        self._looking: dict[tuple[URL | None, Use], Connected] = {}
        self._parts: dict[Callable[..., Any], Any] = {}

    @cached_property
    def database(self) -> Database:
        """sqlq's own connections to the database."""
        return self.address.open(use=self._use)

    @cached_property
    def enqueuer(self) -> Enqueuer:
        """Writes jobs to the database."""
        return Enqueuer(self.database, self._app._events)

    @cached_property
    def results(self) -> Results:
        """Results and states of jobs."""
        app = self._app
        return Results(
            lambda: self.database,
            app.tasks,
            lambda: app._stand_in or vars(app).get("_eagerly"),
            self.address.encryption,
        )

    @cached_property
    def database_of_parts(self) -> Any:
        """The database as the parts for operators use it."""
        return self.database

    def part(self, kind: Callable[..., F], *more: Any) -> F:
        """Return one of the parts for operators, of the database and `more`."""
        if kind not in self._parts:
            self._parts[kind] = kind(self.database_of_parts, *more)
        part: F = self._parts[kind]
        return part

    def for_looking(self, url: URL | None, use: Use = LOOKS) -> Connected:
        """Return the same beside this one, for pages that people look at: its statements end in time. With a
        `url` it reads from a replica. Closed with this one."""
        address = self.address
        if url is not None:
            address = replace(address, url=below(Path.cwd(), database_url(url)), engine=None, listen_url=None)
        return self._looking.setdefault((url, use), Connected(address, self._app, use))

    def close(self) -> None:
        """Close the parts that were used."""
        for connected in self._looking.values():
            connected.close()
        for name in ("results", "enqueuer", "database"):
            if name in self.__dict__:
                getattr(self, name).close()


class Parts(Declares):
    """The parts of an App that look into its database and change what is there."""

    _connected: Connected
    _encryption: Encryption | None
    _own_address: Address
    _test_addresses: tuple[Address, ...] = ()
    """Those of the test databases that are open, the newest last."""
    _stand_in: Here | None = None
    """Takes the place of the database for `enqueue`, in a block of `sqlq.testing.inline`."""

    @cached_property
    def _eagerly(self) -> Here:
        from sqlq.app.inline import EagerEnqueuer

        return EagerEnqueuer(self.tasks)

    @property
    def database(self) -> Database:
        """sqlq's own connections to the database."""
        return self._connected.database

    @property
    def url(self) -> URL:
        """The URL of the database."""
        return self._connected.address.url

    @property
    def schema(self) -> str | None:
        """The schema that the App was given; None for the connection's default one."""
        return self._connected.address.schema

    @property
    def jobs(self) -> Jobs:
        """The jobs in the database: to get, list, cancel, reschedule, retry, replay, delete and prune."""
        from sqlq.admin.jobs import Jobs

        connected = self._connected
        return connected.part(Jobs, self.tasks, self._events, connected.results)

    @property
    def queues(self) -> Queues:
        """The queues in the database: to see how full they are, to pause and resume them."""
        from sqlq.admin.queues import Queues

        return self._connected.part(Queues, self._queue_names)

    @property
    def workers(self) -> Workers:
        """The workers on the database, on whatever host: to list, pause, resume, stop and restart them."""
        from sqlq.admin.workers import Workers

        return self._connected.part(Workers)

    @property
    def flows(self) -> Flows:
        """The flows in the database: to get, list, cancel, retry and skip steps of them."""
        from sqlq.admin.flows import Flows

        return self._connected.part(Flows)

    @property
    def limits(self) -> Limits:
        """The limits in the database: to list, set and clear them."""
        from sqlq.admin.limits import Limits

        return self._connected.part(Limits, self._limits)

    @property
    def schedules(self) -> Schedules:
        """The schedules in the database: to list, add, pause, resume, run and remove them, at run time."""
        from sqlq.admin.schedules import Schedules

        connected = self._connected
        return connected.part(Schedules, connected.enqueuer, self._template)

    @property
    def audit(self) -> Audit:
        """The record of what operators did: to list and to prune."""
        from sqlq.admin.facet import Audit

        return self._connected.part(Audit)

    def acting_as(self, actor: str) -> AbstractContextManager[None]:
        """Record each action on the parts of the App in a block as one of this person.

        A row of `app.audit` has its time, its name, its target and the number of rows. The block counts for
        its thread or asyncio task. Outside such blocks the library records nothing. Raises
        `ConfigurationError` for no name.

        >>> with app.acting_as("ada"):  # doctest: +SKIP
        ...     app.jobs.cancel(task="shop.send_receipt")
        """
        from sqlq.admin.facet import acting_as

        return acting_as(actor)

    # -- where it is -----------------------------------------------------------------------------------------

    @contextmanager
    def _on_test_database(self, url: str | URL, *, schema: str | None = None) -> Iterator[None]:
        """Keep the App on a test's database while the block runs; see `sqlq.testing.on_database`. Parts and
        workers of the App's own database refuse to connect meanwhile. The innermost block counts."""
        if url is None:  # guard: a-test-database-is-named
            raise ConfigurationError("the test database's URL is None: name one, as in sqlite:///test.db")
        test = Address(
            database_url(url), None, schema_name(schema), is_test=True, encryption=self._encryption
        )
        self._test_addresses += (test,)
        self._choose_address()
        try:
            yield
        finally:
            self._test_addresses = tuple(other for other in self._test_addresses if other is not test)
            self._choose_address()

    def _move_to(self, address: Address) -> None:
        """Make an address the App's own; where a test database is open, the App goes there afterwards."""
        self._own_address = address
        self._choose_address()  # guard: test-database-is-not-left
        if self._test_addresses:
            log.info("a test database is open: the App goes to another one when it is closed")

    def _choose_address(self) -> None:
        """Go to the newest test database that is open, else to the App's own."""
        self.close()
        address = self._test_addresses[-1] if self._test_addresses else self._own_address
        self._connected = Connected(address, self)

    def _address(
        self,
        url: str | URL | Kept | None = KEPT,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        listen_url: str | URL | None = None,
        *,
        keeps_listen_url: bool = False,
    ) -> Address:
        """Return the address of a database. A URL to listen at that is kept counts only for the same
        database. Raises `ConfigurationError` for arguments that make no address."""
        if url is None and engine is None:  # guard: a-missing-variable-is-no-default
            raise ConfigurationError(
                "the database URL is None, as of os.environ.get for a variable that is not set: set it, or "
                "leave the argument out for SQLQ_DATABASE_URL, pyproject.toml or sqlite:///sqlq.db"
            )
        url = None if isinstance(url, Kept) else url
        if engine is None:
            where = database_url(url)
        elif url is not None:
            raise ConfigurationError("App got both a url and an engine: give one of them")
        else:
            sync = getattr(engine, "sync_engine", engine)
            if not isinstance(sync, Engine):
                raise ConfigurationError(
                    f"App(engine=…) takes an Engine or AsyncEngine, not {type(engine).__name__}; a URL is "
                    "given as App(url)"
                )
            where = supported(sync.url)
        if keeps_listen_url and listen_url and database_url(listen_url).database != where.database:
            listen_url = None  # guard: where-to-listen-goes-with-the-database
        return Address(
            below(Path.cwd(), where),  # a handler may change the directory; guard: files-keep-their-directory
            engine,
            schema_name(schema),
            url_to_listen_at(listen_url),
            is_shut=partial(getattr, self, "_test_addresses"),  # guard: own-database-is-shut
            encryption=self._encryption,
        )

    def close(self) -> None:
        """Close sqlq's own connections. The App may be used again and then opens new ones."""
        if "_connected" in self.__dict__:
            self._connected.close()
