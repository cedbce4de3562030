"""App: the one composition root. It knows the tasks, the database and the defaults, and puts the rooms
together."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, overload

from sqlalchemy import URL, Engine

from sqlq.around import Scope, around_scope, lifespan_scope
from sqlq.backoff import BackoffOption
from sqlq.clock import Duration
from sqlq.defaults import Defaults, retention_ms
from sqlq.enqueue import Enqueuer, Enqueues, check_new, listed, spread_over
from sqlq.errors import ConfigurationError
from sqlq.events import EventName, Events, Hear, checked_names
from sqlq.flow import FLOWS, AnyFlow, Flow, FlowDetails, Plan, without_expiry
from sqlq.job import KEPT, Follows, Job, JobDetails, JobOrFlow, Kept, NewJob, checked_name
from sqlq.limit import AnyLimit, DeclaredLimits, Limit
from sqlq.named import NamedTask
from sqlq.results import Waits
from sqlq.schedule import CatchUp, Declarations, Declared, Overlap, Schedule, checked_template, planned
from sqlq.seal import How, Unsealed, seal_of
from sqlq.session import (
    AnySession,
    AnySessionToAwait,
    SessionOfNow,
    checked_session_of_now,
    own,
    session_of_now,
)
from sqlq.settings import CONCURRENCY, DEFAULT_QUEUE, MAX_ATTEMPTS, database_url, schema_name, supported
from sqlq.settings import eager as is_eager
from sqlq.settings import listen_url as url_to_listen_at
from sqlq.stamp import Stamp, Stamps
from sqlq.store.database import Address, Database, Gate
from sqlq.task import Exceptions, Isolate, Registry, Task, make_task

if TYPE_CHECKING:
    from typing import Unpack

    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlq.admin import Admin, Cancellation, Pruned, WorkerStatus
    from sqlq.fleet import Fleet
    from sqlq.replay import EndedState, Replayed, ReplayOptions
    from sqlq.replay import Progress as ReplayProgress
    from sqlq.schedules import Schedules
    from sqlq.worker.child import Unsupervised
    from sqlq.worker.isolates import Isolates
    from sqlq.worker.running import RunningJob
    from sqlq.worker.worker import Worker

Context: TypeAlias = (
    "AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | Iterator[Any] | AsyncIterator[Any]"
)
Around: TypeAlias = "Callable[[RunningJob], Context]"
A = TypeVar("A", bound=Around)
H = TypeVar("H", bound=Hear)
L = TypeVar("L", bound="Callable[[], Context]")
S = TypeVar("S", bound=Stamp)
P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")
log = logging.getLogger("sqlq")

_TASK_OPTIONS = tuple(inspect.signature(make_task).parameters)[1:]
"""All but the handler."""


class App(Waits):
    """A job queue in one database, and the tasks its workers run.

    `url` is a database URL; without it SQLQ_DATABASE_URL counts, and then sqlite:///sqlq.db. With `engine`
    (an Engine or AsyncEngine of yours) sqlq makes its own connections the way that engine does, in a pool of
    its own. `schema` names the PostgreSQL schema of the tables (else SQLQ_SCHEMA, else the connection's
    default one). `retention` (else SQLQ_RETENTION) says how long finished jobs are kept: "0s" for not at all,
    None for ever. `listen_url` (else SQLQ_LISTEN_URL) leads idle workers past a pooler that does not carry
    LISTEN. `session` is for jobs that are enqueued without one: a scoped_session, or a function that returns
    the session or connection of the moment, or None. With `eager` (else SQLQ_EAGER) jobs run where they are
    enqueued, and nothing is written: see `enqueue`.

    `defaults` are options of jobs whose task does not say them: queue, priority, max_attempts, timeout,
    backoff, retention, expires, headers. `queues` maps names of queues to options that count for jobs in
    them, above `defaults`; with `"order": "lifo"` workers of this App take the newest job of a priority
    first. `carry` lists context variables whose values travel with a job: its handler sees
    them as they were where the job was enqueued. `service` names the application among several on one
    database: schedules that its code declares are its own, see `schedule`.

    With `keys` (else SQLQ_KEYS), which `sqlq keys new` makes, payloads and results are sealed, by the first
    of them: signed, or with `seal="encrypt"` (else SQLQ_SEAL) encrypted. What any of them has sealed is
    opened; a row whose seal is bad fails as `bad_signature`, and so does a plain one, unless `unsealed` (else
    SQLQ_UNSEALED) is "take", or lists its queue.

    Making an App connects to nothing. An SQLite database in memory is of use in tests only: jobs can be
    enqueued through a session on it, but sqlq itself, and its workers, cannot connect there. Raises
    `ConfigurationError` for a URL or option that cannot be used.

    >>> app = App("sqlite:///shop.db")
    """

    def __init__(
        self,
        url: str | URL | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        retention: Duration | Kept | None = KEPT,
        listen_url: str | URL | None = None,
        session: SessionOfNow | None = None,
        eager: bool | None = None,
        defaults: Mapping[str, Any] | None = None,
        queues: Mapping[str, Mapping[str, Any]] | None = None,
        carry: Sequence[ContextVar[Any]] = (),
        service: str | None = None,
        keys: Sequence[str] | None = None,
        seal: How | None = None,
        unsealed: Unsealed | None = None,
    ) -> None:
        self._gate = Gate()
        self.seal = seal_of(keys, seal, unsealed)
        """What payloads and results are sealed and opened with; None without keys."""
        self._test_addresses: builtins.list[Address] = []
        self._move_to(self._address(url, engine, schema, listen_url))
        self._session = checked_session_of_now(session)
        self._eager = is_eager(eager)
        self.stand_in: Enqueues | None = None
        """What `enqueue` goes through in place of the database, in a block of `sqlq.testing.inline`."""
        self.retention_ms = retention_ms(retention)
        self._defaults = Defaults(defaults, queues)
        self._stamps = Stamps(carry)
        self.tasks = Registry(self, always=[scope] if (scope := self._stamps.scope()) else ())
        self._fair: Limit | None = None
        self.limits = DeclaredLimits()
        """The limits that its tasks, and calls of `limit`, have declared."""
        self.lifespan_scope: Scope | None = None
        """What surrounds the life of each process that runs handlers."""
        self._declarations = Declarations(
            None if service is None else checked_name(service, "service", ConfigurationError)
        )
        self.events = Events()
        """Those who listen to what becomes of jobs."""

    def use(
        self,
        url: str | URL | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        listen_url: str | URL | None = None,
        session: SessionOfNow | None = None,
    ) -> None:
        """Point the App at another database, as if it had been made with these arguments; its tasks stay.

        For applications that read their configuration after their tasks are imported. Without `session` the
        App keeps the one it has. Jobs enqueued through a session go where the session goes. Closes the
        connections to the database before; raises as `App` does. While a test database is open (`sqlq_app`,
        `sqlq.testing.on_database`), the App stays there and goes to the new database afterwards: an
        application factory needs no change to be tested.

        >>> App().use("sqlite:///shop.db")
        """
        if session is not None:
            self._session = checked_session_of_now(session)
        self._move_to(self._address(url, engine, schema, listen_url))

    @contextmanager
    def on_test_database(self, url: str | URL, *, schema: str | None = None) -> Iterator[None]:
        """Keep the App on a test's database while the block runs; see `sqlq.testing.on_database`, which calls
        this.

        A worker, or anything else, that was made before of the App's own database refuses to connect
        meanwhile. Of several blocks the newest counts.
        """
        if url is None:  # guard: a-test-database-is-named
            raise ConfigurationError("the test database's URL is None: name one, as in sqlite:///test.db")
        where = database_url(url)
        of_sqlite = where.get_backend_name() == "sqlite" and schema is None  # SQLQ_SCHEMA is meant for others
        schema = None if of_sqlite else schema_name(schema, on=where)
        test = Address(where, None, schema, is_test=True, seal=self.seal)
        self._test_addresses.append(test)
        self._choose_address()
        try:
            yield
        finally:
            self._test_addresses = [other for other in self._test_addresses if other is not test]
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
        for opened in ("database", "_enqueuer", "admin", "schedules", "waiting"):
            self.__dict__.pop(opened, None)
        self.address = self._test_addresses[-1] if self._test_addresses else self._own_address
        self._gate.is_shut = bool(self._test_addresses)  # guard: own-database-is-shut

    def _address(
        self,
        url: str | URL | None,
        engine: Engine | AsyncEngine | None,
        schema: str | None,
        listen_url: str | URL | None,
    ) -> Address:
        if url is not None and engine is not None:
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
            where = database_url(url)
        return Address(
            where if engine is None else None,
            engine,
            schema_name(schema, on=where),
            url_to_listen_at(listen_url),
            gate=self._gate,
            seal=self.seal,
        )

    @cached_property
    def database(self) -> Database:
        """sqlq's own connections to the database."""
        return self.address.open()

    @property
    def enqueuer(self) -> Enqueues:
        """What `enqueue` goes through."""
        return self.stand_in or (self._eagerly if self._is_eager else self._enqueuer)

    @property
    def _is_eager(self) -> bool:
        """Whether jobs run where they are enqueued; on a test's database they are there to be looked at."""
        return self._eager and not self._test_addresses

    @cached_property
    def _eagerly(self) -> Enqueues:
        from sqlq.eager import EagerEnqueuer

        return EagerEnqueuer(self.tasks)

    @cached_property
    def _enqueuer(self) -> Enqueuer:
        return Enqueuer(self.database, self.events)

    @cached_property
    def admin(self) -> Admin:
        """What an operator may do."""
        from sqlq.admin import Admin

        return Admin(self.database)

    @property
    def fleet(self) -> Fleet:
        """The workers on this database, on whatever host: to pause, resume, stop and restart them."""
        from sqlq.fleet import Fleet

        return Fleet(self.database)

    @cached_property
    def schedules(self) -> Schedules:
        """The schedules in the database: to list, add, change, pause, resume, run, remove and backfill them,
        at run time."""
        from sqlq.schedules import Schedules

        return Schedules(self.database, self._enqueuer, self._as_template)

    # -- tasks -----------------------------------------------------------------------------------------------

    @overload
    def task(self, handler: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        handler: None = None,
        /,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        max_attempts: int = MAX_ATTEMPTS,
        priority: int = 0,
        timeout: Duration | None = None,
        backoff: BackoffOption | None = None,
        retention: Duration | Kept | None = KEPT,
        expires: Duration | None = None,
        headers: Mapping[str, Any] | None = None,
        retry_on: Exceptions | None = None,
        fail_on: Exceptions = (),
        isolate: Isolate = False,
        on_success: Follows | None = None,
        on_failure: Follows | None = None,
        aliases: Sequence[str] = (),
        around: Sequence[Around] | None = (),
        schedule: Schedule | str | None = None,
        limit: AnyLimit | str | None = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, handler: Any = None, /, **options: Any) -> Any:
        """Make a task of a function: `@app.task` or `@app.task(queue="mail", max_attempts=5)`.

        The task is named `module.function` unless `name=` says otherwise. `backoff` is the wait before the
        next attempt: a duration, a list of them, a callable from the number of attempts to a duration, or one
        of `sqlq.exponential` (the default), `fixed`, `linear`, `fibonacci`. With `retry_on` only these
        exceptions are followed by another attempt; after those in `fail_on` none follows. `on_success` and
        `on_failure` are tasks of which a job is enqueued when one of this task has finished, or failed for
        good: in the same transaction, with a `sqlq.Ended` as its argument. `retention` says how long its jobs
        are kept after they have finished or failed, None for ever; `expires` how long after they are due they
        may be started; `headers` are those of its jobs where they do not say otherwise. What the task does
        not say is as the App's `queues` and `defaults` have it. `limit` is a `sqlq.Limit` or `sqlq.Serial`,
        or the name of one that `limit` has declared. `aliases` are names the task had before: jobs that wait
        under one of them run, too. `around` lists what surrounds attempts of this task inside what
        `App.around` has registered; with None nothing surrounds them. With `schedule`, a cron expression in
        UTC or a `sqlq.Schedule`, a job without arguments is enqueued at each of its moments, under the task's
        name. `def` handlers run in threads, `async def` handlers on an event loop; with `isolate` either runs
        in a process of its own, which is kept for the next such job, or with "fresh" runs this one alone.
        Raises
        `ConfigurationError` for a function no worker could find by its name, a name or alias that is taken,
        and any option out of range.

        >>> @app.task(queue="mail", max_attempts=5, timeout="30s")  # doctest: +SKIP
        ... def send_receipt(order_id: int) -> None: ...
        """
        when = options.pop("schedule", None)
        unknown = options.keys() - _TASK_OPTIONS
        if unknown:
            raise ConfigurationError(
                f"@app.task has no option {', '.join(sorted(unknown))}; it has "
                f"{', '.join(_TASK_OPTIONS)}, schedule"
            )

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            if isinstance(function, Task):
                raise ConfigurationError(
                    f"{function.name} is a task already: @app.task takes the function, its handler"
                )
            said = dict(options)
            if said.get("limit") is not None:
                said["limit"] = self.limits.add(self.limits.find(said["limit"]))
            elif self._fair is not None and "limit" not in said and self._fair.suits(function):
                said["limit"] = self._fair
            task = make_task(function, **self._defaults.over(said))
            elsewhere = {
                queue: make_task(function, **self._defaults.over(said, queue))
                for queue in self._defaults.queues - {task.queue}
            }
            task = replace(task, elsewhere=elsewhere, says_expires=said.get("expires") is not None)
            plan = None if when is None else planned(when)
            if plan is not None and (misfit := task.misfit((), {})) is not None:
                raise ConfigurationError(
                    f"schedule is set, but {misfit}: declare it with its arguments, as in "
                    'app.schedule("nightly", task.new(…), cron="0 3 * * *")'
                )
            self.tasks.add(task)
            if plan is not None:
                self._declarations.add(Declared(task.name, plan, self._as_template(task.without_arguments)))
            return task

        if handler is None:
            return register
        if not callable(handler):
            raise ConfigurationError(
                f"@app.task was given {handler!r}: options are named, as in @app.task(queue='mail')"
            )
        return register(handler)

    def limit(self, key: str, *, running: int | None = None, rate: str | None = None) -> Limit:
        """Declare a limit by its key, which then names it: `@app.task(limit="stripe")`, or
        `.set(limit="stripe")` for one job.

        `running`, `rate` and templates of keys are as in `sqlq.Limit`, which this returns. What an operator
        has set (`sqlq limit set`) counts until it is cleared; else what was enqueued last says what the limit
        is. Raises `ConfigurationError` where a limit of this key is declared that says another thing.

        >>> stripe = App().limit("stripe", running=5)
        """
        limit = Limit(key, running, rate)
        self.limits.add(limit)
        return limit

    def fair(self, by: str, *, window: int) -> Limit:
        """Have tenants take turns: of each at most `window` jobs are in the queue at a time, the others wait
        in a line of the tenant's own.

        Counts for the tasks that are declared after this, take the arguments that `by` names, and have no
        limit of their own. The smaller the window, the sooner the first job of a newcomer runs; but about as
        many as one tenant alone is to have running at a time. It is a `sqlq.Limit`, which this returns.
        Raises `ConfigurationError` as that, and for a `by` that names no argument.

        >>> tenants = App().fair(by="tenant:{tenant}", window=10)
        """
        limit = Limit(by, running=window)
        if limit.is_plain:
            raise ConfigurationError(
                f'by is {by!r}, which names no argument: write by="tenant:{{tenant}}", say'
            )
        self.limits.add(limit)
        self._fair = limit
        return limit

    def named(self, name: str) -> NamedTask:
        """Return a task by its name alone, for a process that does not import its handler: a web application,
        say, whose workers run other code.

        `.new(…)` takes any arguments. They are JSON, or values that JSON has a form for, such as a UUID, a
        datetime or a dataclass. Whether they fit is found out by the worker. Its task says how often the job
        may be tried, with what backoff and timeout; queue and priority of the task are not known here, and
        are `.set(…)`. A task that is registered here makes its jobs as ever. Raises `EnqueueError` for what
        cannot be a name.

        >>> job = App().named("shop.send_receipt").new(7).set(queue="mail")
        """
        return NamedTask(name, self.tasks.get(name))

    def schedule(
        self,
        name: str,
        job: NewJob[Any],
        when: Schedule | str | None = None,
        /,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        at: datetime | None = None,
        timezone: str | None = None,
        repeats: int | None = None,
        starts: datetime | None = None,
        ends: datetime | None = None,
        jitter: Duration | None = None,
        catch_up: CatchUp | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """Declare a schedule: a job like this one is enqueued at each of its moments, once, however many
        workers there are. The options are those of `sqlq.Schedule`; `when` is one, or a cron expression.

        Nothing is written here. A worker that starts writes what its code declares and retires what it
        declares no more: of an App with a `service` all that is its own, else what is of a task that it has.
        A worker of an earlier deploy changes nothing back. What an operator has paused or changed stays so.
        Schedules added at run time, by `app.schedules`, are left alone. Names are unique in a database.
        Raises `ConfigurationError` for another schedule of the same name, and for what cannot be one.

        >>> app.schedule("nightly", report.new(), cron="0 3 * * *")  # doctest: +SKIP
        """
        name = checked_name(name, "the schedule's name", ConfigurationError)
        options = {"cron": cron, "every": every, "at": at, "timezone": timezone, "repeats": repeats}
        options |= {"starts": starts, "ends": ends, "jitter": jitter}
        plan = planned(when, **options, catch_up=catch_up, overlap=overlap)
        self._declarations.add(Declared(name, plan, self._as_template(checked_template(job, name))))

    def write_declared(self) -> None:
        """Write the schedules that code declares, and retire those that it declares no more, as a worker does
        that starts now."""
        from sqlq.store import schedules

        declared = self._declarations
        schedules.follow(self.database, declared.declared, declared.service, self.tasks, lambda: 0.0)

    def _as_template(self, job: NewJob[Any]) -> NewJob[Any]:
        """Return the job of a schedule with what its task and queue say of jobs. No stamps: what they say
        belongs to the moment of an enqueue, and would make another schedule of it at each deploy."""
        job = self._limited(job)  # guard: a-schedule-knows-its-limit
        task = self.tasks.get(job.task)
        if task is None:
            return job
        if job.queue != task.queue and task.elsewhere:
            task = task.for_queue(job.queue)
            job = replace(job, **_as_in_queue(job, task))
        return Stamps().stamped(job, task.headers, {}) if task.headers else job

    # -- hooks -----------------------------------------------------------------------------------------------

    def around(self, function: A) -> A:
        """Surround every attempt of every task: `@app.around` on a generator function that yields once, or on
        anything else that makes a context manager of the `RunningJob`.

        It runs where the handler runs, in a worker's thread, event loop or isolated process and in
        `sqlq.testing.inline`: what it sets up, contextvars included, is there for the handler. Of several
        the first registered is the outermost. A `def` one surrounds `def` and `async def` handlers, an
        `async def` one `async def` handlers only. It sees the handler's exception, and may raise another one
        in its place, such as `sqlq.Retry`; what it raises is the attempt's outcome, also before or after the
        handler. An attempt whose exception it swallows has finished, without a result. A task's timeout
        covers it. Raises `ConfigurationError` for what cannot surround an attempt.

        >>> @app.around  # doctest: +SKIP
        ... def in_web_context(running):
        ...     with web.app_context():
        ...         yield
        """
        self.tasks.surround(around_scope(function))
        return function

    def lifespan(self, function: L) -> L:
        """Surround the life of every process that runs handlers: `@app.lifespan` on a generator function,
        sync or async, that yields once, or on anything else that makes a context manager.

        For clients, pools and models that handlers share. What it yields is `sqlq.current_job().lifespan`. A
        worker enters it before its first job and leaves it after its last, within the grace time; each
        process of an isolated job has its own. An asynchronous one lives on the event loop of `async def`
        handlers, another one in a thread. When entering fails, the worker does not start. When a worker is
        killed, or stopped at once, nothing leaves it. In `sqlq.testing.drain` it lasts as long as the call;
        `sqlq.testing.inline` does not enter it, and is given a value instead. Raises `ConfigurationError` for
        what cannot be one, and for a second one.

        >>> @app.lifespan  # doctest: +SKIP
        ... async def clients():
        ...     async with httpx.AsyncClient() as client:
        ...         yield client
        """
        scope = lifespan_scope(function)
        if self.lifespan_scope is not None:
            raise ConfigurationError(
                f"lifespan is {scope.name}, but {self.lifespan_scope.name} is there already: enter both in "
                "one function"
            )
        self.lifespan_scope = scope
        return function

    def on(self, *names: EventName) -> Callable[[H], H]:
        """Have a function told what has become of jobs: `@app.on("failed", "retried")` on a `def` function of
        a list of `JobEvent`.

        The events are those that happen in this process: `enqueued` (when the transaction commits),
        `started`, and what a worker has written at the end of an attempt: `finished`, `retried`, `failed`
        (for good), `snoozed`, `released` (given back uncounted), `cancelled`; `lost` (the job has another
        owner), and `rescued` (taken from a worker that died, to run again). The function runs in a thread of
        its own, some events at a time, soon afterwards. What it raises is logged, and changes nothing; events
        that come while 100,000 wait are dropped and counted in the log. A worker that stops lets it hear the
        rest within the grace time. Raises `ConfigurationError` for a name that is no event, and for what
        cannot listen.

        >>> @app.on("failed")  # doctest: +SKIP
        ... def alarm(events):
        ...     for event in events:
        ...         pager.send(f"{event.task} {event.id}: {event.reason}")
        """
        checked_names(names)

        def listen(function: H) -> H:
            self.events.add(names, function)
            return function

        return listen

    def stamp(self, function: S) -> S:
        """Add headers to every job that this App enqueues: `@app.stamp` on a function of the job, which
        returns a mapping of names to JSON, or None.

        It is called where the job is enqueued, once for each job, before anything is written; what it raises
        comes out of `enqueue`. Of several the last one registered wins, and what the job itself says
        (`.set(headers=…)`) wins over all. Raises `ConfigurationError` for what cannot stamp.

        >>> @app.stamp  # doctest: +SKIP
        ... def origin(job):
        ...     return {"request_id": request_id.get(None)}
        """
        self._stamps.add(function)
        return function

    # -- enqueue ---------------------------------------------------------------------------------------------

    def enqueue(self, job: JobOrFlow[J], session: AnySession = None, *, eager: bool | None = None) -> J:
        """Put a job, or a flow, into the queue: exactly if the session's transaction commits, and seen by no
        worker before.

        `session` is a Session, scoped_session or Connection of SQLAlchemy, with whatever driver, or a
        connection of psycopg, psycopg2, sqlite3 or Django; it is not committed, rolled back or closed.
        Without one the App's `session` counts, and where that has none, or with `sqlq.own`, the job is
        committed when this returns. Raises `EnqueueError` or `ConfigurationError` before anything is written;
        errors of the database pass through.

        With `eager` (else what the App says) the handler runs before this returns, inside the caller's
        transaction if there is one, and nothing is written to the queue: with its arguments by way of JSON,
        what surrounds it, and its attempts at once after each other. What its last attempt raises comes out
        here. Delays, priorities, timeouts, `isolate` and the App's lifespan do not count.

        >>> with Session(engine) as session, session.begin():  # doctest: +SKIP
        ...     session.add(order); session.flush()
        ...     app.enqueue(send_receipt.new(order.id), session=session)
        """
        enqueuer, joined = self._way(session, eager)
        new: Any = job
        done: Any = (
            enqueuer.enqueue_flow(self.planned(new), joined)
            if isinstance(new, FLOWS)
            else enqueuer.enqueue(self._stamped([new]), joined)[0]
        )
        answer: J = done
        return answer

    def enqueue_many(
        self,
        jobs: Iterable[NewJob[R]],
        session: AnySession = None,
        *,
        spread: Duration | None = None,
        eager: bool | None = None,
    ) -> builtins.list[Job[R]]:
        """Put many jobs into the queue, all or none, in few statements; the results are in the order of
        `jobs`.

        With `spread` they are due one after the other, evenly over that time, in their order: the first at
        once, or when it says itself, each other so much later than it says itself. Raises `EnqueueError` for
        what is no duration.

        >>> app.enqueue_many([poll.new(id) for id in ids], spread="5m")  # doctest: +SKIP
        """
        enqueuer, joined = self._way(session, eager)
        return enqueuer.enqueue(self._stamped(spread_over(listed(jobs), spread)), joined)

    async def aenqueue(
        self, job: JobOrFlow[J], session: AnySessionToAwait = None, *, eager: bool | None = None
    ) -> J:
        """`enqueue` with an AsyncSession or AsyncConnection of SQLAlchemy, or a connection of asyncpg,
        aiosqlite or psycopg; without one, in a thread, where the job is committed also when this call is
        cancelled, as `asyncio.wait_for` does. With `eager` an `async def` handler is awaited, and a `def` one
        runs in a thread."""
        enqueuer, joined = self._way(session, eager)
        new: Any = job
        done: Any = (
            await enqueuer.aenqueue_flow(self.planned(new), joined)
            if isinstance(new, FLOWS)
            else (await enqueuer.aenqueue(self._stamped([new]), joined))[0]
        )
        answer: J = done
        return answer

    async def aenqueue_many(
        self,
        jobs: Iterable[NewJob[R]],
        session: AnySessionToAwait = None,
        *,
        spread: Duration | None = None,
        eager: bool | None = None,
    ) -> builtins.list[Job[R]]:
        """`enqueue_many` with what `aenqueue` takes; without a session, in a thread, as `aenqueue`."""
        enqueuer, joined = self._way(session, eager)
        return await enqueuer.aenqueue(self._stamped(spread_over(listed(jobs), spread)), joined)

    def planned(self, job: AnyFlow) -> Plan:
        """Return a flow as it is written, with what the App adds to its jobs."""
        plan = Flow.of(job).plan()
        return plan._replace(jobs=[without_expiry(job) for job in self._stamped(plan.jobs)])

    def _stamped(self, new: builtins.list[NewJob[Any]]) -> builtins.list[NewJob[Any]]:
        """Return jobs with what their queue and the App add to them."""
        if self.limits:
            new = [self._limited(job) for job in new]
        if not (self._stamps or self.tasks.adds_to_jobs):
            return new
        check_new(new)
        carried = self._stamps.carried()
        done = []
        for job in new:
            task = self.tasks.get(job.task)
            if task is not None and job.queue != task.queue and task.elsewhere:
                task = task.for_queue(job.queue)
                job = replace(job, **_as_in_queue(job, task))
            done.append(self._stamps.stamped(job, {} if task is None else task.headers, carried))
        return done

    def _limited(self, job: NewJob[Any]) -> NewJob[Any]:
        """Return a job with what its limit says, where it names one."""
        key: str | None = getattr(job, "limit_key", None)
        if key is None:
            return job
        rule = self.limits.rule_of(key, job.rule)
        return job if rule is job.rule else replace(job, rule=rule)

    def statement(self, job: NewJob, *, paramstyle: str | None = None) -> tuple[str, Any]:
        """Return SQL that enqueues a job, and its parameters, for a driver that `enqueue` does not know.

        The statement is one INSERT. It returns the job's id, or no row where a live job holds the unique key.
        `paramstyle` is the driver's, as PEP 249 names it ("qmark", "numeric", "named", "format", "pyformat")
        or "numeric_dollar" for $1; without it "pyformat" for PostgreSQL and "qmark" for SQLite. By names the
        parameters are a dict, else a tuple. The table is that of the App's `schema`, or else the first named
        jobs on the connection's search_path. An idle worker on PostgreSQL finds the job within a second.
        Raises `EnqueueError` as `enqueue`; whether the tables are there is for the database to say.

        >>> app = App("sqlite:///shop.db")
        >>> sql, parameters = app.statement(app.named("shop.send_receipt").new(7), paramstyle="named")
        """
        return self._enqueuer.statement(self._stamped([job])[0], paramstyle)

    def runs_eagerly(self, eager: bool | None) -> bool:
        """Say whether a call with this `eager` runs its jobs at once."""
        return self.stand_in is None and (self._is_eager if eager is None else eager)

    def _way(self, session: Any, eager: bool | None) -> tuple[Enqueues, Any]:
        """Return what a job goes through, and the session whose transaction it joins; None for a transaction
        of its own."""
        if self.runs_eagerly(eager):
            return self._eagerly, None  # which writes nothing
        if session is None:
            session = session_of_now(self._session)
        return self.stand_in or self._enqueuer, None if session is own else session

    # -- look and mend ---------------------------------------------------------------------------------------

    def get(self, id: int) -> JobDetails:
        """Return everything about a job, whatever its state; where its row does not say how often it may be
        tried and how long an attempt may take, what its task says. Raises `JobNotFoundError`.

        >>> app.get(42).progress  # doctest: +SKIP
        Progress(done=25.0, of=100.0, note='writing')
        """
        return self._with_its_tasks(self.admin.get(id))

    def _with_its_tasks(self, job: JobDetails) -> JobDetails:
        task = self.tasks.get(job.task)
        if task is None or (job.max_attempts is not None and job.timeout_ms is not None):
            return job
        task = task.for_queue(job.queue)
        return replace(
            job,
            max_attempts=task.max_attempts if job.max_attempts is None else job.max_attempts,
            timeout_ms=task.timeout_ms if job.timeout_ms is None else job.timeout_ms,
        )

    def list(
        self, *, state: str | None = None, queue: str | None = None, task: str | None = None, limit: int = 100
    ) -> builtins.list[JobDetails]:
        """Return the newest jobs, of a state, queue or task if given, at most `limit`."""
        return self.admin.list(state=state, queue=queue, task=task, limit=limit)

    def flow(self, id: int) -> FlowDetails:
        """Return a flow: how many of its steps are in which state, how far it is, its steps with what they
        wait for, and their results.

        Reads all its steps and their results. Raises `JobNotFoundError`.

        >>> app.flow(7).progress  # doctest: +SKIP
        Progress(done=3, of=4, note=None)
        """
        return self.admin.flow(id)

    async def aget(self, id: int) -> JobDetails:
        """`get` in a thread, so that the event loop goes on meanwhile.

        >>> job = await app.aget(42)  # doctest: +SKIP
        """
        return await asyncio.to_thread(self.get, id)

    async def alist(
        self, *, state: str | None = None, queue: str | None = None, task: str | None = None, limit: int = 100
    ) -> builtins.list[JobDetails]:
        """`list` in a thread, so that the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.list, state=state, queue=queue, task=task, limit=limit)

    async def aflow(self, id: int) -> FlowDetails:
        """`flow` in a thread, so that the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.flow, id)

    def retry_failed(
        self, ids: Sequence[int] = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """Move failed jobs back to be run again, with all their attempts, under the same id; return the ids
        moved.

        By ids, by task, by queue, or `all=True`. A job whose unique key a live job holds stays failed.
        """
        return self.admin.retry_failed(ids, task=task, queue=queue, all=all)

    async def aretry_failed(
        self, ids: Sequence[int] = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """`retry_failed` in a thread, so that the event loop goes on meanwhile. Once begun it goes on to its
        end, also where the awaiting task is cancelled."""
        return await asyncio.to_thread(self.retry_failed, ids, task=task, queue=queue, all=all)

    def cancel(
        self,
        ids: Sequence[int] = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        force: bool = False,
    ) -> dict[int, Cancellation]:
        """Cancel live jobs, by ids, by task or by queue, and say what became of each.

        A waiting job is "cancelled". A running one is "requested": its worker sees that within 2 s, and asks
        the handler to stop. With `force` it is cancelled here and now, and
        whatever its worker still writes for it counts for nothing. Of ids also "ended", "unknown", "passed
        over" (not of the task or queue named) and "locked" (try again).

        >>> app.cancel([42, 43]) == {42: "cancelled", 43: "requested"}  # doctest: +SKIP
        True
        """
        return self.admin.cancel(ids, task=task, queue=queue, force=force)

    async def acancel(
        self,
        ids: Sequence[int] = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        force: bool = False,
    ) -> dict[int, Cancellation]:
        """`cancel` in a thread, so that the event loop goes on meanwhile. Once begun it goes on to its end,
        also where the awaiting task is cancelled."""
        return await asyncio.to_thread(self.cancel, ids, task=task, queue=queue, force=force)

    def replay(
        self,
        ids: int | Sequence[int] = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        state: EndedState | None = None,
        since: datetime | Duration | None = None,
        until: datetime | Duration | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        rate: str | None = None,
        again: bool = False,
        dry_run: bool = False,
        progress: ReplayProgress | None = None,
    ) -> Replayed:
        """Enqueue ended jobs once more, as new jobs with ids of their own; say which became which.

        By id, by task, by queue, or by when they ended: `since` and `until` are moments with a time zone, or
        how long ago, as in "2h"; all that is given must fit. Without `state` finished and failed jobs are
        meant, by id cancelled ones, too. A replay has the task, arguments, queue, priority, options, headers,
        label and limit of the job whose replay it is (`app.get(id).replay_of`), but no unique key, no time to
        be started in, and no cursor. Of one job `args` and `kwargs` may be changed, each as a whole. With a
        `rate`, as in "10/s", they are due one after the other. A `dry_run` counts, shows the first few, and
        writes nothing.

        What was replayed before, or is a replay, is left out, unless `again` is true; of ids that are named
        only what was replayed before. Steps of flows are left out, and refused by id. Done in batches of 500,
        each in a transaction of its own, after which `progress` is called with how many are done, and of how
        many: a call that was broken off and is repeated goes on where it ended. Raises `JobNotFoundError` for
        an id that is not kept any more, and `ConfigurationError` for one that has not ended, before anything
        is written.

        >>> app.replay(42, kwargs={"copy": True}).jobs  # doctest: +SKIP
        {42: 97}
        >>> app.replay(task="shop.send_receipt", since="2h", rate="10/s").number  # doctest: +SKIP
        311
        """
        from sqlq.replay import Replays

        return Replays(self.database, self.tasks, self.events, self._stamps).replay(
            ids,
            task=task,
            queue=queue,
            state=state,
            since=since,
            until=until,
            args=args,
            kwargs=kwargs,
            rate=rate,
            again=again,
            dry_run=dry_run,
            progress=progress,
        )

    async def areplay(self, ids: int | Sequence[int] = (), **options: Unpack[ReplayOptions]) -> Replayed:
        """`replay` in a thread, with the same options, so that the event loop goes on meanwhile. Once begun
        it goes on to its end, also where the awaiting task is cancelled.

        >>> done = await app.areplay(task="shop.send_receipt", since="2h")  # doctest: +SKIP
        """
        return await asyncio.to_thread(self.replay, ids, **options)

    def pause(self, queue: str, *, lasting: Duration | None = None) -> bool:
        """Let no worker claim from a queue until it is resumed, or for as long as `lasting` says; return
        whether it was not paused before. What was said last about the end counts.

        What is claimed already still runs, and enqueueing goes on. A queue that is not known yet may be
        paused, too.

        >>> app.pause("mail", lasting="10m")  # doctest: +SKIP
        True
        """
        return self.admin.pause([queue], lasting=lasting)[0].changed

    def resume(self, queue: str) -> bool:
        """Let workers claim from a queue again; return whether it was paused."""
        return self.admin.resume([queue])[0].changed

    def pause_all(self, *, lasting: Duration | None = None) -> bool:
        """Let no worker claim anything, not even from queues made later, until `resume_all` or for as long as
        `lasting` says; return whether that was not so before. Workers see it within 2 s."""
        return self.admin.pause_all(lasting=lasting)

    def resume_all(self) -> bool:
        """End the pause of all queues; those paused by name stay so. Return whether there was one."""
        return self.admin.resume_all()

    def prune(self, *, finished: Duration | None = None, failed: Duration | None = None) -> Pruned:
        """Delete jobs that finished or were cancelled longer ago than `finished`, and jobs that failed longer
        ago than `failed`; return how many of each. Workers prune finished jobs by themselves (`retention`),
        failed ones they do not.

        >>> app.prune(finished="7d", failed="30d")  # doctest: +SKIP
        Pruned(finished=1200, failed=3)
        """
        return self.admin.prune(finished=finished, failed=failed)

    def workers(self) -> builtins.list[WorkerStatus]:
        """Return the workers that are alive and the jobs that each holds, the longest running first."""
        return self.admin.workers()

    def migrate(self) -> str | None:
        """Bring the tables up to this version of sqlq, and return the revision they had before (None: there
        were none).

        Does nothing when they are up to date, or newer and usable. Creates an SQLite file. Safe to call from
        several processes at once, and while jobs are enqueued and worked on. Raises `SchemaVersionError` for
        a database too new for this version, `UnsupportedDatabaseError` for one that is too old to run it,
        `ConfigurationError` where tables of another program stand in the way.
        """
        from sqlq.schema import migrate

        with self.address.open(create=True) as database:
            database.require_version()
            return migrate.upgrade(database.engine, self.address.schema)

    # -- work ------------------------------------------------------------------------------------------------

    def worker(
        self,
        queues: Sequence[str] | Mapping[str, int] | None = None,
        *,
        concurrency: int = CONCURRENCY,
        lease: Duration = "30s",
        grace: Duration = "25s",
        drain: bool = False,
        max_jobs: int | None = None,
        max_lifetime: Duration | None = None,
        name: str | None = None,
        max_rss: str | int | None = None,
        max_idle: Duration | None = None,
        isolate: bool = False,
        supervision: Unsupervised | None = None,
        isolates: Isolates | None = None,
    ) -> Worker:
        """Return a worker in this process; `.run()` blocks until it is stopped, and `with app.worker():` runs
        it in a thread while the block runs. `sqlq work` is the usual way to run one, and promises more: here
        no supervisor watches the process, so that its jobs wait for their leases to run out when it dies, a
        `def` handler past its timeout keeps its slot, and `isolate=True` has no effect.

        `queues` are served in the order given, or as a mapping to weights in turns, as in {"high": 3, "low":
        1}; without it all in rotation. `concurrency` jobs run at a time.
        A `lease` is renewed three times in its length. When stopped, running jobs have `grace` to finish;
        then they are given back. With `drain` it stops when nothing is available, with `max_jobs` after that
        many, with `max_lifetime` after that time, with `max_idle` when nothing has come for so long, with
        `max_rss` ("400MB") when the process uses more memory. By its `name` operators call it. (`isolate`,
        `supervision` and `isolates` are for `sqlq work`.)

        >>> with app.worker(["mail"]) as worker:  # doctest: +SKIP
        ...     serve_web()
        """
        from sqlq.worker.options import WorkerOptions
        from sqlq.worker.worker import Worker

        options = WorkerOptions.of(
            queues=queues,
            concurrency=concurrency,
            lease=lease,
            grace=grace,
            drain=drain,
            max_jobs=max_jobs,
            max_lifetime=max_lifetime,
            name=name,
            max_rss=max_rss,
            max_idle=max_idle,
            isolate=isolate,
            retention_ms=self.retention_ms,
        )
        return Worker(
            self.database,
            self.tasks,
            options if supervision is None else options.jittered(),
            supervision=supervision,
            isolates=isolates,
            lifespan=self.lifespan_scope,
            events=self.events,
            schedules=self._declarations,
            has_limits=bool(self.limits),
            newest_first=self._defaults.newest_first,
        )

    def close(self) -> None:
        """Close sqlq's own connections. The App may be used again and then opens new ones."""
        if "waiting" in self.__dict__:
            self.waiting.close()
        if "_enqueuer" in self.__dict__:
            self._enqueuer.close()
        if "database" in self.__dict__:
            self.database.close()


def _as_in_queue(job: NewJob[Any], task: Task[..., Any]) -> dict[str, Any]:
    """Return what a task says of its jobs in a queue other than its own, but for what the job says itself."""
    found = {
        "max_attempts": task.max_attempts,
        "priority": task.priority,
        "timeout_ms": task.timeout_ms,
        "retention_ms": task.retention_ms,
        "expires_ms": task.expires_ms,
    }
    return {name: value for name, value in found.items() if name not in job.given}
