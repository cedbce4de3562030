"""The payload of a job: arguments as JSON text, and back.

Arguments are checked when the job is made, where the mistake and its author are still in one place. The error
names the path of a value that JSON would lose or change. Conversions of values that JSON does not have are in
`sqlq.payload.conversion`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from sqlq.config.command_hint import shortened
from sqlq.config.constants import PAYLOAD_BYTES
from sqlq.errors import ArgumentsError, PayloadKeyError

Arguments = tuple[list[Any], dict[str, Any]]
"""By position, and by name."""


class MismatchError(ArgumentsError):
    """Arguments do not fit the handler here, but another release's may take them."""


def encode(args: Sequence[Any], kwargs: Mapping[str, Any], where: str = "", names: Sequence[str] = ()) -> str:
    """Return arguments as the JSON text of a payload: `{"args": […], "kwargs": {…}}`, without empty parts.

    Decoding it gives equal values (tuples as lists). Raises `ArgumentsError` with the path of a value that
    would not survive; `names` are those of the first parameters.
    """
    for i, value in enumerate(args):
        check_json(value, where + argument_name(i, names))
    for key, value in kwargs.items():
        check_json(key, f"{where}the argument name {key!r}")
        check_json(value, f"{where}{key}")
    parts = {name: part for name, part in (("args", args), ("kwargs", kwargs)) if part}
    return json_within(PAYLOAD_BYTES, parts, f"{where}the arguments take", "store the data and pass its id")


def argument_name(position: int | str, names: Sequence[str]) -> str:
    """Return the name of the parameter at a position, else the position itself; a name as it is."""
    if isinstance(position, str):
        return position
    return names[position] if position < len(names) else f"args[{position}]"


TEXTS: list[type] = []
"""Beside str, types whose values go as their text. A framework adds its own, such as lazy translations."""


def as_text(value: Any) -> str:
    """Return the text of a value whose type is in `TEXTS`, or derived from str. Raises `TypeError` for
    another."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, tuple(TEXTS)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def json_within(limit: int, value: Any, subject: str, mend: str) -> str:
    """Return a checked value as JSON text. Raises `ArgumentsError` for one of more than `limit` bytes;
    `subject`
    is the subject of its message, with the verb, and `mend` its advice."""
    text = _encoder.encode(value)
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise ArgumentsError(f"{subject} {size:,} bytes as JSON, more than the {limit:,} allowed: {mend}")
    return text


_encoder = json.JSONEncoder(ensure_ascii=False, default=as_text)


def encode_plain(args: Sequence[Any]) -> str | None:
    """Return the same text as `encode` for numbers and plain text, in a fifth of the time. None for arguments
    that need a closer look."""
    parts = []
    for value in args:
        kind = type(value)
        if kind is int:
            if not -_LARGEST_PLAIN < value < _LARGEST_PLAIN:
                return None
            parts.append(str(value))
        elif kind is str:
            if len(value) > _MAX_PLAIN_TEXT or not value.isascii() or "\0" in value:
                return None
            parts.append(_in_quotes(value))
        elif kind is bool:
            parts.append("true" if value else "false")
        else:
            return None
    if len(parts) > _MAX_PLAIN_ARGUMENTS:
        return None
    return "{}" if not parts else f'{{"args": [{", ".join(parts)}]}}'


_LARGEST_PLAIN = 2**63
_MAX_PLAIN_TEXT, _MAX_PLAIN_ARGUMENTS = 1_000, 100
"""Far from the largest payload."""
_in_quotes = json.encoder.encode_basestring


def decode(payload: str | bytes) -> Arguments:
    """Return the arguments in a payload. Raises `ArgumentsError` for one that cannot be read, with the
    reason, and `PayloadKeyError` for one that has a signature."""
    value = read_json(payload, "the payload is")
    parts = value if isinstance(value, dict) else {"": value}
    if "signature" in parts:  # guard: bad-signature-is-not-bad-payload
        raise PayloadKeyError(
            "its payload has a signature that cannot be opened here: its text was altered, or it is read "
            "without the keys of App(keys=[…]) or SQLQ_KEYS"
        )
    args, kwargs = parts.get("args", []), parts.get("kwargs", {})
    if not (parts.keys() <= _PARTS and isinstance(args, list) and isinstance(kwargs, dict)):
        raise ArgumentsError(
            'the payload is not an object of an array "args" and an object "kwargs" only, as in '
            '{"args": [7], "kwargs": {"copy": true}}'
        )
    return args, kwargs


def read_json(text: str | bytes, subject: str) -> Any:
    """Return the value of the JSON in a row. Raises `ArgumentsError` for text that is not JSON.

    Raises it also for a value that is nested deeper than an enqueue allows. `subject` is that of its message,
    with the verb.
    """
    try:
        return _loaded(text)
    except RecursionError:
        raise ArgumentsError(f"{subject} nested deeper than {_DEEPEST} levels") from None
    except (ValueError, TypeError) as error:
        raise ArgumentsError(f"{subject} not JSON: {error}") from None


def decoded(text: Any) -> Any:
    """Return the value of the JSON in a row as it may be shown; of text that is not JSON the text."""
    try:
        return _loaded(text)
    except RecursionError:
        return "(nested too deep)"
    except (ValueError, TypeError):
        return text


def _loaded(text: Any) -> Any:
    """Raises `RecursionError` for a value that is nested too deep, for Python's own reader or here."""
    value = json.loads(text)
    if is_deep(text, value):  # guard: depth-is-bounded
        raise RecursionError
    return value


def is_deep(text: str | bytes, value: Any) -> bool:
    """Return whether JSON is nested deeper than an enqueue allows."""
    # each level has a character; nearly all rows have fewer, or fewer brackets
    if len(text) <= _DEEPEST_IN_ROWS:
        return False
    text = str(text)
    return text.count("[") + text.count("{") > _DEEPEST_IN_ROWS and _is_deeper(value, _DEEPEST_IN_ROWS)


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


class HasArguments:
    """Base of classes with a payload, which is JSON text or decoded."""

    __slots__ = ()
    payload: Any

    @property
    def args(self) -> list[Any] | None:
        """The arguments by position, as JSON has them; None where the payload cannot be read."""
        return self._arguments()[0]

    @property
    def kwargs(self) -> dict[str, Any] | None:
        """The arguments by name, as JSON has them; None where the payload cannot be read."""
        return self._arguments()[1]

    def _arguments(self) -> Arguments | tuple[None, None]:
        try:
            return decode(self.payload if isinstance(self.payload, str) else json.dumps(self.payload))
        except (ArgumentsError, PayloadKeyError):
            return None, None


_PARTS = frozenset({"args", "kwargs"})
_DEEPEST = 100
_DEEPEST_IN_ROWS = _DEEPEST + 4
"""With the payload's own object, its list, and the list of the results that an argument of a step may be. A
signed value stands four levels deep among the steps of a job."""
_LARGEST_INT = 10**4000
"""Python itself refuses to read integers of more than 4,300 digits from text."""


Form = Callable[[Any, str], Any]
"""Returns the form in JSON of a value at a path, or raises `ArgumentsError`."""


def check_json(value: Any, path: str, mend: str | None = None, form: Form | None = None) -> None:
    """Raise `ArgumentsError` naming the path of the first thing in `value` that JSON would lose or change.

    `mend` is the advice for a type that JSON does not have, in place of how to annotate it. With `form` such
    a value may have a form in JSON.
    """

    def refused(value: Any, path: str) -> Any:
        raise not_json(value, path, mend)

    # A list that holds itself twice, sixty times over, is small in memory and endless as JSON; each item
    # takes a byte.
    _check_json(value, path, 0, iter(range(PAYLOAD_BYTES)), form or refused)


def _check_json(value: Any, path: str, depth: int, bytes_left: Iterator[int], form: Form) -> None:
    if next(bytes_left, None) is None:
        raise ArgumentsError(
            f"{path[:200]}… and what comes before it take more than the {PAYLOAD_BYTES:,} bytes allowed as "
            "JSON"
        )
    kind = type(value)
    if kind is str:
        # isascii() is a flag of the string: the usual text costs no scan for surrogates
        if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
            raise ArgumentsError(
                f"{path} holds a NUL or a lone surrogate, which databases cannot store: clean the text first"
            )
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
            _check_json(item, f"{path}[{i}]", depth + 1, bytes_left, form)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ArgumentsError(
                    f"{path} has the key {key!r}, but JSON's keys are text: use {str(key)!r}"
                )
            _check_json(key, f"{path}, key {key!r},", depth + 1, bytes_left, form)
            _check_json(item, f"{path}[{key!r}]", depth + 1, bytes_left, form)
    elif isinstance(value, (str, *TEXTS)):
        _check_json(as_text(value), path, depth, bytes_left, form)
    else:
        _check_json(form(value, path), path, depth + 1, bytes_left, form)


def not_json(value: Any, path: str, mend: str | None = None) -> ArgumentsError:
    """Return the error for a value of a type that JSON does not have."""
    kind, name = type(value), type(value).__name__
    may_be_annotated = (
        issubclass(kind, _ANNOTATED)
        or dataclasses.is_dataclass(kind)
        or hasattr(kind, "__struct_fields__")  # msgspec's
        or hasattr(kind, "model_validate")  # pydantic's
    )
    if mend is None and may_be_annotated and not hasattr(kind, "__mapper__"):
        mend = (
            f"annotate the parameter as {name}, or by what it holds, as in list[{name}], and pass it as it is"
        )
    mend = mend or "pass an id, or build it from text, numbers, lists and dicts"
    return ArgumentsError(f"{path} is {_shown(value)} of type {name}, which is not JSON: {mend}")


_ANNOTATED = (
    *(bytes, bytearray, set, frozenset, Enum, UUID, Decimal, PurePath),
    *(dt.date, dt.time, dt.timedelta),
)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return "a value"
    return shortened(text, 60)
