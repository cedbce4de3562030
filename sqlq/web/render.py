"""Templates, and how values are written in them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sqlq.admin.doctor.finding import in_units
from sqlq.config.command_hint import escaped_lines, word
from sqlq.config.durations import span, written
from sqlq.payload.encryption import Unopened
from sqlq.web import plots

LONGEST_TEXT = 20_000
"""Characters of a text that a page shows; the command line and the JSON API have all of it."""


@cache
def templates() -> Environment:
    """Return the templates. Every value in them is escaped."""
    found = Environment(
        loader=PackageLoader("sqlq.web"),
        autoescape=True,  # guard: rows-are-hostile
        undefined=StrictUndefined,
        finalize=_steerless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "age": age,
        "ago": ago,
        "cut": cut,
        "json": as_json,
        "moment": moment,
        "number": number,
        "span": span,
        "text": text,
        "units": in_units,
        "until": until,
        "word": word,
    }
    found.globals |= {"bars": plots.bars, "lines": plots.lines, "graph": plots.graph}
    return found


def _steerless(value: Any) -> Any:
    """Bound a text, and escape what turns the direction of a line or steers a terminal it is pasted into."""
    if isinstance(value, Markup):
        return Markup(escaped_lines(value))  # guard: pages-steer-nothing
    return cut(escaped_lines(str(value)), LONGEST_TEXT)  # guard: pages-are-bounded


def text(value: Any) -> str:
    """Return a text of bounded length."""
    return cut(value, LONGEST_TEXT)


def cut(value: Any, most: int = 120) -> str:
    said = str(value)
    return said if len(said) <= most else f"{said[: most - 1]}…"


def as_json(value: Any) -> str:
    if isinstance(value, Unopened):
        return f"({value.why})"
    return text(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def number(value: Any, most: int | None = None) -> str:
    """Return a count; one that ended at its cap has a plus."""
    return f"{value:,}" + ("+" if most is not None and value >= most else "")


def ago(when: datetime | None) -> Markup:
    """Return how long ago a time was, with the time itself on hover."""
    if when is None:
        return Markup("–")
    return _time(when, f"{span((datetime.now(UTC) - when).total_seconds())} ago")


def age(when: datetime | None) -> Markup:
    """Return for how long something has lasted."""
    return Markup("–") if when is None else _time(when, span((datetime.now(UTC) - when).total_seconds()))


def until(when: datetime | None) -> Markup:
    if when is None:
        return Markup("–")
    seconds = (when - datetime.now(UTC)).total_seconds()
    return _time(when, f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago")


def moment(when: datetime | None) -> Markup:
    return Markup("–") if when is None else _time(when, written(when))


def _time(when: datetime, said: str) -> Markup:
    return Markup('<time datetime="{}" title="{}">{}</time>').format(when.isoformat(), written(when), said)
