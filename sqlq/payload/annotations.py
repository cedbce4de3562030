"""Reads the annotations of a handler's parameters and of its result.

An annotation with nothing but JSON's own types needs no conversion. Such values go as they are, checked only
for being JSON. Others name a conversion (`sqlq.payload.conversion`), which is imported by the first
annotation that needs one. An annotation that cannot be read, or has no conversion, refuses nothing that is
JSON: handlers have annotations for other reasons, too.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Optional,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from sqlq.errors import ArgumentsError
from sqlq.payload.codec import Arguments, argument_name, check_json
from sqlq.payload.signatures import annotations_of

if TYPE_CHECKING:
    from sqlq.payload.conversion import Converted


class Unusable(NamedTuple):
    """Stands for an annotation that cannot be evaluated, as one that only type checkers can.

    It is the conversion of each annotation that nothing can be made of. JSON is let through, as if there were
    none.
    """

    why: str

    def encode(self, value: Any, path: str) -> Any:
        check_json(value, path, f"its annotation is of no use here: {self.why}")
        return value

    def decode(self, form: Any, path: str) -> Any:
        return form

    def shown(self, value: Any) -> Any:
        return value


def hints_of(handler: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a handler by parameter, and its result's under "return"; of one that cannot
    be evaluated, an `Unusable`."""
    function: Any = handler
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if isinstance(function, type):
        function = vars(function).get("__init__", function)
    elif not inspect.isroutine(function):
        function = type(function).__call__
    try:
        annotations = annotations_of(function)
    except Exception:
        return {}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    hints: dict[str, Any] = {}
    # one by one: a name that only type checkers know spoils no other annotation
    for name, annotation in annotations.items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints |= typing.get_type_hints(alone, names, include_extras=True)
        except Exception as error:
            hints[name] = Unusable(str(error))
    return hints


def positional_names(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that take an argument by its position."""
    parameters = signature.parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def takes_object(hint: Any, form: dict[str, Any]) -> bool:
    """Whether a value annotated so may be made of a JSON object. False only where it is certain that it may
    not."""
    conversion = conversion_of(hint)
    if conversion is None or typing.is_typeddict(hint):
        return admits(hint, form)
    try:
        conversion.decode(form, "it")
    except ArgumentsError:
        return False
    return True


def admits(hint: Any, value: Any) -> bool:
    """Whether an annotation takes a value as it is. An unusual annotation gets the benefit of the doubt."""
    if get_origin(hint) in (Union, types.UnionType):  # of which msgspec does not know each
        return any(admits(arm, value) for arm in get_args(hint))
    import msgspec

    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    except Exception:
        return True
    return True


# -- conversions ---------------------------------------------------------------------------------------------


Conversion: TypeAlias = "Unusable | Converted"
"""Converts the values of one annotation into JSON and back, and shows them as JSON has them."""


def _or_none(hint: Any) -> Any:
    if isinstance(hint, Unusable):
        return hint
    try:
        return Optional[hint]  # noqa: UP045  # not every annotation has an `|`
    except TypeError:  # nor is every annotation a type
        return hint


def conversion_of(hint: Any) -> Conversion | None:
    """Return the conversion of an annotation; None where it needs none."""
    if is_plain(hint):
        return None
    if isinstance(hint, Unusable):
        return hint
    from sqlq.payload.conversion import Converted

    try:
        return Converted(hint)
    except TypeError as why:
        return Unusable(str(why))


_PLAIN_ARRAYS = (list, Sequence, MutableSequence, Collection, Iterable)
_PLAIN_OBJECTS = (dict, Mapping, MutableMapping)
_PLAIN = (Any, object, None, type(None), str, int, float, bool, *_PLAIN_ARRAYS, *_PLAIN_OBJECTS)


def awaited(hint: Any) -> Any:
    """Return the annotation of an awaited result, for a function that returns an awaitable."""
    return get_args(hint)[-1] if get_origin(hint) in (Awaitable, Coroutine) else hint


def is_plain(hint: Any) -> bool:
    """Whether an annotation holds nothing but JSON's own types, or allows any value."""
    if any(hint is plain for plain in _PLAIN) or isinstance(hint, TypeVar):
        return True
    if isinstance(hint, typing.NewType):
        return is_plain(hint.__supertype__)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return is_plain(args[0])
    if origin is Literal:
        return all(type(arg) in _PLAIN for arg in args)
    if origin in _PLAIN_OBJECTS and args:
        return not any(args[0] is key for key in (int, float, bool)) and all(map(is_plain, args))
    return origin in (Union, types.UnionType, *_PLAIN_ARRAYS, *_PLAIN_OBJECTS) and all(map(is_plain, args))


class Conversions:
    """The conversions of a handler's parameters. False where no parameter has one."""

    def __init__(self, signature: inspect.Signature, hints: Mapping[str, Any]) -> None:
        self._names = positional_names(signature)
        self._conversions: dict[Any, Conversion | None] = {}
        """By the position and the name of an argument; under `int` for `*args`, under `str` for
        `**kwargs`."""
        for i, parameter in enumerate(signature.parameters.values()):
            hint = hints.get(parameter.name, Any)
            keys = {
                parameter.POSITIONAL_ONLY: (i,),
                parameter.POSITIONAL_OR_KEYWORD: (i, parameter.name),
                parameter.VAR_POSITIONAL: (int,),
                parameter.KEYWORD_ONLY: (parameter.name,),
                parameter.VAR_KEYWORD: (str,),
            }
            conversion = conversion_of(_or_none(hint) if parameter.default is None else hint)
            self._conversions |= dict.fromkeys(keys[parameter.kind], conversion)

    def __bool__(self) -> bool:
        return any(self._conversions.values())

    def converted(
        self,
        way: Literal["encode", "decode"],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        where: str,
        but: Collection[int | str] = (),
    ) -> Arguments:
        """Return arguments as JSON has them, or those that this JSON stands for; those at the places and of
        the names `but` as they are. Raises as `Converted.encode` or `Converted.decode`."""

        def convert(key: int | str, value: Any) -> Any:
            conversion = self._conversions.get(key, self._conversions.get(type(key)))
            if conversion is None or key in but:
                return value
            return getattr(conversion, way)(value, where + argument_name(key, self._names))

        positional = [convert(i, value) for i, value in enumerate(args)]
        return positional, {name: convert(name, value) for name, value in kwargs.items()}
