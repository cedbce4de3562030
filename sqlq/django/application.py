"""The App of a Django project: on the project's database, in its transactions, with its connections."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Self, TypeVar

import django
from asgiref.sync import async_to_sync, sync_to_async
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections, reset_queries
from django.utils.functional import Promise
from sqlalchemy import URL, Connection, NullPool, create_engine

from sqlq.app.app import App
from sqlq.app.connected import Connected
from sqlq.app.inline import EagerEnqueuer, is_on_a_loop, on_a_loop_of_its_own
from sqlq.config.command_hint import CommandLine
from sqlq.config.urls import in_memory
from sqlq.database.caller.drivers import driver_of
from sqlq.database.caller.session import AnySessionToAwait, connection_of
from sqlq.database.database import Address, Database
from sqlq.database.schemas import in_schema
from sqlq.database.timeouts import LOOKS, Use
from sqlq.django.configuration import Configuration, identity_of, is_testing, url_of
from sqlq.errors import ConfigurationError
from sqlq.model.job import Job, JobOrFlow, NewJob
from sqlq.model.middleware import scope_of
from sqlq.payload.codec import TEXTS
from sqlq.worker.attempt.context import JobContext, attempt_of

TEXTS.append(Promise)  # lazy translations, of which Django's own texts are made
J = TypeVar("J")
R = TypeVar("R")


class DjangoApp(App):
    """The App that the settings describe.

    Without a session, jobs are enqueued on Django's own connection: in the transaction that is open there, or
    at once where none is. Workers and operators' commands use connections of their own to the same database.
    It follows where Django's settings for that database lead, so that in a test run it is on the test's
    database.
    """

    def __init__(self) -> None:
        configuration = self.configuration = Configuration.read()
        self._identity = identity_of(configuration.database)
        self._follows = True
        self._moving = threading.Lock()
        super().__init__(
            url_of(configuration.database), session=self.connection, **configuration.of_the_app()
        )
        if is_testing():
            self._move_to(self._address_in_django())
        self.middleware(fresh_connections)
        self.tasks.surround(replace(scope_of(afresh_connections), skips_def=True))

    @property
    def _is_in_a_test(self) -> bool:
        return super()._is_in_a_test or is_testing()

    def connection(self) -> Any:
        """Return Django's connection to the database of the jobs, of the calling thread; None where the App
        was pointed at another database."""
        if not self._follows or self._test_addresses:
            return None
        return connections[self.configuration.database]  # guard: jobs-join-djangos-transaction

    def use(self, *args: Any, **options: Any) -> None:
        """Point the App at another database; see `App.use`. From then on it follows Django's settings no
        more."""
        before = self._own_address
        super().use(*args, **options)
        self._follows = self._follows and self._own_address is before

    def _for_looking(self, url: URL | None, use: Use = LOOKS) -> Self:
        app: Self = super()._for_looking(url, use)
        app._follows = False  # it reads what is committed, on connections of its own
        return app

    # -- where Django is -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Go where Django's settings lead by now. A test run changes them: its databases have other names."""
        if not self._follows or identity_of(self.configuration.database) == self._identity:
            return
        with self._moving:
            identity = identity_of(self.configuration.database)
            if identity != self._identity:
                self._identity = identity
                self._move_to(self._address_in_django())  # guard: follows-into-the-test-database

    def _address_in_django(self) -> Address:
        url: Any = url_of(self.configuration.database)
        engine = None
        if is_testing() and not in_memory(url):
            # A test database is dropped while the process goes on, which a connection at rest would forbid.
            url, engine = None, create_engine(url, poolclass=NullPool)
        return self._address(url, engine, self.configuration.schema, self.configuration.listen_url)

    def _choose_address(self) -> None:
        super()._choose_address()
        self._connected.database_of_parts = JoinedDatabase(self._connected, self.connection)

    @property
    def _connected(self) -> Connected:
        self._follow()
        connected: Connected = self.__dict__["_connected"]
        return connected

    @_connected.setter
    def _connected(self, connected: Connected) -> None:
        self.__dict__["_connected"] = connected

    @cached_property
    def _eagerly(self) -> EagerEnqueuer:
        return EagerEnqueuer(self.tasks, _run_coroutine)

    # -- on Django's connection ------------------------------------------------------------------------------

    async def aenqueue(self, job: JobOrFlow[J], session: AnySessionToAwait = None, **options: Any) -> J:
        """`App.aenqueue`; without a session where Django's ORM does its work for asynchronous code."""
        if session is not None:
            return await super().aenqueue(job, session, **options)
        return await sync_to_async(self.enqueue)(job, **options)

    async def aenqueue_many(
        self, jobs: Iterable[NewJob[R]], session: AnySessionToAwait = None, **options: Any
    ) -> list[Job[R]]:
        """`App.aenqueue_many`; without a session as `aenqueue`."""
        if session is not None:
            return await super().aenqueue_many(jobs, session, **options)
        return await sync_to_async(self.enqueue_many)(jobs, **options)


def _run_coroutine(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine for a synchronous caller, so that it can use Django's ORM. In a view that Django runs
    in a thread for an event loop, the ORM works in this very thread."""
    if is_on_a_loop():
        return on_a_loop_of_its_own(work)

    async def wait() -> Any:
        return await work

    return async_to_sync(wait)()


class JoinedDatabase:
    """The database as the parts of the App use it: in a transaction that is open on Django's connection, else
    on sqlq's own connections."""

    require_tables = Database.require_tables

    def __init__(self, connected: Connected, connection: Callable[[], Any]) -> None:
        """`connection` returns Django's connection to the database; None where the App was pointed at another
        one."""
        self._connected = connected
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connected.database, name)

    @property
    def _session(self) -> Any:
        """Django's connection, if a transaction is open on it, or no other one reaches its database."""
        session = self._connection()
        if session is None or session.in_atomic_block or in_memory(self.engine.url):
            return session
        return session if session.connection is not None and not session.autocommit else None

    @property
    def may_wait(self) -> bool:
        return self._session is None  # a wait that ends in vain would end the caller's transaction

    @property
    def schema(self) -> str | None:
        database, session = self._connected.database, self._session
        return database.schema if session is None else database.schema_for(connection_of(session))

    @contextmanager
    def read(self, *, within_ms: int | None = None) -> Iterator[Connection]:
        """`Database.read`; without a limit of time in the caller's transaction."""
        if (session := self._session) is None:
            with self._connected.database.read(within_ms=within_ms) as conn:
                yield conn
            return
        conn = connection_of(session)
        with in_schema(conn, self.schema):
            yield conn

    def run(self, work: Callable[[Connection], R], *, tries: int = 5) -> R:
        """`Database.run`; not repeated in the caller's transaction."""
        if (session := self._session) is None:
            return self._connected.database.run(work, tries=tries)
        return self._connected.enqueuer.join(session, work)

    def after_commit(self, work: Callable[[], object]) -> None:
        """`Database.after_commit`; where Django reports no commit, a sweep of the workers does the work."""
        driver = driver_of(self._session)
        if driver is None:
            work()
        else:
            driver.on_commit(work)

    def in_thread(self, work: Callable[..., R], *args: Any, **options: Any) -> Coroutine[Any, Any, R]:
        """Do synchronous work in the thread where Django's ORM works for asynchronous code."""
        return sync_to_async(work)(*args, **options)


_apps: list[DjangoApp] = []
"""The App of the project, once it is made."""


def project_app() -> DjangoApp:
    """Return the App of the project. Raises `ConfigurationError` where the settings cannot be used."""
    if not _apps:
        try:
            if not apps.ready and not apps.loading:  # `sqlq -a sqlq.django:app` is no command of manage.py's
                django.setup()
            if not any(name.startswith("sqlq.django") for name in settings.INSTALLED_APPS):
                raise ConfigurationError("'sqlq.django' is used, but not installed: add it to INSTALLED_APPS")
            app = DjangoApp()
        except ImproperlyConfigured as error:
            raise ConfigurationError(
                "sqlq.django needs the project's settings: set DJANGO_SETTINGS_MODULE, or use manage.py "
                f"sqlq ({error})"
            ) from error
        # where that set Django up, modules of tasks were imported, which have made the App by then
        _apps[:] = _apps or [app]  # guard: a-project-has-one-app
    return _apps[0]


class InProject(CommandLine):
    """How messages name commands in a Django project's processes: manage.py knows the App."""

    def url(self) -> URL | None:
        """Return where the project's App is, if it has been made."""
        return _apps[0].url if _apps else None


# -- Django's connections around attempts --------------------------------------------------------------------


def fresh_connections(running: JobContext) -> Iterator[None]:
    """Do for an attempt what Django does for a request: use no connection that is broken or too old, and
    leave none behind."""
    attempt = attempt_of(running)
    # a handler on a loop has its own, and there is no row in a test's own thread
    if (attempt.registered and attempt.registered.is_async) or not attempt.has_row:
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


async def afresh_connections(running: JobContext) -> AsyncIterator[None]:
    """The same for an asynchronous handler: its connections are those of the thread where Django's ORM works
    for asynchronous code."""
    if not attempt_of(running).has_row:
        yield
        return
    await sync_to_async(_begin)()
    try:
        yield
    finally:
        await sync_to_async(_end)()


def _begin() -> None:
    reset_queries()
    close_old_connections()
    for connection in connections.all(initialized_only=True):
        # Django checks the connection once, when it is first used. A worker is idle for longer than a web
        # server. No attempt of a job should be spent to find out that the database was restarted meanwhile.
        connection.health_check_enabled = True  # guard: idle-connections-are-looked-at


def _end() -> None:
    if is_testing():  # the test database is to be dropped, when this thread is perhaps no more
        connections.close_all()
    else:
        close_old_connections()
