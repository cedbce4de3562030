"""Tasks: a name, a handler and its options; and the registry of them.

A worker runs only registered tasks: a name in a row is looked up, never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from sqlq.config.constants import DEFAULT_QUEUE, MAX_ATTEMPTS
from sqlq.errors import ArgumentsError, ConfigurationError, EnqueueError, UnknownTaskError
from sqlq.model.backoff import backoff_from
from sqlq.model.checks import checked_name, refusing_by
from sqlq.model.flow_parts import Group, without_results
from sqlq.model.foreign_names import NameOfAnotherQueue
from sqlq.model.interface import Interface
from sqlq.model.job import NewJob
from sqlq.model.job_options import JobOutcome, checked_follow_up, job_fields, merge_cancel, option_fields
from sqlq.model.limit import AnyLimit, check_parameters, key_for, plain_key, rule_of
from sqlq.model.middleware import Scope, is_kind, surrounding, task_middleware
from sqlq.model.outcome import Follower
from sqlq.model.retry import RetryPolicy
from sqlq.payload.annotations import hints_of, takes_object
from sqlq.payload.codec import encode, encode_plain
from sqlq.payload.headers import NO_HEADERS
from sqlq.payload.headers import checked as checked_headers
from sqlq.payload.signatures import signature_of

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Exceptions = type[BaseException] | tuple[type[BaseException], ...]
Isolate = bool | Literal["fresh"]
"""Whether jobs run in a process of their own: kept for the next such job, or for one job alone."""


@dataclass(frozen=True)
class Task(Generic[P, R]):
    """A handler under a name, with the options its jobs start from.

    Calling a task calls its handler, here and now, as if it were not decorated, where the App's
    `direct_calls` lets it. `.new(…)` makes a job of it.
    """

    name: str
    handler: Callable[P, R]
    queue: str = DEFAULT_QUEUE
    max_attempts: int = MAX_ATTEMPTS
    priority: int = 0
    timeout_ms: int | None = None
    retry: RetryPolicy = RetryPolicy()  # noqa: RUF009  # immutable
    isolate: Isolate = False
    is_async: bool = False
    on_success: str | None = None
    """The task that follows its jobs that have finished, as rows name it; None where none does."""
    on_failure: str | None = None
    limit: AnyLimit | None = None
    """The limit at which its jobs wait for their turn."""
    aliases: tuple[str, ...] = ()
    """Names it had before, under which its jobs may still wait."""
    retention_ms: int | None = None
    """How long its jobs are kept after their end; None where the App defines it."""
    start_within_ms: int | None = None
    """How long after they are due its jobs may be started; None for no limit."""
    headers: Mapping[str, Any] = field(default_factory=lambda: NO_HEADERS, hash=False)
    """The headers of its jobs, where they do not set others."""
    _middleware: tuple[Scope, ...] | None = field(default=(), repr=False)
    """Its own middleware, beside that of all tasks; None where neither is to run."""
    _has_start_within: bool = field(default=False, repr=False)
    """Whether the task itself defines when its jobs expire, and not its queue or the App."""
    _elsewhere: Mapping[str, Task[P, R]] = field(default_factory=dict, repr=False, compare=False)
    """The task as it is in other queues than its own, by their names, where they have options of their
    own."""
    _surroundings: tuple[Scope, ...] = field(default=(), init=False, repr=False, compare=False)
    """All middleware of its attempts, the outermost first; chosen by the registry."""
    _app: Any = field(default=None, init=False, repr=False, compare=False)
    """The App that it is registered with."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._app is not None:
            self._app._called(self.name)
        return self.handler(*args, **kwargs)

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewJob[R]:
        """Return a job of this task with these arguments, for `app.enqueue`.

        The arguments are bound to the handler's signature and turned into JSON now. Later changes to a list
        that was passed do not matter. A value goes as its annotation has it (a UUID as its text), else as it
        is if it is JSON. Tuples that no annotation names arrive as lists. Raises `ArgumentsError` when the
        arguments do not fit the signature, or exceed 1 MiB in all. It does so, too, when None is given for a
        parameter annotated as something that cannot be None. And it does so when a value has no form in JSON
        or would not arrive unchanged: the message names its path.

        >>> job = send_receipt.new(order.id)  # doctest: +SKIP
        """
        interface = self._interface
        least, largest = interface.positional
        is_usual = not kwargs and least <= len(args) <= largest and self._is_plain
        if is_usual and (text := encode_plain(args)) is not None:
            return self._blank._with_payload(text)
        if (mismatch := interface.mismatch(args, kwargs)) is not None:
            raise ArgumentsError(mismatch)
        interface.refuse_none(args, kwargs)
        results, known, named = without_results(args, kwargs)
        job = self._blank._with_payload(interface.encoded(known, named, but=results))
        if results:
            job = replace(job, _results=tuple(results.items()))
        if self.limit is not None and job.limit_key is None:
            job = replace(job, limit_key=key_for(self.limit, self.name, interface.signature, args, kwargs))
        return job

    @cached_property
    def _interface(self) -> Interface:
        return Interface(self.name, self.handler)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether neither annotations nor a limit's key make something of numbers and text."""
        return self._interface.conversions is None and (
            self.limit is None or plain_key(self.limit) is not None
        )

    def map(self, items: Iterable[Any]) -> Group[R]:
        """Return a group of one job for each item, which is its one argument; see `sqlq.group`.

        >>> app.enqueue(resize.map(["a.png", "b.png"]).then(publish))  # doctest: +SKIP
        """
        if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
            raise ArgumentsError(
                f"{self.name}: map takes a list of arguments, one for each job, not {items!r}: write "
                f"map([{items!r}]) for one job"
            )
        make: Callable[..., NewJob[R]] = self.new
        return Group([make(item) for item in items])

    @cached_property
    def _blank(self) -> NewJob[R]:
        """A job without arguments, whose annotations are not looked at: they may name what comes later."""
        return NewJob(
            task=self.name,
            payload="{}",
            **option_fields(self),
            on_success=self.on_success,
            on_failure=self.on_failure,
            limit_key=None if self.limit is None else plain_key(self.limit),
            rule=None if self.limit is None else rule_of(self.limit),
            _options_set=frozenset({"start_within_ms"} if self._has_start_within else ()),
        )

    def _as_follow_up(self, option: str) -> str:
        """Return this task as the rows of other jobs name it, which it follows. Raises
        `ConfigurationError` where its handler does not take how a job ended as its one argument."""
        mismatch = self._interface.mismatch([None], {})
        if mismatch is None:
            name = next(iter(self._interface.signature.parameters))
            # read anew when it is called: annotations may name what comes later
            hint = hints_of(self.handler).get(name, Any)
            ended = JobOutcome(1, "shop.charge", "default", "failed", 1, "error", "ValueError", "no", "a")
            # guard: a-follow-up-fits
            if hint is not JobOutcome and not takes_object(hint, asdict(ended)):
                mismatch = f"{self.name}, whose {name} is annotated as {getattr(hint, '__name__', hint)}"
        if mismatch is not None:
            raise ConfigurationError(
                f"{option} is {mismatch}: its handler is called with how the job ended, as in def "
                "alarm(ended: sqlq.JobOutcome)"
            )
        return Follower(self.name, self.queue, self.priority).as_text()

    def _in_queue(self, queue: str) -> Task[P, R]:
        """Return the task as it is in a queue."""
        return self._elsewhere.get(queue, self)

    def _surround(self, common: Sequence[Scope], always: Sequence[Scope] = ()) -> None:
        """Choose the middleware of the attempts: `always` outermost, inside it `common` to all tasks, and
        inside that the task's own."""
        # guard: middleware-nests-in-order
        scopes = () if self._middleware is None else (*common, *self._middleware)
        object.__setattr__(self, "_surroundings", surrounding((*always, *scopes), self.name, self.is_async))
        for other in self._elsewhere.values():
            other._surround(common, always)


AnyTask = Task[..., Any]


def new_from_json(task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> NewJob:
    """Return a job from arguments as JSON has them, as a command line or a web page knows them. A UUID or a
    time is text, a dataclass an object. Otherwise as `Task.new`."""
    args, kwargs = task._interface.from_json([*args], {**kwargs})
    return task.new(*args, **kwargs)


def make_task(handler: Callable[P, R], **options: Any) -> Task[P, R]:
    """Return the task for a handler, with the options of `App.task` but its schedule. Every option is checked
    here, at import, not when the first job fails."""
    try:
        signature = signature_of(handler)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{handler!r} cannot be a task: its parameters cannot be read ({error}); "
            "wrap it in a function of your own"
        ) from None
    name = _task_name(handler, options.get("name"))
    if is_kind(handler, inspect.isgeneratorfunction) or is_kind(handler, inspect.isasyncgenfunction):
        raise ConfigurationError(
            f"{name} is a generator function: calling it runs none of its body, so it cannot be a task"
        )
    isolate = options.get("isolate", False)
    if isolate not in (True, False, "fresh"):
        raise ConfigurationError(
            f'isolate is {isolate!r}: it is True, False, or "fresh" for a process that runs one job alone'
        )
    if (limit := options.get("limit")) is not None:
        check_parameters(limit, name, signature)
    retry_on, headers = options.get("retry_on"), options.get("headers")
    follow_ups: dict[str, Any] = {
        name: checked_follow_up(task, name)
        for name in ("on_success", "on_failure", "on_cancel")
        if (task := options.get(name)) is not None
    }
    merge_cancel(follow_ups)
    return Task(
        name=name,
        handler=handler,
        **job_fields(options),
        retry=RetryPolicy(
            backoff=backoff_from(options.get("backoff")),
            retry_on=None if retry_on is None else _exceptions(retry_on, "retry_on"),
            fail_on=_exceptions(options.get("fail_on", ()), "fail_on"),
        ),
        isolate=isolate,
        is_async=is_kind(handler, inspect.iscoroutinefunction),
        **follow_ups,
        limit=limit,
        aliases=_aliases(options.get("aliases", ())),
        _middleware=task_middleware(options.get("middleware", ()), name),
        headers=checked_headers(headers, "headers") if headers else NO_HEADERS,
    )


def _task_name(handler: Callable[..., Any], name: str | None) -> str:
    if name is not None:
        return checked_name(name, "the task's name")
    module, qualname = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    if module in (None, "__main__") or qualname is None or "<" in qualname:
        raise ConfigurationError(
            f"{qualname or repr(handler)} of {module} cannot be imported by its name: define it at the top "
            "of an importable module, or name the task, as in @app.task(name='shop.send_receipt')"
        )
    return checked_name(f"{module}.{qualname}", "the task's name")


def _aliases(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigurationError(
            f"aliases is {names!r}: it is a list of names, as in aliases=['shop.send_receipt']"
        )
    return tuple(checked_name(name, "an alias") for name in names)


def _exceptions(value: Any, option: str) -> tuple[type[BaseException], ...]:
    kinds = tuple(value) if isinstance(value, list | tuple) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigurationError(
                f"{option} holds {kind!r}: it lists exception classes, as in {option}=(TimeoutError, OSError)"
            )
    return kinds


class NamedTask:
    """A task whose name is known, and nothing else; see `App.named`."""

    def __init__(self, name: str, defaults: Mapping[str, Any] = NO_HEADERS) -> None:
        """`defaults` are the App's."""
        with refusing_by(EnqueueError):
            self.name = checked_name(name, "the task's name")
        self._defaults = {"queue": DEFAULT_QUEUE, "priority": 0, **defaults}

    def new(self, /, *args: Any, **kwargs: Any) -> NewJob:
        """Return a job of this task with these arguments, for `app.enqueue`.

        Raises `ArgumentsError` where a value is not JSON and has no form in it, naming its path.
        """
        from sqlq.payload.conversion import by_value

        where = f"{self.name}: "
        results, known, named = without_results(args, kwargs)
        known = [by_value(value, f"{where}args[{i}]") for i, value in enumerate(known)]
        named = {name: by_value(value, f"{where}{name}") for name, value in named.items()}
        return NewJob(
            self.name,
            encode(known, named, where),
            self._defaults["queue"],
            max_attempts=None,
            _results=tuple(results.items()),  # guard: a-named-task-takes-results
            _by_name_alone=True,
        )

    def _as_follow_up(self, option: str) -> str:
        return Follower(self.name, self._defaults["queue"], self._defaults["priority"]).as_text()

    def __repr__(self) -> str:
        return f"NamedTask({self.name!r})"


class Registry(Mapping[str, AnyTask]):
    """The tasks of an App by name. An alias finds its task too, but is not listed."""

    def __init__(self, app: Any = None, always: Sequence[Scope] = ()) -> None:
        """`always` is the middleware of all tasks' attempts, whatever options they have."""
        self._app = app
        self._always = always
        self.adds_to_jobs = False
        """Whether a task or a queue adds more to its jobs than a task alone can when it makes one."""
        self._tasks: dict[str, AnyTask] = {}
        self.by_name: dict[str, AnyTask] = {}
        """By name and by alias."""
        self._arounds: list[Scope] = []

    def surround(self, scope: Scope) -> None:
        """Add middleware to the attempts of all tasks, also of those added later, inside the middleware so
        far. Raises `ConfigurationError` for middleware that is there already, and for asynchronous middleware
        beside a `def` task."""
        if any(scope.function is other.function for other in self._arounds):
            raise ConfigurationError(f"middleware is {scope.name} a second time: register it once")
        for task in self._tasks.values():
            task._surround([*self._arounds, scope], self._always)
        self._arounds.append(scope)

    def add(self, task: AnyTask) -> None:
        """Register a task. Raises `ConfigurationError` when its name or an alias is taken: which one ran
        would be a matter of luck."""
        names = (task.name, *task.aliases)
        for name in names:
            taken = self.by_name.get(name)
            if taken is not None:
                raise ConfigurationError(
                    f"two tasks are named {name!r} ({_defined_at(taken.handler)} and "
                    f"{_defined_at(task.handler)}): give one of them a name= of its own, or "
                    "take the alias away"
                )
        task._surround(self._arounds, self._always)
        self.adds_to_jobs = self.adds_to_jobs or bool(task.headers or task._elsewhere)
        for each in (task, *task._elsewhere.values()):
            object.__setattr__(each, "_app", self._app)
        # anew, since workers go through them meanwhile
        self._tasks = {**self._tasks, task.name: task}
        self.by_name = {**self.by_name, **dict.fromkeys(names, task)}

    def find(self, name: str) -> AnyTask:
        """Return the task of that name or alias. Raises `UnknownTaskError` naming the nearest one."""
        try:
            return self.by_name[name]
        except KeyError:
            import difflib

            near = difflib.get_close_matches(name, self.by_name, 1, cutoff=0.0)
            advice = (
                f"; did you mean {near[0]}?"
                if near
                else ": the App has no tasks; import the modules that define them"
            )
            raise UnknownTaskError(f"no task is named {name!r}{advice}") from None

    def __getitem__(self, name: str) -> AnyTask:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


NameOfAnotherQueue.answer(
    Task,
    {
        "apply_async defer delay dispatch enqueue kiq schedule": "app.enqueue(task.new(…))",
        "perform_async perform_in send send_with_options": "app.enqueue(task.new(…))",
        "apply call_local": "task(…), which runs the handler here",
        "starmap": "task.map(items)",
        "message s si signature subtask": "task.new(…)",
    },
)


def _defined_at(handler: Callable[..., Any]) -> str:
    code = getattr(handler, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(handler)
