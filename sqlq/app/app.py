"""App: the composition root. It puts the tasks, the database and the defaults together."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from sqlalchemy import URL, Engine

from sqlq.app.connected import Parts
from sqlq.app.options import Defaults, DirectCalls, checked_eager, encryption_of, is_eager, retention_ms
from sqlq.config.constants import PAYLOAD_BYTES
from sqlq.config.durations import Duration, milliseconds
from sqlq.config.urls import shown
from sqlq.database.caller.session import (
    AnySession,
    AnySessionToAwait,
    SessionOfNow,
    asynchronous,
    session_getter,
)
from sqlq.database.timeouts import LOOKS, Use
from sqlq.enqueue.enqueue import Batch, Enqueuer, check_new, spread_over
from sqlq.errors import ConfigurationError, EnqueueError
from sqlq.model.checks import checked_name, checked_queue, checked_word, refusing_by
from sqlq.model.flow import Flow, Plan, plan_of, without_expiry
from sqlq.model.flow_parts import AnyFlow
from sqlq.model.foreign_names import NameOfAnotherQueue
from sqlq.model.job import Job, JobOrFlow, NewJob, R
from sqlq.model.job_options import KEPT, Kept
from sqlq.payload.codec import check_json, json_within
from sqlq.payload.encryption import How, Plain
from sqlq.payload.signatures import signature_of
from sqlq.results.results import Waits

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlq.app.inline import Here
    from sqlq.worker.ipc.parent import NoParent
    from sqlq.worker.options import WorkerOptions
    from sqlq.worker.run.isolated import IsolatedProcesses
    from sqlq.worker.worker import Worker

F = TypeVar("F", bound=Callable[..., Any])
J = TypeVar("J")


def _refuse_options_of_a_job(method: F) -> F:
    """Refuse arguments and options of a job where it is enqueued. The message names their place."""
    known = frozenset(signature_of(method).parameters)

    @wraps(method)
    def checked(self: Any, /, *values: Any, **options: Any) -> Any:
        if len(values) > 2 or not options.keys() <= known:
            raise EnqueueError(
                f"{method.__name__} takes no arguments or options of a job: the job has them, as in "
                'task.new(1, 2).set(delay="1m")'
            )
        return method(self, *values, **options)

    return cast("F", checked)


class App(Parts, Waits):
    """A job queue in one database, and the tasks that its workers run.

    - `url`: the URL of the database; else SQLQ_DATABASE_URL, or `database-url` in pyproject.toml.
    - `engine`: an Engine or AsyncEngine, whose way of connecting sqlq takes, with a pool of its own.
    - `schema`: the schema of the tables; else SQLQ_SCHEMA, or the connection's own.
    - `retention`: how long finished jobs are kept; else SQLQ_RETENTION, or 7 days. "forever" for no end.
    - `listen_url`: a URL for idle workers past a pooler that does not carry LISTEN; else SQLQ_LISTEN_URL.
    - `session`: for jobs enqueued without one: a scoped_session, or a function that returns it, or None.
    - `eager`: whether jobs run in this process, after the commit, see `enqueue`; else SQLQ_EAGER.
    - `defaults`: options for jobs whose task does not set them, as in {"timeout": "5m"}.
    - `queues`: the same by names of queues, before `defaults`; "order" may be "lifo", newest first.
    - `carry`: context variables whose values travel with a job to its handler.
    - `service`: the name of the application among several on one database, and its default queue.
    - `keys`: sign payloads and results; the first writes, all read. Else SQLQ_KEYS. See `sqlq keys new`.
    - `encryption`: "sign", "encrypt", or "read" for keys that only read; else SQLQ_ENCRYPTION.
    - `plain`: plain rows where there are keys: "refuse", "accept", or a list of queues; else SQLQ_PLAIN.
    - `direct_calls`: how a task takes a call as a function: "allow", "warn" or "refuse".

    Without any URL the database is sqlite:///sqlq.db. None is refused, since `os.environ.get` returns it for
    a missing variable. Defaults are options of `task`: queue, priority, max_attempts, timeout, backoff,
    retention, start_within and headers. Workers of a service without other queues serve those that this App
    names. The service owns the schedules that its code declares; see `schedule`. A row with a wrong signature
    fails as `bad_signature`, and so does a plain one that is refused.

    A call of a task, as in `send_receipt(7)`, runs its handler here and now. "warn" and "refuse" find such
    calls, which another queue would have enqueued. Both do nothing in a handler, in `sqlq work` and in tests.

    An App connects to nothing until it is used. A database in memory is for tests: a session on it can
    enqueue jobs, but neither sqlq nor its workers can connect there. Raises `ConfigurationError` for a URL or
    option that cannot be used.

    >>> app = App("sqlite:///shop.db")
    """

    def __init__(
        self,
        url: str | URL | Kept | None = KEPT,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        retention: Duration | None = None,
        listen_url: str | URL | None = None,
        session: SessionOfNow | None = None,
        eager: bool | None = None,
        defaults: Mapping[str, Any] | None = None,
        queues: Mapping[str, Mapping[str, Any]] | None = None,
        carry: Sequence[ContextVar[Any]] = (),
        service: str | None = None,
        keys: Sequence[str] | None = None,
        encryption: How | None = None,
        plain: Plain | None = None,
        direct_calls: DirectCalls = "allow",
    ) -> None:
        if service is not None:
            service = checked_queue(service, "service")
        super().__init__(Defaults(defaults, queues, service=service), carry, service)
        self._encryption = encryption_of(keys, encryption, plain)
        self._retention_ms = retention_ms(retention)
        self._direct_calls = checked_word(direct_calls, "direct_calls", choice=DirectCalls)
        self._arguments: dict[str, Any] = {
            "url": url,
            "engine": engine,
            "schema": schema,
            "listen_url": listen_url,
        }
        self._session = session_getter(session)
        self._eager = is_eager(eager)
        self._move_to(self._address(**self._arguments))

    def use(
        self,
        url: str | URL | Kept | None = KEPT,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | Kept | None = KEPT,
        listen_url: str | URL | Kept | None = KEPT,
        session: SessionOfNow | None = None,
    ) -> None:
        """Point the App at another database, or change its schema, its URL to listen at, or its session. All
        else stays as it is, and so do its tasks.

        - `url`: the URL of the other database.
        - `engine`: an Engine or AsyncEngine for it, in place of the URL.
        - `schema`: the schema of its tables; None takes it away.
        - `listen_url`: as in `App`; None takes it away.
        - `session`: as in `App`; with it alone the App stays where it is.

        For applications that read their configuration after their tasks are imported. The schema does not
        move to an SQLite database, nor the URL to listen at to another database. Jobs enqueued through a
        session go where the session goes. Closes the connections to the old database. Raises as `App` does,
        and for a call without arguments.

        An open test database (`sqlq_app`, `sqlq.testing.on_database`) keeps the App until its end. An
        application factory needs no change to be tested.

        >>> App().use("sqlite:///shop.db")
        """
        more = {"schema": schema, "listen_url": listen_url}
        changes: dict[str, Any] = {name: value for name, value in more.items() if not isinstance(value, Kept)}
        if not isinstance(url, Kept) or engine is not None:
            changes |= {"url": url, "engine": engine}
        if not changes and session is None:  # guard: use-says-something
            raise ConfigurationError(
                "use() says nothing, and would change nothing: give it a url, an engine or a session, as in "
                "app.use(engine=engine)"
            )
        getter = self._session if session is None else session_getter(session)
        if changes:
            arguments = self._arguments | changes  # guard: what-is-not-said-stays
            self._move_to(self._address(**arguments, keeps_listen_url="listen_url" not in changes))
            self._arguments = arguments
        self._session = getter

    # -- enqueue ---------------------------------------------------------------------------------------------

    @_refuse_options_of_a_job
    def enqueue(
        self,
        job: JobOrFlow[J],
        session: AnySession = None,
        *,
        commit: bool = False,
        eager: bool | None = None,
    ) -> J:
        """Put a job, or a flow, into the queue: exactly if the session's transaction commits, and seen by no
        worker before.

        `session` is a Session, scoped_session or Connection of SQLAlchemy with any driver, or a connection of
        psycopg, psycopg2, sqlite3 or Django. It is not committed, rolled back or closed. Without one the
        App's `session` counts. With neither, or with `commit=True`, the job is committed when this returns.
        Raises `EnqueueError` or `ConfigurationError` before anything is written; errors of the database pass
        through.

        With `eager=True` (else the App's `eager`) nothing is written to the queue. The handler runs when
        the session's transaction has committed, and not at all after a rollback. Without a session it runs
        before this returns. It gets its arguments by way of JSON, inside its middleware, and its attempts
        follow at once. The exception of the last attempt is logged, since the commit has succeeded; without a
        session this call raises it. Delays, priorities, timeouts, `isolate` and the App's lifespan do not
        count.

        >>> with Session(engine) as session, session.begin():  # doctest: +SKIP
        ...     session.add(order); session.flush()
        ...     app.enqueue(send_receipt.new(order.id), session=session)
        """
        enqueuer, joined = self._way(session, commit, eager)
        return _answered(job, enqueuer.enqueue(self._batch(job), joined))

    @_refuse_options_of_a_job
    def enqueue_many(
        self,
        jobs: Iterable[NewJob[R]],
        session: AnySession = None,
        *,
        spread: Duration | None = None,
        commit: bool = False,
        eager: bool | None = None,
    ) -> list[Job[R]]:
        """Put many jobs into the queue, all or none, in few statements; the results are in the order of
        `jobs`.

        `spread` spreads their due times evenly over that time, in their order. The first is due at once. Each
        delay of a job's own is added. Raises `EnqueueError` for a `spread` that is no duration.

        >>> app.enqueue_many([poll.new(id) for id in ids], spread="5m")  # doctest: +SKIP
        """
        enqueuer, joined = self._way(session, commit, eager)
        added: list[Job[R]] = enqueuer.enqueue(self._completed(spread_over(jobs, spread)), joined)
        return added

    @_refuse_options_of_a_job
    async def aenqueue(
        self,
        job: JobOrFlow[J],
        session: AnySessionToAwait = None,
        *,
        commit: bool = False,
        eager: bool | None = None,
    ) -> J:
        """`enqueue` with an AsyncSession or AsyncConnection of SQLAlchemy, or a connection of asyncpg
        or psycopg. Without one it works in a thread; the job is committed there even when this
        call is cancelled. With `eager` an `async def` handler is awaited, and a `def` one runs in a
        thread."""
        enqueuer, joined = self._way(session, commit, eager)
        return _answered(job, await enqueuer.aenqueue(self._batch(job), joined))

    @_refuse_options_of_a_job
    async def aenqueue_many(
        self,
        jobs: Iterable[NewJob[R]],
        session: AnySessionToAwait = None,
        *,
        spread: Duration | None = None,
        commit: bool = False,
        eager: bool | None = None,
    ) -> list[Job[R]]:
        """`enqueue_many` with the sessions of `aenqueue`. Without one it works in a thread, as `aenqueue`."""
        enqueuer, joined = self._way(session, commit, eager)
        added: list[Job[R]] = await enqueuer.aenqueue(self._completed(spread_over(jobs, spread)), joined)
        return added

    def signal(
        self, name: str, value: Any = None, session: AnySession = None, *, keep: Duration = "7d"
    ) -> bool:
        """Send a signal: it frees the steps of flows, and the jobs, that wait for its name.

        - `name`: as in `flow.wait` and `sqlq.WaitFor`.
        - `value`: JSON, up to 1 MiB; the result of the steps, and the `signal` of the jobs.
        - `session`: as in `enqueue`; after a rollback of its transaction there was no signal.
        - `keep`: for how long it counts for those that begin to wait later.

        The first signal of a name counts. Returns False for a later one, which changes nothing, until the
        first is kept no more. A worker frees what waits within about a second. Raises `EnqueueError` for a
        name, value or time that is none.

        >>> app.signal(f"approved:{order.id}", {"by": "ada"}, session=session)  # doctest: +SKIP
        True
        """
        with refusing_by(EnqueueError):
            name, keep_ms = checked_name(name, "the signal's name"), milliseconds(keep, "keep")
        text = None
        if value is not None:
            check_json(value, "the signal's value")
            mend = "store the data and pass its id"
            text = json_within(PAYLOAD_BYTES, value, "the signal's value takes", mend)
        enqueuer, joined = self._way(session, commit=False, eager=False)
        return enqueuer.signal(name, text, keep_ms, joined)

    async def asignal(
        self, name: str, value: Any = None, session: AnySessionToAwait = None, *, keep: Duration = "7d"
    ) -> bool:
        """`signal` with the sessions of `aenqueue`. Without one it works in a thread."""
        _, joined = self._way(session, commit=False, eager=False)
        send = partial(self.signal, name, value, keep=keep)
        if joined is None:
            return await asyncio.to_thread(send)
        return bool(await asynchronous(joined).run_sync(send))

    def statement(self, job: NewJob, *, paramstyle: str | None = None) -> tuple[str, Any]:
        """Return SQL that enqueues a job, and its parameters, for a driver that `enqueue` does not know.

        The statement is one INSERT. It returns the job's id. Where a live job holds the unique key it returns
        no row, on MariaDB the id of that job. `paramstyle` is one of PEP 249, or "numeric_dollar" for $1. Its
        default is "pyformat" for PostgreSQL, "format" for MariaDB and "qmark" for SQLite. Named parameters
        are a dict, others a tuple. The table is that of the App's `schema`, or else the first named jobs on
        the connection's search_path. An idle worker of PostgreSQL or MariaDB finds the job within 1.25 s.
        Raises `EnqueueError` as `enqueue`; a missing table is the database's error.

        >>> app = App("sqlite:///shop.db")
        >>> sql, parameters = app.statement(app.named("shop.send_receipt").new(7), paramstyle="named")
        """
        return self._connected.enqueuer.statement(self._completed([job])[0], paramstyle)

    def _batch(self, job: Any) -> Batch:
        """Return a job or flow as it is enqueued."""
        return self._plan_of(job) if isinstance(job, AnyFlow) else self._completed([job])

    def _plan_of(self, flow: AnyFlow) -> Plan:
        """Return a flow as it is written, with what is declared for its jobs."""
        plan = plan_of(flow)
        return plan._replace(jobs=[without_expiry(job) for job in self._completed(plan.jobs)])

    def _completed(self, new: list[NewJob]) -> list[NewJob]:
        """Return jobs with what is declared up to now: headers, limits, and options of their queues. Raises
        `EnqueueError` for anything but a job that can be enqueued."""
        if self._limits:
            new = [self._limited(job) for job in new]
        check_new(new)
        middleware = self._enqueue_middleware
        adds = middleware.are_any or self._tasks.adds_to_jobs or any(job._by_name_alone for job in new)
        return [middleware.with_headers(*self._as_in_its_queue(job)) for job in new] if adds else new

    def _way(self, session: Any, commit: bool, eager: bool | None) -> tuple[Enqueuer | Here, Any]:
        """Return the enqueuer of a job, and the session whose transaction it joins; None for a transaction of
        its own. On a test's database the App's own `eager` does not count: jobs are there to be looked at."""
        default = self._eager and not self._test_addresses
        runs = default if eager is None else checked_eager(eager, "eager")
        if commit and session is not None:
            raise EnqueueError(
                "commit=True is for a transaction of the job's own, and a session is given: leave one of the "
                "two out"
            )
        if session is None and not commit and self._session is not None:
            session = self._session()
        return self._stand_in or (self._eagerly if runs else self._connected.enqueuer), session

    @property
    def _is_in_a_test(self) -> bool:
        """Whether a test runs its jobs inline, or keeps it on a database of its own."""
        return self._stand_in is not None or bool(self._test_addresses)

    def _called(self, task: str) -> None:
        """Warn of a call of a task, or refuse it, by the App's `direct_calls`."""
        if self._direct_calls == "allow" or self._is_in_a_test:
            return
        from sqlq.worker.attempt.context import current_job

        if current_job(None) is not None:
            return
        message = (
            f"{task} was called as a function, which runs it here and now: enqueue it with "
            "app.enqueue(task.new(…)), or call task.handler(…) if here and now is meant"
        )
        if self._direct_calls == "refuse":
            raise ConfigurationError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def migrate(self) -> str | None:
        """Bring the tables up to this version of sqlq, and return the revision they had before (None: there
        were none).

        Does nothing when they are up to date, or newer and usable. Creates an SQLite file. Several processes
        may call it at once, while jobs are enqueued and worked on. Raises `SchemaVersionError` for a database
        too new for this version, and `UnsupportedDatabaseError` for one too old to run it. Raises
        `ConfigurationError` where tables of another program stand in the way."""
        from sqlq.database import migrate as migrating

        with self._connected.address.open(create=True) as database:
            database.require_version()
            return migrating.upgrade(database.engine, self.schema)

    # -- work ------------------------------------------------------------------------------------------------

    def worker(
        self,
        queues: Sequence[str] | Mapping[str, int] | None = None,
        *,
        concurrency: int | None = None,
        lease: Duration | None = None,
        grace: Duration | None = None,
        drain: bool = False,
        max_jobs: int | None = None,
        name: str | None = None,
        max_rss: str | int | None = None,
        max_idle: Duration | None = None,
        poll: Duration | None = None,
        claim_batch: int | None = None,
        ahead: Duration | None = None,
    ) -> Worker:
        """Return a worker in this process. `.run()` blocks until it is stopped; `with app.worker():` runs it
        in a thread while the block runs. `sqlq work` is the usual way, and promises more. Here no
        supervisor watches the process: after its death its jobs wait for their leases to run out. A `def`
        handler past its timeout keeps its slot, and `isolate=True` has no effect.

        - `queues`: served in this order; a mapping to weights, as in {"high": 3, "low": 1}, draws the order.
        - `concurrency`: jobs at a time; 10.
        - `lease`: the time after a crash until others take a job over; 30 s. It is renewed thrice in it.
        - `grace`: the time for running jobs to finish after a stop; 25 s. Then the worker releases them.
        - `drain`: whether it stops when no job is available.
        - `max_jobs`: it stops after this number of jobs.
        - `name`: the name of this worker for operators.
        - `max_rss`: it stops when the process uses more memory, as in "400MB".
        - `max_idle`: it stops when no job has come for this time.
        - `poll`: how often an idle host looks for jobs, beside notifications; 1.25 s, on SQLite 50 ms.
        - `claim_batch`: the most jobs of one claim; 1,000.
        - `ahead`: jobs that start within this time are held beside those in slots; 100 ms, "0s" for none.

        Without `queues` the worker serves all in rotation; that of a `service` those that its App names.
        SQLQ_CONCURRENCY, SQLQ_LEASE, SQLQ_GRACE, SQLQ_POLL, SQLQ_CLAIM_BATCH and SQLQ_AHEAD, then
        `pyproject.toml`, set what is not given.

        >>> with app.worker(["mail"]) as worker:  # doctest: +SKIP
        ...     serve_web()
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "queues")}
        from sqlq.worker.options import WorkerOptions

        return self._worker(WorkerOptions.of(queues, **arguments))

    def _worker(
        self,
        options: WorkerOptions,
        supervision: NoParent | None = None,
        isolates: IsolatedProcesses | None = None,
    ) -> Worker:
        from sqlq.worker.options import AppParts
        from sqlq.worker.worker import Worker

        options = replace(options, retention_ms=self._retention_ms)
        if options.queues is None and self._schedules.service:
            queues = sorted(self._queue_names())
            options = replace(options, queues=tuple(queues), weights=dict.fromkeys(queues, 1))  # in turns
        parts = AppParts(
            self.database,
            self.tasks,
            self._plan_of,
            lifespan=self._lifespan,
            events=self._events,
            schedules=self._schedules,
            declares=["limit"] if self._limits else [],
            newest_first=self._defaults.newest_first,
        )
        return Worker(parts, options, supervision=supervision, isolates=isolates)

    def __repr__(self) -> str:
        return f"<sqlq.App {len(self.tasks)} tasks, {shown(self.url)}>"

    def _for_looking(self, url: URL | None, use: Use = LOOKS) -> Self:
        """Return this App for pages that people look at: each statement ends in time. With a `url` it reads
        from a replica."""
        app = copy.copy(self)
        app._connected = self._connected.for_looking(url, use)
        return app


def _answered(job: JobOrFlow[J], done: Any) -> J:
    """Return the answer of `enqueue` for a job or flow that is enqueued by now."""
    if isinstance(job, Flow):
        job._is_closed = True
    answer: J = done if isinstance(job, AnyFlow) else done[0]
    return answer


NameOfAnotherQueue.answer(
    App,
    {
        "apply_async send_task queue_task": "app.enqueue(app.named(name).new(…))",
        "enqueue_at enqueue_in": 'app.enqueue(task.new(…).set(delay="1m"))',
        "actor": "@app.task",
        "AsyncResult": "app.jobs.get(id), or app.result(id)",
        "cancel": "app.jobs.cancel([job])",
        "retry": "app.jobs.retry([job]) for one that has failed",
        "work": "app.worker().run(), or on the command line sqlq work",
        "add_periodic_task periodic_task": '@app.task(schedule="0 3 * * *")',
        "autodiscover_tasks": "imports of the modules that define tasks, in the one that --app names",
    },
)
