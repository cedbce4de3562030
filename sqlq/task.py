"""Tasks: a name, a handler and its options; the registry of them; and the codec of their arguments.

A worker runs what is registered and nothing else: a name in a row is looked up, never imported. Arguments are JSON,
checked when the job is made, because that is the last moment at which the mistake and its author are in one place.
"""

from __future__ import annotations

import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar, Union, get_args, get_origin

from sqlq.clock import Duration
from sqlq.errors import ArgumentsError, ConfigurationError, UnknownTaskError
from sqlq.job import NewJob, checked_max_attempts, checked_name, checked_priority, checked_timeout
from sqlq.retry import BackoffOption, RetryPolicy, backoff_from
from sqlq.settings import DEFAULT_QUEUE, MAX_ATTEMPTS, PAYLOAD_BYTES

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Exceptions = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Task(Generic[P, R]):
    """A handler under a name, with the options its jobs start from.

    Calling a task calls its handler, here and now, as if it were not decorated. `.new(…)` makes a job of it.
    """

    name: str
    handler: Callable[P, R]
    queue: str = DEFAULT_QUEUE
    max_attempts: int = MAX_ATTEMPTS
    priority: int = 0
    timeout_ms: int | None = None
    retry: RetryPolicy = RetryPolicy()  # noqa: RUF009  # immutable
    isolate: bool = False
    is_async: bool = False
    aliases: tuple[str, ...] = ()
    """Names it had before, under which its jobs may still wait."""
    _signature: inspect.Signature = field(default_factory=inspect.Signature, repr=False, compare=False)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.handler(*args, **kwargs)

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Return a job of this task with these arguments, for `app.enqueue`.

        The arguments are bound to the handler's signature and turned into JSON now: later changes to a list that was
        passed do not matter. Tuples become lists. Raises `ArgumentsError` when they do not fit the signature, when None
        is given for a parameter annotated as something that cannot be None, when a value is not JSON (the message names
        its path), or when all of it exceeds 1 MiB.

        >>> job = send_receipt.new(order.id)  # doctest: +SKIP
        """
        if (misfit := self.misfit(args, kwargs)) is not None:
            raise ArgumentsError(misfit)
        if any(value is None for value in (*args, *kwargs.values())):
            self._refuse_none(self._signature.bind(*args, **kwargs).arguments)
        return NewJob(
            task=self.name,
            payload=encode(args, kwargs, f"{self.name}: "),
            queue=self.queue,
            max_attempts=self.max_attempts,
            priority=self.priority,
            timeout_ms=self.timeout_ms,
        )

    def _refuse_none(self, arguments: Mapping[str, Any]) -> None:
        for name in self._never_none:
            if arguments.get(name, name) is None:
                raise ArgumentsError(
                    f"{self.name}: {name} is None, but it is annotated as never None: if it is a new row's id, call session.flush() first"
                )

    def misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Say why the handler does not take these arguments; None when it does."""
        if not kwargs and self._takes_positional(len(args)):
            return None
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return f"{self.name}{self._signature}: {error}"
        return None

    def _takes_positional(self, number: int) -> bool:
        """Whether so many positional arguments, and no others, can be told to fit without binding them one by one."""
        least, most = self._positional
        return least <= number <= most

    @cached_property
    def _positional(self) -> tuple[int, int]:
        parameters = self._signature.parameters.values()
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
            return (1, 0)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return sum(p.default is p.empty for p in positional), len(positional)

    @cached_property
    def _never_none(self) -> frozenset[str]:
        """The parameters annotated as something that cannot be None; read late, for annotations may name what comes later."""
        return frozenset(_never_none(self.handler, self._signature))


def make_task(
    handler: Callable[P, R],
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
) -> Task[P, R]:
    """Return the task for a handler; every option is checked here, at import, not when the first job fails."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{handler!r} cannot be a task: its parameters cannot be read; wrap it in a function of your own"
        ) from None
    name = _task_name(handler, name)
    if _is(handler, inspect.isgeneratorfunction) or _is(handler, inspect.isasyncgenfunction):
        raise ConfigurationError(f"{name} is a generator function: calling it runs none of its body, so it cannot be a task")
    return Task(
        name=name,
        handler=handler,
        queue=checked_name(queue, "queue", ConfigurationError),
        max_attempts=checked_max_attempts(max_attempts, ConfigurationError),
        priority=checked_priority(priority, ConfigurationError),
        timeout_ms=None if timeout is None else checked_timeout(timeout, ConfigurationError),
        retry=RetryPolicy(
            backoff=backoff_from(backoff),
            retry_on=None if retry_on is None else _exceptions(retry_on, "retry_on"),
            fail_on=_exceptions(fail_on, "fail_on"),
        ),
        isolate=isolate,
        is_async=_is(handler, inspect.iscoroutinefunction),
        aliases=_aliases(aliases),
        _signature=signature,
    )


def _is(handler: Callable[..., Any], kind: Callable[[Any], bool]) -> bool:
    """Whether calling the handler calls a function of that kind; an object's is its class's `__call__`."""
    return kind(handler) or kind(type(handler).__call__)


def _task_name(handler: Callable[..., Any], name: str | None) -> str:
    if name is not None:
        return checked_name(name, "the task's name", ConfigurationError)
    module, qualname = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    if module is None or qualname is None:
        raise ConfigurationError(f"{handler!r} has no name of its own: give the task one, as in @app.task(name='shop.send_receipt')")
    for wrong, why in (
        (module == "__main__", "is defined in __main__, a module that no worker can import"),
        ("<lambda>" in qualname, "is a lambda, and has no name"),
        ("<locals>" in qualname, "is defined inside another function, where no worker can find it"),
    ):
        if wrong:
            raise ConfigurationError(
                f"{qualname} {why}: define it at the top of an importable module, "
                "or name the task, as in @app.task(name='shop.send_receipt')"
            )
    return checked_name(f"{module}.{qualname}", "the task's name", ConfigurationError)


def _aliases(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigurationError(f"aliases is {given!r}: it is a list of names, as in aliases=['shop.send_receipt']")
    return tuple(checked_name(name, "an alias", ConfigurationError) for name in given)


def _exceptions(given: Any, option: str) -> tuple[type[BaseException], ...]:
    found = given if isinstance(given, tuple) else tuple(given) if isinstance(given, list) else (given,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigurationError(f"{option} holds {kind!r}: it lists exception classes, as in {option}=(TimeoutError, OSError)")
    return found


def _never_none(handler: Callable[..., Any], signature: inspect.Signature) -> Iterator[str]:
    try:
        hints = typing.get_type_hints(handler)
    except Exception:  # an annotation that cannot be evaluated is no reason to refuse a job
        return
    for parameter in signature.parameters.values():
        if (
            parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.default is not None
            and parameter.name in hints
            and not _admits_none(hints[parameter.name])
        ):
            yield parameter.name


def _admits_none(hint: Any) -> bool:
    if hint is Any or hint is None:
        return True
    if isinstance(hint, typing.NewType):
        return _admits_none(hint.__supertype__)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_admits_none(arm) for arm in get_args(hint))
    if get_origin(hint) is typing.Annotated:
        return _admits_none(get_args(hint)[0])
    if get_origin(hint) is typing.Literal:
        return None in get_args(hint)
    try:
        return isinstance(None, get_origin(hint) or hint)
    except TypeError:  # a type variable, a protocol or anything else unusual gets the benefit of the doubt
        return True


class Registry(Mapping[str, Task[..., Any]]):
    """The tasks of an App by name. An alias finds its task too, but is not listed."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self._found: dict[str, Task[..., Any]] = {}
        """By name and by alias."""

    def add(self, task: Task[..., Any]) -> None:
        """Register a task. Raises `ConfigurationError` when its name or an alias is taken: which one ran would be a matter of luck."""
        names = (task.name, *task.aliases)
        for name in names:
            taken = self._found.get(name)
            if taken is not None:
                raise ConfigurationError(
                    f"two tasks are named {name!r} ({_place(taken.handler)} and {_place(task.handler)}): "
                    "give one of them a name= of its own, or take the alias away"
                )
            if names.count(name) > 1:
                raise ConfigurationError(f"{task.name} has the name {name!r} twice: leave it out of its aliases")
        self._tasks[task.name] = task
        self._found |= dict.fromkeys(names, task)

    def find(self, name: str) -> Task[..., Any]:
        """Return the task of that name or alias. Raises `UnknownTaskError` naming the nearest ones."""
        try:
            return self._found[name]
        except KeyError:
            import difflib

            near = difflib.get_close_matches(name, self._found, 3) or sorted(self._tasks)[:3]
            known = f"; did you mean {' or '.join(near)}?" if near else ": the App has no tasks; import the modules that define them"
            raise UnknownTaskError(f"no task is named {name!r}{known}") from None

    def __getitem__(self, name: str) -> Task[..., Any]:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def _place(handler: Callable[..., Any]) -> str:
    code = getattr(handler, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(handler)


def encode(args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str = "") -> str:
    """Return arguments as the JSON text of a payload: `{"args": […], "kwargs": {…}}`, what is empty left out.

    Decoding it gives equal values (tuples as lists). Raises `ArgumentsError` naming the path of what would not survive.
    """
    for i, value in enumerate(args):
        check_json(value, f"{where}args[{i}]")
    for key, value in kwargs.items():
        check_json(key, f"{where}the argument name {key!r}")
        check_json(value, f"{where}{key}")
    payload = _encoder.encode({**({"args": args} if args else {}), **({"kwargs": kwargs} if kwargs else {})})
    size = len(payload) if payload.isascii() else len(payload.encode())
    if size > PAYLOAD_BYTES:
        raise ArgumentsError(
            f"{where}the arguments take {size:,} bytes as JSON, more than the {PAYLOAD_BYTES:,} allowed: store the data and pass its id"
        )
    return payload


_encoder = json.JSONEncoder(ensure_ascii=False)


def decode(payload: str | bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in a payload. Raises `ArgumentsError` saying what is wrong with it."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ArgumentsError(f"the payload is not JSON: {error}") from None
    if not isinstance(value, dict) or not value.keys() <= {"args", "kwargs"}:
        raise ArgumentsError('the payload is not an object with "args" and "kwargs" only, as in {"args": [7], "kwargs": {"copy": true}}')
    args, kwargs = value.get("args", []), value.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ArgumentsError('in the payload "args" must be an array and "kwargs" an object')
    return args, kwargs


_DEEPEST = 100
_LARGEST_INT = 10**4000
"""Python itself refuses to read integers of more than 4,300 digits from text."""


def check_json(value: Any, path: str) -> None:
    """Raise `ArgumentsError` naming the path of the first thing in `value` that JSON would lose or change."""
    # A list that holds itself twice, sixty times over, is small in memory and endless as JSON; each item takes a byte.
    _check_json(value, path, 0, iter(range(PAYLOAD_BYTES)))


def _check_json(value: Any, path: str, depth: int, bytes_left: Iterator[int]) -> None:
    if next(bytes_left, None) is None:
        raise ArgumentsError(f"{path[:200]}… and what comes before it take more than the {PAYLOAD_BYTES:,} bytes allowed as JSON")
    kind = type(value)
    if kind is str:
        # isascii() is a flag of the string: the usual text costs no scan for surrogates
        if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
            raise ArgumentsError(f"{path} holds a NUL or a lone surrogate, which databases cannot store: clean the text first")
    elif value is None or kind is bool:
        pass
    elif isinstance(value, int):
        if not -_LARGEST_INT < value < _LARGEST_INT:
            raise ArgumentsError(f"{path} is an integer of more than 4,000 digits: pass it as text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ArgumentsError(f"{path} is {value!r}, which JSON does not have: pass None or text")
    elif depth >= _DEEPEST:
        raise ArgumentsError(f"{path[:200]}… is nested deeper than {_DEEPEST} levels, or contains itself")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_json(item, f"{path}[{i}]", depth + 1, bytes_left)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ArgumentsError(f"{path} has the key {key!r}, but JSON's keys are text: use {str(key)!r}")
            _check_json(key, f"{path}, key {key!r},", depth + 1, bytes_left)
            _check_json(item, f"{path}[{key!r}]", depth + 1, bytes_left)
    elif isinstance(value, str):
        _check_json(str.__str__(value), path, depth, bytes_left)
    else:
        raise ArgumentsError(f"{path} is {_shown(value)} of type {kind.__name__}, which is not JSON: {_MENDS.get(kind.__name__, _MEND)}")


_MEND = "pass an id, or build it from text, numbers, lists and dicts"
_MENDS = {
    "bytes": "pass text, for example base64",
    "set": "pass a list",
    "frozenset": "pass a list",
    "datetime": "pass value.isoformat() and read it with datetime.fromisoformat()",
    "date": "pass value.isoformat() and read it with date.fromisoformat()",
    "Decimal": "pass str(value) and read it with Decimal()",
    "UUID": "pass str(value) and read it with UUID()",
}


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return "a value"
    return text if len(text) <= 60 else text[:57] + "..."
