"""Names that other job queues have for things: the error for one has the name here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class NameOfAnotherQueue:
    """An attribute that other job queues have and this class has not. Its error names the attribute to write
    instead.

    A `__getattr__` would serve as well, but type checkers would then take every name for an attribute.
    """

    def __init__(self, name: str, advice: str) -> None:
        self._name = name
        self._advice = advice

    def __get__(self, instance: Any, owner: type) -> Any:
        named = getattr(instance, "name", None)
        whose = owner.__name__ if named is None else f"the {owner.__name__.lower()} {named}"
        raise AttributeError(f"{whose} has no {self._name!r}: write {self._advice}", name=self._name)

    @classmethod
    def answer(cls, owner: type, advice: Mapping[str, str]) -> None:
        """Have `owner` answer each of these names with its advice."""
        for name, instead in advice.items():
            setattr(owner, name, cls(name, instead))


def refuse_unknown_options(
    error: type[Exception], known: Iterable[str], instead: Mapping[str, str]
) -> Callable[[F], F]:
    """Have a method of the options `known` raise `error` for others, and for a positional argument.

    `instead` maps options of other job queues to the name that this method has for them.
    """

    allowed = frozenset(known)

    def decorate(method: F) -> F:
        @wraps(method)
        def checked(self: Any, /, *values: Any, **options: Any) -> Any:
            if values or not options.keys() <= allowed:
                unknown = [repr(value) for value in values] or sorted(options.keys() - allowed)
                hints = [f"{name} is {instead[name]} here; " for name in unknown if name in instead]
                takes = f"{''.join(hints)}it takes {', '.join(known)}"
                raise error(f"{method.__name__} takes no {', '.join(unknown)}: {takes}")
            return method(self, **options)

        return cast("F", checked)

    return decorate
