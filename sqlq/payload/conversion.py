"""Values of annotated types as JSON, and back: UUIDs, times, decimals, enums, dataclasses and so on.

msgspec does it, and chooses a stable form in JSON for each type. Two promises are sqlq's own. A value that is
enqueued arrives equal, or is refused by its path. Each one is read back before it is let through. And a
worker never drops an unknown field: JSON with a field that its class lacks is not for this release.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import PurePath
from typing import Any

import msgspec
import msgspec.inspect

from sqlq.errors import ArgumentsError
from sqlq.payload.codec import MismatchError, as_text, check_json, not_json


def shown(value: Any) -> Any:
    """Return a value as JSON has it. Raises any error for a value that JSON cannot have."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_shown)


class Converted:
    """The conversion of an annotation that msgspec understands. Raises `TypeError` with the reason for
    another."""

    def __init__(self, hint: Any) -> None:
        try:
            nodes = [*_nodes(msgspec.inspect.type_info(hint), set())]
        except Exception as error:
            raise TypeError(str(error).partition(" - type")[0].partition(" (`")[0]) from None
        for node in nodes:
            kind = getattr(node, "cls", object)
            if hasattr(kind, "__mapper__"):  # guard: orm-classes-are-not-converted
                raise TypeError(f"{kind.__name__} is an ORM class, of which jobs are given the id")
            if isinstance(node, msgspec.inspect.CustomType) and not (
                kind is object or issubclass(kind, PurePath) or _is_pydantic(kind)
            ):
                raise TypeError(f"JSON has no form for {kind.__name__}")
        self._hint = hint

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON has it. Raises `ArgumentsError` for a value that does not fit, or would not
        arrive as it was sent."""
        try:
            form = _form(value, path)
            lost = _lost(value, self._arrived(form, path), path)
        except RecursionError:
            raise ArgumentsError(f"{path} is nested too deep, or contains itself") from None
        if lost is not None:  # guard: typed-arrives-equal
            raise ArgumentsError(lost)
        return form

    def decode(self, form: Any, path: str) -> Any:
        """Return the value that this JSON stands for. Raises `MismatchError` where the annotation of another
        release may take it, `ArgumentsError` where none will."""
        try:
            arrived, lost = self._arrived(form, path), None
            if shown(arrived) != form:  # guard: no-field-is-dropped
                lost = _lost(form, arrived, path, is_json=True)
        except RecursionError:
            raise ArgumentsError(f"{path} is nested too deep") from None
        if lost is not None:
            raise MismatchError(lost)
        return arrived

    shown = staticmethod(shown)

    def _arrived(self, form: Any, path: str) -> Any:
        try:
            return msgspec.convert(form, self._hint, str_keys=True, dec_hook=_read)
        except RecursionError:
            raise
        except Exception as error:
            raise _refusal(error, path) from None


def by_value(value: Any, path: str) -> Any:
    """Return a value in the form that JSON has for its type, where no annotation decides; inside lists and
    dicts, too. Raises `ArgumentsError` for a value that holds something without a form, and for one without
    end."""
    check_json(value, path, form=_form)
    return shown(value)


def _form(value: Any, path: str) -> Any:
    """Return a value as JSON has it. Raises `ArgumentsError` for the part of it that JSON cannot have."""
    try:
        return shown(value)
    except RecursionError:
        raise ArgumentsError(f"{path} is nested too deep, or contains itself") from None
    except Exception as error:
        raise _unencodable(value, path, error) from None


_WITH_FIELDS = (msgspec.inspect.DataclassType, msgspec.inspect.TypedDictType, msgspec.inspect.StructType)


def _nodes(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the nodes of an annotation, those inside its classes included."""
    if isinstance(node, tuple):
        for part in node:
            yield from _nodes(part, seen)
    elif isinstance(node, (msgspec.inspect.Type, msgspec.inspect.Field)) and id(node) not in seen:
        seen.add(id(node))
        yield node
        for name in node.__struct_fields__:
            yield from _nodes(getattr(node, name), seen)


# -- types that msgspec leaves to its caller -----------------------------------------------------------------


class _UnfitError(ValueError):
    """Pydantic's reason against a value; msgspec adds where the value is."""

    def __init__(self, why: str, where: str, *, elsewhere: bool) -> None:
        super().__init__(why)
        self.where = where
        self.elsewhere = elsewhere
        """Whether another release may take the value."""


def _shown(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    # a class derived from a number or text as the plain type
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return as_text(value)


def _read(kind: Any, form: Any) -> Any:
    if issubclass(kind, PurePath):
        if not isinstance(form, str):
            raise ValueError(f"expected the text of a path, got {type(form).__name__}")
        return kind(form)
    import pydantic

    try:
        # as JSON, so that a strict model takes the text of a datetime, too
        return kind.model_validate_json(msgspec.json.encode(form))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise _UnfitError(first["msg"], where, elsewhere=first["type"] in _PYDANTIC_ELSEWHERE) from None


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


# -- what does not fit ---------------------------------------------------------------------------------------

_ELSEWHERE = (
    *("Object missing required field", "Object contains unknown field", "Expected `array` of"),
    *("Invalid enum value", "Invalid value"),
)
"""Errors of msgspec for values that another release may take: it has other fields, or other members of an
enum."""
_PYDANTIC_ELSEWHERE = {
    *("missing", "extra_forbidden", "enum", "literal_error", "union_tag_invalid", "union_tag_not_found")
}
# the path stands last, and a value before it may look like one; guard: errors-hold-no-value
_WHY_AND_WHERE = re.compile(r"(.*) - at `(key` in `)?\$([^`]*)`", re.DOTALL)
_MAX_REASON = 200


def _refusal(error: Exception, path: str) -> ArgumentsError:
    """Return the error for JSON that an annotation does not take. It holds no value: logs show it."""
    if not isinstance(error, msgspec.ValidationError):  # a class's own doing
        return ArgumentsError(f"{path} cannot be read as annotated: {type(error).__name__}: {error}")
    text = str(error)
    why, key, where = match.groups("") if (match := _WHY_AND_WHERE.fullmatch(text)) else (text, "", "")
    elsewhere = why.startswith(_ELSEWHERE)
    if isinstance(cause := error.__cause__, _UnfitError):
        where, elsewhere = where + cause.where, cause.elsewhere
    if why.startswith("Invalid enum value"):
        why = "none of the values it may have"
    elif why.startswith("Invalid value"):
        why = "not the tag of a class that is known here"
    elif why.startswith(("Expected", "Invalid", "Object")):
        why = why[0].lower() + why[1:].replace("`", "")
    at = f"{path}{where[:_MAX_REASON]}".replace("[...]", "[…]")
    kind = MismatchError if elsewhere else ArgumentsError  # guard: other-fields-are-put-back
    return kind(f"{at} {'has a key that ' if key else ''}does not fit its annotation: {why[:_MAX_REASON]}")


def _unencodable(value: Any, path: str, error: Exception) -> ArgumentsError:
    """Return the error for the part of a value that JSON cannot have."""
    for suffix, part in _items(value):
        try:
            shown(part)
        except Exception as of_part:
            return _unencodable(part, path + suffix, of_part)
    if isinstance(value, dict):
        return ArgumentsError(f"{path} has keys that cannot be text, as JSON's keys are")
    return not_json(value, path, None if isinstance(error, TypeError) else f"{_name(error)}: {error}")


# -- what is lost on the way ---------------------------------------------------------------------------------


def _lost(value: Any, arrived: Any, path: str, *, is_json: bool = False) -> str | None:
    """Return a message about a part of a value, or of its JSON, that does not arrive; None if all does.

    A value may be given as the JSON it would become: text for a UUID, a dict for a dataclass.
    """
    if _equal(value, arrived):
        return None
    if isinstance(arrived, AbstractSet):
        others = [item for item in value if not isinstance(item, _JSON)]
        if not others or _equal({*others}, arrived):
            return None
        return f"{path} holds a {_name(others[0])}, which would arrive as something else: annotate its items"
    parts, there = _parts(value), _parts(arrived)
    if parts is not None and there is not None and (isinstance(value, _JSON) or type(value) is type(arrived)):
        if isinstance(value, dict) and len(parts) != len(value):
            return f"{path} has two keys that are the same text"
        # of a dict's keys the text may be another than was sent, but not their number and order
        slots = list(there.values()) if isinstance(arrived, dict) and len(there) == len(parts) else []
        for i, (key, (_, part)) in enumerate(parts.items()):
            if key not in there and not slots:
                return f"{path} does not fit its annotation: it has the unknown field {key}"
            suffix, other = there[key] if key in there else slots[i]
            if is_json and isinstance(arrived, dict):
                suffix = "[…]"  # keys are values, too
            if lost := _lost(part, other, path + suffix, is_json=is_json):
                return lost
        return None
    if isinstance(value, _JSON):
        if isinstance(arrived, bytes) and not is_json:
            return f"{path} is text, and is annotated as bytes: pass bytes"
        return None
    if type(value) is not type(arrived):
        return (
            f"{path} is a {_name(value)}, and would arrive as a {_name(arrived)}: annotate it as what it is"
        )
    # a NaN equals nothing, and a time in an hour that comes twice equals none of another zone
    if _leaf(value) == _leaf(arrived):
        return None
    return f"{path} would arrive as {arrived!s:.60}: pass what JSON holds exactly, such as a time in UTC"


_JSON = (type(None), str, int, float, dict, list, tuple)


def _equal(value: Any, arrived: Any) -> bool:
    try:
        return bool(value == arrived)
    except Exception:
        return False


def _leaf(value: Any) -> Any:
    offset = value.utcoffset() if isinstance(value, (dt.datetime, dt.time)) else None
    return shown(value), offset


def _parts(value: Any) -> dict[Any, tuple[str, Any]] | None:
    """Return the parts of a value, each under its key in JSON, with the end of its path. None for a value
    without parts."""
    if isinstance(value, dict):
        return {next(iter(shown({key: None}))): (f"[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return {i: (f"[{i}]" if names is None else f".{names[i]}", part) for i, part in enumerate(value)}
    fields = _fields(value.__class__)
    return None if fields is None else {key: (f".{name}", getattr(value, name)) for key, name in fields}


@cache
def _fields(kind: type) -> list[tuple[str, str]] | None:
    """Return the fields of a class by their names in JSON. None for a class that has none, or decides itself
    about unknown ones, as a pydantic model."""
    try:
        info: Any = msgspec.inspect.type_info(kind)
    except Exception:  # it evaluates annotations of the user's class, which may raise anything
        return None
    if not isinstance(info, _WITH_FIELDS) or getattr(info, "array_like", False):
        return None
    fields = [(field.encode_name, field.name) for field in info.fields]
    tag = getattr(info, "tag_field", None)
    return fields if tag is None else [*fields, (tag, "__class__")]


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, AbstractSet):
        yield from (("{…}", part) for part in value)
    else:
        yield from (_parts(value) or {}).values()


def _name(value: Any) -> str:
    return type(value).__name__
