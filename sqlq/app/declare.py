"""How code declares tasks, limits, schedules, middleware and listeners to an App."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, overload

from sqlq.app.options import Defaults
from sqlq.config.durations import Duration
from sqlq.enqueue.enqueue import check_new
from sqlq.enqueue.middleware import BeforeEnqueue, EnqueueMiddleware
from sqlq.errors import ConfigurationError
from sqlq.events import EventName, Events, Receive, check_names
from sqlq.model.backoff import BackoffOption
from sqlq.model.checks import checked_name
from sqlq.model.foreign_names import hints
from sqlq.model.job import NewJob
from sqlq.model.job_options import Follows, JobOptions, job_fields, option_fields
from sqlq.model.limit import AnyLimit, DeclaredLimits, Limit, plain_key, suits
from sqlq.model.middleware import Scope, scope_of
from sqlq.model.schedule import Declarations, Declared, Options, Schedule, checked_template, planned
from sqlq.model.task import AnyTask, Exceptions, Isolate, NamedTask, Registry, Task, make_task

if TYPE_CHECKING:
    from sqlq.worker.attempt.context import JobContext

Context: TypeAlias = (
    "AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | Iterator[Any] | AsyncIterator[Any]"
)
Middleware: TypeAlias = "Callable[[JobContext], Context]"
A = TypeVar("A", bound=Middleware)
H = TypeVar("H", bound=Receive)
L = TypeVar("L", bound="Callable[[], Context]")
S = TypeVar("S", bound=BeforeEnqueue)
P = ParamSpec("P")
R = TypeVar("R")


class TaskOptions(TypedDict, total=False):
    """The options of `App.task`."""

    name: str | None
    queue: str
    max_attempts: int
    priority: int
    timeout: Duration | None
    backoff: BackoffOption | None
    retention: Duration
    start_within: Duration | None
    headers: Mapping[str, Any] | None
    retry_on: Exceptions | None
    fail_on: Exceptions
    isolate: Isolate
    on_success: Follows | None
    on_failure: Follows | None
    on_cancel: Follows | None
    aliases: Sequence[str]
    middleware: Sequence[Middleware] | None
    limit: AnyLimit | str | None
    schedule: Schedule | str | None


class Declares:
    """The methods of an App by which code declares things to it: tasks, limits, schedules, middleware and
    listeners."""

    def __init__(self, defaults: Defaults, carry: Sequence[ContextVar[Any]], service: str | None) -> None:
        self._defaults = defaults
        self._enqueue_middleware = EnqueueMiddleware(carry)
        self._tasks = Registry(self, always=self._enqueue_middleware.scopes())
        self._limits = DeclaredLimits()
        self._fair: Limit | None = None
        """The limit of tasks that have none of their own."""
        self._schedules = Declarations(service)
        self._lifespan: Scope | None = None
        """The middleware of each process that runs handlers."""
        self._events = Events()

    @property
    def tasks(self) -> Registry:
        """The tasks by name."""
        return self._tasks

    def _queue_names(self) -> frozenset[str]:
        """Return the queues that its tasks and its options name, and its default one."""
        return self._defaults.queues | {self._defaults.queue, *(task.queue for task in self._tasks.values())}

    # -- tasks -----------------------------------------------------------------------------------------------

    @overload
    def task(self, handler: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        handler: None = None,
        /,
        **options: Unpack[TaskOptions],
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, handler: Any = None, /, **options: Any) -> Any:
        """Make a task of a function: `@app.task` or `@app.task(queue="mail", max_attempts=5)`.

        The task's name is `module.function`, or `name`. `aliases` are names that it had before: waiting jobs
        of these names run, too. Options that it does not set come from the App's `queues` and `defaults`.

        `backoff` is the wait before the next attempt: a duration, a list of them, or a function of the number
        of attempts. `sqlq.exponential` (the default), `fixed`, `linear` and `fibonacci` make such functions.
        `retry_on` lists the only exceptions after which another attempt follows. After those in `fail_on`
        none follows, nor after a timeout where `JobTimeoutError` is among them.

        `on_success`, `on_failure` and `on_cancel` are tasks. A job of the fitting one follows the end of each
        job, in the same transaction. Its argument is a `sqlq.JobOutcome`. `retention` is how long jobs are
        kept after their end, or "forever". `start_within` is how long after their due time they may start.
        `headers` are defaults for their headers. `limit` is a `sqlq.Limit` or `sqlq.Serial`, or the name of
        one that `limit` has declared.

        `middleware` lists middleware of this task, inside that of `App.middleware`; None leaves all
        middleware out. `schedule` is a cron expression in UTC or a `sqlq.Schedule`: it enqueues a job without
        arguments at each of its times. `def` handlers run in threads, `async def` handlers on an event loop.
        With `isolate` they run in a subprocess, which is kept for the next such job. With "fresh" it runs
        this one job alone.

        Raises `ConfigurationError` for a function that no worker could find by its name. Raises it also for a
        name or alias that is taken, and any option out of range.

        >>> @app.task(queue="mail", max_attempts=5, timeout="30s")  # doctest: +SKIP
        ... def send_receipt(order_id: int) -> None: ...
        """
        known = TaskOptions.__annotations__
        if unknown := sorted(options.keys() - known):
            single = [name for name in unknown if name in JobOptions.__annotations__]
            where = f"a single job has {single[0]}, as in task.new(…).set({single[0]}=…); " if single else ""
            raise ConfigurationError(
                f"@app.task has no option {', '.join(unknown)}; {hints(unknown, known)}{where}it has "
                f"{', '.join(known)}"
            )
        if handler is None:
            return partial(self._register, options)
        if not callable(handler):
            raise ConfigurationError(
                f"@app.task was given {handler!r}: options are named, as in @app.task(queue='mail')"
            )
        return self._register(options, handler)

    def _register(self, options: Mapping[str, Any], function: Callable[..., Any]) -> AnyTask:
        """Make a task of a function, and add it."""
        if isinstance(function, Task):
            raise ConfigurationError(
                f"{function.name} is a task already: @app.task takes the function, its handler"
            )
        options = dict(options)
        when = options.pop("schedule", None)
        if options.get("limit") is not None:
            options["limit"] = self._limits.add(self._limits.find(options["limit"]))
        elif self._fair is not None and "limit" not in options and suits(self._fair, function):
            options["limit"] = self._fair
        task = make_task(function, **self._defaults.over(options))
        elsewhere = {
            queue: make_task(function, **self._defaults.over(options, queue))
            for queue in self._defaults.queues - {task.queue}
        }
        task = replace(task, _elsewhere=elsewhere, _has_start_within=options.get("start_within") is not None)
        plan = None if when is None else planned(when)
        if plan is not None and (reason := task._interface.mismatch((), {})) is not None:
            raise ConfigurationError(
                f"schedule is set, but {reason}: declare it with its arguments, as in "
                'app.schedule("nightly", task.new(…), cron="0 3 * * *")'
            )
        self._tasks.add(task)
        if plan is not None:
            self.schedule(task.name, task._blank, plan)
        return task

    def limit(self, key: str, *, running: int | None = None, rate: str | None = None) -> Limit:
        """Declare a limit by its key, which then names it: `@app.task(limit="stripe")`, or
        `.set(limit="stripe")` for one job.

        `running`, `rate` and templates of keys are as in `sqlq.Limit`, which this returns. An operator's
        `sqlq limits set` counts until it is cleared; else the job that was enqueued last defines the limit.
        Raises `ConfigurationError` where another limit of this key is declared.

        >>> stripe = sqlq.App().limit("stripe", running=5)
        """
        limit = Limit(key, running, rate)
        self._limits.add(limit)
        return limit

    def fair(self, by: str, *, window: int) -> Limit:
        """Have tenants take turns: at most `window` jobs of each are in the queue at a time.

        The others wait in a waiting list of that tenant.

        Counts for the tasks that are declared after this, take the arguments that `by` names, and have no
        limit of their own. With a small window the first job of a newcomer runs soon. The window should be as
        large as the number of jobs that one tenant alone may have running. Returns the `sqlq.Limit`. Raises
        `ConfigurationError` as that, and for a `by` that names no argument.

        >>> tenants = sqlq.App().fair(by="tenant:{tenant}", window=10)
        """
        limit = Limit(by, running=window)
        if plain_key(limit) is not None:
            raise ConfigurationError(
                f'by is {by!r}, which names no argument: write by="tenant:{{tenant}}", say'
            )
        self._limits.add(limit)
        self._fair = limit
        return limit

    def named(self, name: str) -> NamedTask | AnyTask:
        """Return a task by its name alone, for a process that does not import its handler.

        An example is a web application whose workers run other code.

        `.new(…)` takes any arguments: JSON, or values with a form in JSON, such as a UUID, a datetime or a
        dataclass. The worker checks whether they fit. The worker's task also sets attempts, backoff and
        timeout. Its queue, priority, retention, start_within and headers are not known here: this App's
        `queues` and `defaults` count, and `.set(…)`. A task that is registered here makes its jobs as ever.
        Raises `EnqueueError` for a name that cannot be one.

        >>> job = sqlq.App().named("shop.send_receipt").new(7).set(queue="mail")
        """
        return self._tasks.get(name) or NamedTask(name, self._defaults.over({}))

    def schedule(
        self,
        name: str,
        job: NewJob,
        when: Schedule | str | None = None,
        /,
        **options: Unpack[Options],
    ) -> None:
        """Declare a schedule: it enqueues a job like this one at each of its times, once, however many
        workers there are. The options are those of `sqlq.Schedule`; `when` is one, or a cron expression.

        Nothing is written here. A worker that starts writes the schedules of its code, and retires those that
        the code declares no more. With a `service` it retires those of that service, else those of its own
        tasks. A worker of an earlier deploy changes nothing back. Pauses by operators stay, and so do
        schedules that `app.schedules` has added. Names are unique in a database. Raises `ConfigurationError`
        for another schedule of the same name, and for a job or plan that cannot make one.

        >>> app.schedule("nightly", report.new(), cron="0 3 * * *")  # doctest: +SKIP
        """
        name = checked_name(name, "the schedule's name")
        self._schedules.add(
            Declared(name, planned(when, **options), self._template(checked_template(job, name)))
        )

    # -- hooks -----------------------------------------------------------------------------------------------

    def middleware(self, function: A) -> A:
        """Add middleware for every attempt of every task: `@app.middleware`.

        It goes on a generator function that yields once, or on anything else that makes a context manager of
        the `JobContext`.

        It runs where the handler runs: in a worker's thread, event loop or subprocess, and in
        `sqlq.testing.inline`. The handler sees what it sets up, contextvars included. The first registered is
        the outermost. A `def` one runs around all handlers, an `async def` one around `async def` handlers.
        It sees the handler's exception, and may raise another one, such as `sqlq.Retry`. An exception of its
        own is the attempt's outcome, also before or after the handler. An attempt whose exception it swallows
        has finished, without a result. A task's timeout covers it. Raises `ConfigurationError` for an object
        that cannot be middleware, and for an asynchronous one with a `def` handler, whichever comes first.

        >>> @app.middleware  # doctest: +SKIP
        ... def in_web_context(running):
        ...     with web.app_context():
        ...         yield
        """
        self._tasks.surround(scope_of(function))
        return function

    def lifespan(self, function: L) -> L:
        """Add middleware for the life of every process that runs handlers: `@app.lifespan`.

        It goes on a generator function, sync or async, that yields once, or on anything else that makes a
        context manager.

        For clients, pools and models that handlers share. `sqlq.current_job().lifespan` is the value that it
        yields. A worker enters it before its first job, and leaves it after its last within the grace time.
        Each subprocess of an isolated job has its own. An asynchronous one lives on the event loop of `async
        def` handlers, another one in a thread. When entering fails, the worker does not start. When a worker
        is killed, or stopped at once, nothing leaves it. In `sqlq.testing.drain` it lasts as long as the
        call; `sqlq.testing.inline` takes a value in its place. Raises `ConfigurationError` for an object that
        cannot be a lifespan, and for a second one.

        >>> @app.lifespan  # doctest: +SKIP
        ... async def clients():
        ...     async with httpx.AsyncClient() as client:
        ...         yield client
        """
        scope = scope_of(function, "lifespan")
        if self._lifespan is not None:
            raise ConfigurationError(
                f"lifespan is {scope.name}, but {self._lifespan.name} is there already: enter both in "
                "one function"
            )
        self._lifespan = scope
        return function

    def on(self, *names: EventName) -> Callable[[H], H]:
        """Call a function with events of jobs: `@app.on("failed", "retried")` on a `def` function of a list
        of `JobEvent`.

        The events are those of this process. `enqueued` comes when the transaction commits, `started` when a
        handler begins. The others come when a worker has written the end of an attempt: `finished`,
        `retried`, `failed` (for good), `snoozed`, `released` (uncounted), `cancelled`. `lost` means that the
        job has another owner, and `rescued` that a dead worker's job runs again.

        The function runs in a thread of its own, soon afterwards, with some events at a time. Its exceptions
        are logged and change nothing. Events beyond 100,000 waiting ones are dropped, and counted in the log.
        A worker that stops waits for it within the grace time. Raises `ConfigurationError` for a name that is
        no event, and for a function that cannot listen.

        >>> @app.on("failed")  # doctest: +SKIP
        ... def alarm(events):
        ...     for event in events:
        ...         pager.send(f"{event.task} {event.id}: {event.reason}")
        """
        check_names(names)

        def listen(function: H) -> H:
            self._events.add(names, function)
            return function

        return listen

    def before_enqueue(self, function: S) -> S:
        """Add headers to every job that this App enqueues: `@app.before_enqueue`.

        The function takes the job, and returns a mapping of names to JSON, or None.

        It is called where the job is enqueued, once for each job, before anything is written; `enqueue`
        raises its exceptions. The last registered wins, and the job's own `.set(headers=…)` wins over all.
        Raises `ConfigurationError` for a function that cannot be called so.

        >>> @app.before_enqueue  # doctest: +SKIP
        ... def origin(job):
        ...     return {"request_id": request_id.get(None)}
        """
        self._enqueue_middleware.add(function)
        return function

    # -- what it adds to jobs --------------------------------------------------------------------------------

    def _template(self, job: NewJob) -> NewJob:
        """Return the job of a schedule with the options that its task and queue have for jobs. Enqueue
        middleware is not applied: its headers depend on the enqueue, and would make another schedule of it at
        each deploy."""
        job = self._limited(job)  # guard: a-schedule-knows-its-limit
        check_new([job])
        job, first = self._as_in_its_queue(job)
        return EnqueueMiddleware().with_headers(job, first) if first else job

    def _as_in_its_queue(self, job: NewJob) -> tuple[NewJob, Mapping[str, Any]]:
        """Return a job with the options for its queue, and the headers that come with them. Where its task is
        not known here, the App's options count; the worker's task has the attempts and the timeout."""
        task = self._tasks.get(job.task)
        if task is None and job._by_name_alone:
            options = self._defaults.over({}, job.queue if "queue" in job._options_set else None)
            fields, headers = job_fields(options), options.get("headers") or {}
            its_own = job._options_set | {"max_attempts", "timeout_ms"}
        elif task is None:
            return job, {}
        elif job.queue == task.queue or not task._elsewhere:
            return job, task.headers
        else:
            task = task._in_queue(job.queue)
            fields, headers = option_fields(task), task.headers
            its_own = job._options_set | {"queue"}
        job = replace(job, **{name: value for name, value in fields.items() if name not in its_own})
        return job, headers

    def _limited(self, job: NewJob) -> NewJob:
        """Return a job with the rule of its limit, where it names one."""
        key: str | None = getattr(job, "limit_key", None)
        if key is None:
            return job
        rule = self._limits.rule_of(key, job.rule)
        return job if rule is job.rule else replace(job, rule=rule)
