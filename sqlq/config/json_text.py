"""Values as JSON, for programs: `--json`, `/api/v1`, and log lines."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlq.config.command_hint import escaped_lines

DEEPEST = 10
"""Deeper levels of a value without a form as JSON are printed as text; so are circles."""


class AsJson:
    """A dataclass that operators see: as an object of JSON, or as a row of a table."""

    __slots__ = ()
    COLUMNS: tuple[str, ...] = ()
    """The columns in a terminal. The attribute follows "=" where it is not called like the column."""

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints and `/api/v1` returns, as an object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # of dataclasses alone


def in_json(value: Any, *, indent: int | None = None) -> str:
    """Return any value as JSON; times become ISO 8601 text with their offset. Values without a form in JSON
    become text. Characters without UTF-8, or that could steer a terminal, are escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=_encoded)
    except Exception:
        text = json.dumps(_with_a_form(value), ensure_ascii=False, indent=indent)  # guard: json-takes-any
    return escaped_lines(text)  # what is escaped is inside texts


def document(value: Any) -> str:
    """Return what `--json` prints and `/api/v1` returns."""
    return in_json(value, indent=2) + "\n"


def _with_a_form(value: Any, room: int = DEEPEST) -> Any:
    match value:
        case dict() if room:
            return {_words(key): _with_a_form(each, room - 1) for key, each in value.items()}
        case list() | tuple() if room:
            return [_with_a_form(each, room - 1) for each in value]
        case None | bool() | str():
            return value
        case int() | float() if math.isfinite(value):
            return value
    return _words(value)


def _words(value: Any) -> str:
    try:
        return str(_encoded(value))
    except Exception:  # its own `__str__`
        return f"<{type(value).__name__}>"


def _encoded(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)
