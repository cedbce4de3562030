"""App: the one composition root. It knows the tasks, the database and the defaults, and puts the rooms together."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from sqlalchemy import URL, Engine

from sqlq.clock import Duration, milliseconds
from sqlq.enqueue import AnyAsyncSession, Enqueuer, SyncSession
from sqlq.errors import ConfigurationError
from sqlq.job import Job, JobDetails, NewJob
from sqlq.retry import BackoffOption
from sqlq.settings import CONCURRENCY, DEFAULT_QUEUE, MAX_ATTEMPTS, database_url, schema_name, supported
from sqlq.settings import listen_url as url_to_listen_at
from sqlq.store.database import Database, Place
from sqlq.task import Exceptions, Registry, Task, make_task

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlq.admin import Admin, Cancellation, Pruned, WorkerStatus
    from sqlq.worker.child import Alone
    from sqlq.worker.isolates import Isolates
    from sqlq.worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")

_TASK_OPTIONS = tuple(inspect.signature(make_task).parameters)[1:]
"""All but the handler."""


class App:
    """A job queue in one database, and the tasks its workers run.

    `url` is a database URL; without it SQLQ_DATABASE_URL counts, and then sqlite:///sqlq.db. With `engine` (an Engine or
    AsyncEngine of yours) sqlq makes its own connections the way that engine does, in a pool of its own. `schema` names
    the PostgreSQL schema of the tables (else SQLQ_SCHEMA, else the connection's default one). `retention` says how long
    finished jobs are kept: "0s" for not at all, None for ever. `listen_url` (else SQLQ_LISTEN_URL) leads idle workers past a
    pooler that does not carry LISTEN.

    Making an App connects to nothing. Raises `ConfigurationError` for a URL or option that cannot be used.

    >>> app = App("sqlite:///shop.db")
    """

    def __init__(
        self,
        url: str | URL | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        retention: Duration | None = "7d",
        listen_url: str | URL | None = None,
    ) -> None:
        self.use(url, engine=engine, schema=schema, listen_url=listen_url)
        self.retention_ms = None if retention is None else milliseconds(retention, "retention")
        self.tasks = Registry()

    def use(
        self,
        url: str | URL | None = None,
        *,
        engine: Engine | AsyncEngine | None = None,
        schema: str | None = None,
        listen_url: str | URL | None = None,
    ) -> None:
        """Point the App at another database, as if it had been made with these arguments; its tasks stay.

        For applications that read their configuration after their tasks are imported. Jobs enqueued through a session go
        where the session goes. Closes the connections to the database before; raises as `App` does.
        """
        if url is not None and engine is not None:
            raise ConfigurationError("App got both a url and an engine: give one of them")
        if engine is not None:
            sync = getattr(engine, "sync_engine", engine)
            if not isinstance(sync, Engine):
                raise ConfigurationError(
                    f"App(engine=…) takes an Engine or AsyncEngine, not {type(engine).__name__}; a URL is given as App(url)"
                )
            supported(sync.url)
        found, schema, listen_at = database_url(url) if engine is None else None, schema_name(schema), url_to_listen_at(listen_url)
        if hasattr(self, "place"):
            self.close()
        for opened in ("database", "enqueuer", "admin"):
            self.__dict__.pop(opened, None)
        self.place: Place = Place(found, engine, schema, listen_at)

    @cached_property
    def database(self) -> Database:
        """sqlq's own connections to the database."""
        return self.place.open()

    @cached_property
    def enqueuer(self) -> Enqueuer:
        """What `enqueue` goes through; `sqlq.testing.inline` puts another in its place."""
        return Enqueuer(self.database)

    @cached_property
    def admin(self) -> Admin:
        """What an operator may do."""
        from sqlq.admin import Admin

        return Admin(self.database)

    # -- tasks -------------------------------------------------------------------------------------------------------

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
        retry_on: Exceptions | None = None,
        fail_on: Exceptions = (),
        isolate: bool = False,
        aliases: Sequence[str] = (),
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, handler: Any = None, /, **options: Any) -> Any:
        """Make a task of a function: `@app.task` or `@app.task(queue="mail", max_attempts=5)`.

        The task is named `module.function` unless `name=` says otherwise. `backoff` is the wait before the next attempt: a duration, a
        list of them, a callable from the number of attempts to a duration, or one of `sqlq.exponential` (the default), `fixed`,
        `linear`, `fibonacci`. With `retry_on` only these exceptions are followed by another attempt; after those in `fail_on` none
        follows. `aliases` are names the task had before: jobs that wait under one of them run, too. `def` handlers run in threads,
        `async def` handlers on an event loop. Raises `ConfigurationError` for a function no worker could find by its name, a name or
        alias that is taken, and any option out of range.

        >>> @app.task(queue="mail", max_attempts=5, timeout="30s")  # doctest: +SKIP
        ... def send_receipt(order_id: int) -> None: ...
        """
        unknown = options.keys() - _TASK_OPTIONS
        if unknown:
            raise ConfigurationError(f"@app.task has no option {', '.join(sorted(unknown))}; it has {', '.join(_TASK_OPTIONS)}")

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            task = make_task(function, **options)
            self.tasks.add(task)
            return task

        if handler is None:
            return register
        if not callable(handler):
            raise ConfigurationError(f"@app.task was given {handler!r}: options are named, as in @app.task(queue='mail')")
        return register(handler)

    # -- enqueue -----------------------------------------------------------------------------------------------------

    def enqueue(self, job: NewJob, session: SyncSession | None = None) -> Job:
        """Put a job into the queue: exactly if the session's transaction commits, and seen by no worker before.

        `session` is a Session, scoped_session or Connection, with whatever driver; it is not committed, rolled back or
        closed. Without one the job is committed when this returns. Raises `EnqueueError` or `ConfigurationError` before
        anything is written; errors of the database pass through.

        >>> with Session(engine) as session, session.begin():  # doctest: +SKIP
        ...     session.add(order); session.flush()
        ...     app.enqueue(send_receipt.new(order.id), session=session)
        """
        return self.enqueuer.enqueue([job], session)[0]

    def enqueue_many(self, jobs: Iterable[NewJob], session: SyncSession | None = None) -> builtins.list[Job]:
        """Put many jobs into the queue, all or none, in few statements; the results are in the order of `jobs`."""
        return self.enqueuer.enqueue(list(jobs), session)

    async def aenqueue(self, job: NewJob, session: AnyAsyncSession | None = None) -> Job:
        """`enqueue` with an AsyncSession or AsyncConnection; without one, in a thread."""
        return (await self.enqueuer.aenqueue([job], session))[0]

    async def aenqueue_many(self, jobs: Iterable[NewJob], session: AnyAsyncSession | None = None) -> builtins.list[Job]:
        """`enqueue_many` with an AsyncSession or AsyncConnection; without one, in a thread."""
        return await self.enqueuer.aenqueue(list(jobs), session)

    # -- look and mend -----------------------------------------------------------------------------------------------

    def get(self, id: int) -> JobDetails:
        """Return everything about a job, whatever its state. Raises `JobNotFoundError`."""
        return self.admin.get(id)

    def list(
        self, *, state: str | None = None, queue: str | None = None, task: str | None = None, limit: int = 100
    ) -> builtins.list[JobDetails]:
        """Return the newest jobs, of a state, queue or task if given, at most `limit`."""
        return self.admin.list(state=state, queue=queue, task=task, limit=limit)

    def retry_failed(
        self, ids: Sequence[int] = (), *, task: str | None = None, queue: str | None = None, all: bool = False
    ) -> builtins.list[int]:
        """Move failed jobs back to be run again, with all their attempts, under the same id; return the ids moved.

        By ids, by task, by queue, or `all=True`. A job whose unique key a live job holds stays failed.
        """
        return self.admin.retry_failed(ids, task=task, queue=queue, all=all)

    def cancel(
        self, ids: Sequence[int] = (), *, task: str | None = None, queue: str | None = None, force: bool = False
    ) -> dict[int, Cancellation]:
        """Cancel live jobs, by ids, by task or by queue, and say what became of each.

        A waiting job is "cancelled". A running one is "requested": its worker sees that at its next heartbeat, within
        10 s, and asks the handler to stop. With `force` it is cancelled here and now, and whatever its worker still
        writes for it counts for nothing. Of ids also "ended", "unknown", "passed over" (not of the task or queue named)
        and "locked" (try again).

        >>> app.cancel([42, 43]) == {42: "cancelled", 43: "requested"}  # doctest: +SKIP
        True
        """
        return self.admin.cancel(ids, task=task, queue=queue, force=force)

    def pause(self, queue: str) -> bool:
        """Let no worker claim from a queue until it is resumed; return whether it was not paused before.

        What is claimed already still runs, and enqueueing goes on. A queue that is not known yet may be paused, too.
        """
        return self.admin.pause([queue])[0].changed

    def resume(self, queue: str) -> bool:
        """Let workers claim from a queue again; return whether it was paused."""
        return self.admin.resume([queue])[0].changed

    def prune(self, *, finished: Duration | None = None, failed: Duration | None = None) -> Pruned:
        """Delete jobs that finished or were cancelled longer ago than `finished`, and jobs that failed longer ago than
        `failed`; return how many of each. Workers prune finished jobs by themselves (`retention`), failed ones nobody does.

        >>> app.prune(finished="7d", failed="30d")  # doctest: +SKIP
        Pruned(finished=1200, failed=3)
        """
        return self.admin.prune(finished=finished, failed=failed)

    def workers(self) -> builtins.list[WorkerStatus]:
        """Return the workers that are alive and the jobs that each holds, the longest running first."""
        return self.admin.workers()

    def migrate(self) -> str | None:
        """Bring the tables up to this version of sqlq, and return the revision they had before (None: there were none).

        Does nothing when they are up to date, or newer and usable. Creates an SQLite file. Safe to call from several
        processes at once, and while jobs are enqueued and worked on. Raises `SchemaVersionError` for a database too new
        for this version, `UnsupportedDatabaseError` for one that is too old to run it, `ConfigurationError` where tables
        of another program stand in the way.
        """
        from sqlq.schema import migrate

        with self.place.open(create=True) as database:
            database.require_version()
            return migrate.upgrade(database.engine, self.place.schema)

    # -- work --------------------------------------------------------------------------------------------------------

    def worker(
        self,
        queues: Sequence[str] | None = None,
        *,
        concurrency: int = CONCURRENCY,
        lease: Duration = "30s",
        grace: Duration = "25s",
        drain: bool = False,
        max_jobs: int | None = None,
        max_lifetime: Duration | None = None,
        ties: Alone | None = None,
        isolates: Isolates | None = None,
    ) -> Worker:
        """Return a worker in this process; `.run()` blocks until it is stopped. `sqlq work` is the usual way to run one, and
        promises more: here nobody watches the process, so that its jobs wait for their leases to run out when it dies, a `def`
        handler past its timeout keeps its slot, and `isolate=True` has no effect.

        `queues` are served in the order given, without it all in rotation. `concurrency` jobs run at a time. A `lease`
        is renewed three times in its length. When stopped, running jobs have `grace` to finish; then they are given
        back. With `drain` it stops when nothing is available, with `max_jobs` after that many, with `max_lifetime` after
        that time. (`ties` and `isolates` are for `sqlq work`.)
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
            retention_ms=self.retention_ms,
        )
        return Worker(self.database, self.tasks, options if ties is None else options.jittered(), ties=ties, isolates=isolates)

    def close(self) -> None:
        """Close sqlq's own connections. The App may be used again and then opens new ones."""
        if "enqueuer" in self.__dict__:
            self.enqueuer.close()
        if "database" in self.__dict__:
            self.database.close()
