"""Headers: data that travels with a job beside its arguments, as a JSON object of at most 16 KiB.

Names that begin with `sqlq.` are sqlq's own; `sqlq.carry` holds the context variables that an App carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from sqlq.config.constants import HEADERS_BYTES
from sqlq.errors import ArgumentsError, ConfigurationError
from sqlq.payload.codec import check_json, json_within, read_json

Headers = Mapping[str, Any]
NO_HEADERS: Headers = MappingProxyType({})
OWN = "sqlq."
"""How names begin that are sqlq's own."""
CARRY = f"{OWN}carry"


def checked(value: Any, subject: str) -> dict[str, Any]:
    """Return headers that a user gave as a dict. Raises `ConfigurationError` for anything but a mapping of
    names to JSON, and for a name that is sqlq's own."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{subject} is {value!r}: headers are a mapping of names to JSON, as in {{'tenant': 'blue'}}"
        )
    headers = dict(value)
    for name, item in headers.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"{subject} has the name {name!r}: a header is named by text, as in 'tenant'"
            )
        if name.startswith(OWN):
            raise ConfigurationError(
                f"{subject} has the name {name!r}: names that begin with {OWN!r} are sqlq's own"
            )
        check(name, f"{subject}, the name {name!r},")
        check(item, f"{subject}[{name!r}]")
    return headers


def check(value: Any, where: str) -> None:
    """Raise `ConfigurationError` for a value that is not JSON."""
    with _configuring():
        check_json(value, where, "pass its text, or what it is made of")


@contextmanager
def _configuring() -> Iterator[None]:
    try:
        yield
    except ArgumentsError as wrong:
        raise ConfigurationError(str(wrong)) from None


def encode(headers: Headers, subject: str) -> str | None:
    """Return checked headers as a row has them, None where there are none. Raises `ConfigurationError` for
    more than 16 KiB."""
    if not headers:
        return None
    mend = "pass large things as arguments, or store them and pass an id"
    with _configuring():
        return json_within(HEADERS_BYTES, headers, f"{subject} take", mend)


def decode(text: Any) -> dict[str, Any]:
    """Return the headers in a row. Raises `ArgumentsError` for a text that sqlq itself would not have written
    there."""
    if not isinstance(text, str):
        raise ArgumentsError("the headers are not text")
    headers = read_json(text, "the headers are")
    if not isinstance(headers, dict):
        raise ArgumentsError('the headers are not a JSON object, as in {"tenant": "blue"}')
    if not isinstance(headers.get(CARRY, {}), dict):
        raise ArgumentsError(f"in the headers {CARRY!r} is not a JSON object")
    return headers


def shown(text: str | None) -> Headers:
    """Return the headers in a row as its handler sees them: without sqlq's own."""
    if text is None:
        return NO_HEADERS
    return MappingProxyType({name: value for name, value in decode(text).items() if not name.startswith(OWN)})


def carried(text: str | None) -> Headers:
    """Return the values of context variables in the headers of a row."""
    values: Headers = NO_HEADERS if text is None else decode(text).get(CARRY, NO_HEADERS)
    return values
