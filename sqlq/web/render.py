"""Templates, and how values are written in them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sqlq.admin.doctor.finding import in_units
from sqlq.config.command_hint import escaped_lines, shortened, word
from sqlq.config.durations import age, span, until, written
from sqlq.model.flow_status import StepDetails
from sqlq.payload.encryption import Unopened

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
        "age": partial(_time, age),
        "ago": partial(_time, lambda when: f"{age(when)} ago"),
        "cut": cut,
        "json": as_json,
        "moment": partial(_time, written),
        "number": "{:,}".format,
        "span": span,
        "units": in_units,
        "until": partial(_time, until),
        "word": word,
    }
    found.globals["placed"] = placed
    return found


def placed(steps: Sequence[StepDetails], width: int, height: int) -> dict[int, tuple[int, int]]:
    """Return where each step of a flow is drawn: in the column after those that it waits for."""
    columns: dict[int, int] = {}
    rows: Counter[int] = Counter()
    places = {}
    for step in steps:  # ids ascend, and a step waits for earlier ones only
        column = columns[step.id] = 1 + max((columns[id] for id in step.after if id in columns), default=-1)
        places[step.id] = column * width + 1, rows[column] * height + 1
        rows[column] += 1
    return places


def _steerless(value: Any) -> Any:
    """Bound a text, and escape what turns the direction of a line or steers a terminal it is pasted into."""
    if isinstance(value, Markup):
        return Markup(escaped_lines(value))  # guard: pages-steer-nothing
    return shortened(escaped_lines(str(value)), LONGEST_TEXT)  # guard: pages-are-bounded


def cut(value: Any, most: int = 120) -> str:
    """Return a text of at most this number of characters."""
    return shortened(str(value), most)


def as_json(value: Any) -> str:
    if isinstance(value, Unopened):
        return f"({value.why})"
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def _time(words: Callable[[datetime], str], when: datetime | None) -> Markup:
    """Write a time in these words, with the time itself on hover."""
    if when is None:
        return Markup("–")
    form = Markup('<time datetime="{}" title="{}">{}</time>')
    return form.format(when.isoformat(), written(when), words(when))
