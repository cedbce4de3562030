"""Middleware of an attempt (`App.middleware`) or of the life of a worker process (`App.lifespan`).

Each is a function of the user's, checked when it is registered, that makes a context manager each time it is
called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from sqlq.errors import ConfigurationError
from sqlq.payload.signatures import signature_of


@dataclass(frozen=True, slots=True)
class Scope:
    """A function that makes context managers, and whether these are asynchronous."""

    name: str
    function: Callable[..., Any]
    """As it was registered."""
    open: Callable[..., Any]
    """Returns a context manager."""
    is_async: bool
    skips_def: bool = False
    """Whether asynchronous middleware leaves out `def` handlers, which have one of their own."""


_HOOKS: Mapping[str, tuple[str, str, tuple[object, ...]]] = {
    "lifespan": ("takes no arguments", "lambda: pool()", ()),
    "middleware": ("takes one argument, the running job", "lambda running: tracing()", (object(),)),
}
"""The rule of each hook, an example, and arguments that its functions take."""


def task_middleware(functions: Any, task: str) -> tuple[Scope, ...] | None:
    """Return a task's own middleware, None where it declines all. Raises `ConfigurationError` for a function
    that cannot be middleware."""
    if functions is None:
        return None
    if isinstance(functions, str) or not isinstance(functions, Sequence):
        raise ConfigurationError(
            f"middleware of {task} is {functions!r}: it is a list of functions, as in middleware=[tracing], "
            "or None for nothing around this task, the App's included"
        )
    return tuple(scope_of(function) for function in functions)


def surrounding(scopes: Iterable[Scope], task: str, is_async: bool) -> tuple[Scope, ...]:
    """Return the middleware of a task's handler. Raises `ConfigurationError` for asynchronous middleware of a
    `def` handler, around which it cannot run."""
    fitting = tuple(scope for scope in scopes if is_async or not scope.skips_def)
    for scope in fitting:
        if scope.is_async and not is_async:  # guard: async-middleware-needs-async-def
            raise ConfigurationError(
                f"the asynchronous middleware {scope.name} cannot run around {task}, which is a def: make it "
                "a def, or give it to async def tasks alone, by middleware= of @app.task"
            )
    return fitting


def scope_of(function: Any, hook: Literal["lifespan", "middleware"] = "middleware") -> Scope:
    """Return the scope of a function. Raises `ConfigurationError` for one that cannot be middleware."""
    rule, example, arguments = _HOOKS[hook]
    name = name_of(function)
    is_class = isinstance(function, type)
    kind = function if is_class else type(function)
    is_manager = hasattr(kind, "__enter__") or hasattr(kind, "__aenter__")
    if not callable(function) or is_manager != is_class or is_kind(function, inspect.iscoroutinefunction):
        raise ConfigurationError(
            f"{hook} is {name}: it is a function that {rule}, and makes a context manager each time it is "
            f"called, as in app.{hook}({example}); a generator function yields once"
        )
    if not takes(function, *arguments):
        raise ConfigurationError(f"{name}{signature_of(function)} cannot be called: {hook} {rule}")
    if is_class:
        return Scope(name, function, function, is_async=not hasattr(function, "__enter__"))
    if is_kind(function, inspect.isasyncgenfunction):
        return Scope(name, function, asynccontextmanager(function), is_async=True)
    if is_kind(function, inspect.isgeneratorfunction):
        return Scope(name, function, contextmanager(function), is_async=False)
    # decorated with asynccontextmanager, perhaps
    is_async = inspect.isasyncgenfunction(inspect.unwrap(function))

    def managed(*args: Any) -> Any:
        manager = function(*args)
        if not hasattr(type(manager), "__aenter__" if is_async else "__enter__"):
            raise ConfigurationError(
                f"the {hook} {name} returned {manager!r:.99}, which is no context manager: let it yield once"
            )
        return manager

    return Scope(name, function, managed, is_async)


def takes(function: Any, *args: object) -> bool:
    """Whether a function can be called with these arguments, as far as its signature is known."""
    try:
        signature_of(function).bind(*args)
    except TypeError:
        return False
    except ValueError:
        pass  # written in C, perhaps
    return True


def is_kind(function: Any, kind: Callable[[Any], bool]) -> bool:
    """Whether to call this calls a function of that kind; an object's is its class's `__call__`."""
    return kind(function) or kind(type(function).__call__)


def check_plain(function: Any, hook: str, shape: str, *args: object) -> None:
    """Raise `ConfigurationError` for anything but a function that these arguments fit, and that runs when it
    is called: no coroutine or generator comes of it. `shape` is how the message shows one."""
    others = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    is_other = any(is_kind(function, kind) for kind in others)
    if is_other or not callable(function) or not takes(function, *args):
        raise ConfigurationError(
            f"{hook} is {name_of(function)}, which cannot be called here and now with one argument: write a "
            f"plain function, as in {shape}"
        )


def name_of(function: Any) -> str:
    """Return the name of a function with its module; its `repr` where it has no name."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return repr(function) if module is None or qualname is None else f"{module}.{qualname}"
