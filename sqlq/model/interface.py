"""The arguments of a handler and its result, by its signature and its annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from sqlq.errors import ArgumentsError
from sqlq.payload.annotations import (
    Conversion,
    Conversions,
    admits,
    awaited,
    conversion_of,
    hints_of,
    positional_names,
)
from sqlq.payload.codec import Arguments, MismatchError, decode, encode
from sqlq.payload.signatures import signature_of


class Interface:
    """The signature and the annotations of a task's handler. Annotations are read when they are needed: they
    may name what comes later."""

    def __init__(self, task: str, handler: Callable[..., Any]) -> None:
        self._task = task
        self._handler = handler
        self.signature = signature_of(handler)
        self._positional_names = positional_names(self.signature)

    def mismatch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return why the handler does not take these arguments; None when it does."""
        least, largest = self.positional
        if not kwargs and least <= len(args) <= largest:
            return None
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            return f"{self._task}{self.signature}: {error}"
        return None

    @cached_property
    def positional(self) -> tuple[int, int]:
        """The least and the largest number of positional arguments that fit, with no others, without binding
        them one by one. None does where the least is larger."""
        parameters = self.signature.parameters
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters.values()):
            return (1, 0)
        names = self._positional_names
        return sum(parameters[name].default is inspect.Parameter.empty for name in names), len(names)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The annotations by the names of parameters."""
        return hints_of(self._handler)

    @cached_property
    def conversions(self) -> Conversions | None:
        """The conversions of arguments by their annotations; None where they are plain JSON."""
        return Conversions(self.signature, self.hints) or None

    @cached_property
    def result_conversion(self) -> Conversion | None:
        """The conversion of results by the return annotation; None where they are plain JSON."""
        return conversion_of(awaited(self.hints.get("return", Any)))

    def refuse_none(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `ArgumentsError` where None is the argument for a parameter that is annotated otherwise."""
        if not any(value is None for value in (*args, *kwargs.values())):
            return
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            takes_none = self.signature.parameters[name].default is None or name not in self.hints
            if value is None and not takes_none and not admits(self.hints[name], None):
                raise ArgumentsError(
                    f"{self._task}: {name} is None, but it is annotated as never None: if it is a new "
                    "row's id, call session.flush() first"
                )

    def encoded(self, args: list[Any], kwargs: dict[str, Any], *, but: Collection[int | str]) -> str:
        """Return the payload of these arguments, by their annotations. Those `but` which are results of steps
        are None until then."""
        where = f"{self._task}: "
        if self.conversions is not None:
            args, kwargs = self.conversions.converted("encode", args, kwargs, where, but=but)
        return encode(args, kwargs, where, self._positional_names)

    def arguments(self, payload: str | bytes) -> Arguments:
        """Return the arguments in a payload, as the handler gets them. Raises as `from_json`, and
        `ArgumentsError` for a payload that cannot be read."""
        return self.from_json(*decode(payload))

    def from_json(self, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments that this JSON stands for, by the handler's annotations.

        Raises `MismatchError` where the handler here does not take them, but the handler of another release
        may. Raises `ArgumentsError` for a value that does not fit its annotation.
        """
        if (mismatch := self.mismatch(args, kwargs)) is not None:
            raise MismatchError(mismatch)
        if self.conversions is None:
            return args, kwargs
        return self.conversions.converted("decode", args, kwargs, f"{self._task}: ")
