"""How code declares tasks, limits, schedules, middleware and listeners to an App."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from sqlq.app.code import Code
from sqlq.enqueue.prepare import Stamp
from sqlq.errors import ConfigurationError
from sqlq.events import EventName, Hear, checked_names
from sqlq.model.checks import checked_name
from sqlq.model.job import NewJob
from sqlq.model.limit import AnyLimit, Limit
from sqlq.model.middleware import around_scope, lifespan_scope
from sqlq.model.named_task import NamedTask
from sqlq.model.schedule import Declared, Options, Schedule, checked_template, planned
from sqlq.model.task import Registry, Task, TaskOptions, make_task

if TYPE_CHECKING:
    from sqlq.worker.attempt.context import JobContext

Context: TypeAlias = (
    "AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | Iterator[Any] | AsyncIterator[Any]"
)
Around: TypeAlias = "Callable[[JobContext], Context]"
A = TypeVar("A", bound=Around)
H = TypeVar("H", bound=Hear)
L = TypeVar("L", bound="Callable[[], Context]")
S = TypeVar("S", bound=Stamp)
P = ParamSpec("P")
R = TypeVar("R")


class AppTaskOptions(TaskOptions, total=False):
    """The options of `App.task`: those of a task, a schedule, and a limit by its name."""

    around: Sequence[Around] | None
    limit: AnyLimit | str | None  # type: ignore[misc]
    schedule: Schedule | str | None


class Declares:
    """The methods of an App by which code declares things to it."""

    def __init__(self, code: Code) -> None:
        self._code = code

    @property
    def tasks(self) -> Registry:
        """The tasks by name."""
        return self._code.tasks

    # -- tasks -----------------------------------------------------------------------------------------------

    @overload
    def task(self, handler: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        handler: None = None,
        /,
        **options: Unpack[AppTaskOptions],
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, handler: Any = None, /, **options: Any) -> Any:
        """Make a task of a function: `@app.task` or `@app.task(queue="mail", max_attempts=5)`.

        The task is named `module.function` unless `name=` says otherwise. `backoff` is the wait before the
        next attempt: a duration, a list of them, a callable from the number of attempts to a duration, or one
        of `sqlq.exponential` (the default), `fixed`, `linear`, `fibonacci`. With `retry_on`, of what the
        handler raises only these exceptions are followed by another attempt; after those in `fail_on` none
        follows, nor after a timeout where `JobTimeoutError` is among them. `on_success` and
        `on_failure` are tasks of which a job is enqueued when one of this task has finished, or failed for
        good: in the same transaction, with a `sqlq.JobResult` as its argument. `retention` is how
        long its jobs are kept after they have ended, None for ever; `expires` how long after they are due
        they may be started; `headers` are those of its jobs unless they have their own. What the task does
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
        if unknown := options.keys() - AppTaskOptions.__annotations__:
            raise ConfigurationError(
                f"@app.task has no option {', '.join(sorted(unknown))}; it has "
                f"{', '.join(AppTaskOptions.__annotations__)}"
            )
        when = options.pop("schedule", None)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            if isinstance(function, Task):
                raise ConfigurationError(
                    f"{function.name} is a task already: @app.task takes the function, its handler"
                )
            said = dict(options)
            if said.get("limit") is not None:
                said["limit"] = self._code.limits.add(self._code.limits.find(said["limit"]))
            elif self._code.fair is not None and "limit" not in said and self._code.fair.suits(function):
                said["limit"] = self._code.fair
            task = make_task(function, **self._code.defaults.over(said))
            elsewhere = {
                queue: make_task(function, **self._code.defaults.over(said, queue))
                for queue in self._code.defaults.queues - {task.queue}
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
                self._code.schedules.add(
                    Declared(task.name, plan, self._code.additions.template(task.without_arguments))
                )
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
        has set (`sqlq limits set`) counts until it is cleared; else what was enqueued last says what the
        limit is. Raises `ConfigurationError` where a limit of this key is declared that says another thing.

        >>> stripe = sqlq.App().limit("stripe", running=5)
        """
        limit = Limit(key, running, rate)
        self._code.limits.add(limit)
        return limit

    def fair(self, by: str, *, window: int) -> Limit:
        """Have tenants take turns: of each at most `window` jobs are in the queue at a time, the others wait
        in a line of the tenant's own.

        Counts for the tasks that are declared after this, take the arguments that `by` names, and have no
        limit of their own. The smaller the window, the sooner the first job of a newcomer runs; but about as
        many as one tenant alone is to have running at a time. It is a `sqlq.Limit`, which this returns.
        Raises `ConfigurationError` as that, and for a `by` that names no argument.

        >>> tenants = sqlq.App().fair(by="tenant:{tenant}", window=10)
        """
        limit = Limit(by, running=window)
        if limit.is_plain:
            raise ConfigurationError(
                f'by is {by!r}, which names no argument: write by="tenant:{{tenant}}", say'
            )
        self._code.limits.add(limit)
        self._code.fair = limit
        return limit

    def named(self, name: str) -> NamedTask:
        """Return a task by its name alone, for a process that does not import its handler: a web application,
        say, whose workers run other code.

        `.new(…)` takes any arguments. They are JSON, or values that JSON has a form for, such as a UUID, a
        datetime or a dataclass. Whether they fit is found out by the worker. Its task says how often the job
        may be tried, with what backoff and timeout; queue and priority of the task are not known here, and
        are `.set(…)`. A task that is registered here makes its jobs as ever. Raises `EnqueueError` for what
        cannot be a name.

        >>> job = sqlq.App().named("shop.send_receipt").new(7).set(queue="mail")
        """
        return NamedTask(name, self.tasks.get(name))

    def schedule(
        self,
        name: str,
        job: NewJob[Any],
        when: Schedule | str | None = None,
        /,
        **options: Unpack[Options],
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
        plan = planned(when, **options)
        self._code.schedules.add(
            Declared(name, plan, self._code.additions.template(checked_template(job, name)))
        )

    # -- hooks -----------------------------------------------------------------------------------------------

    def around(self, function: A) -> A:
        """Surround every attempt of every task: `@app.around` on a generator function that yields once, or on
        anything else that makes a context manager of the `JobContext`.

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
        if self._code.lifespan is not None:
            raise ConfigurationError(
                f"lifespan is {scope.name}, but {self._code.lifespan.name} is there already: enter both in "
                "one function"
            )
        self._code.lifespan = scope
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
            self._code.events.add(names, function)
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
        self._code.stamps.add(function)
        return function
