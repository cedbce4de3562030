"""Where in the user's own code an error arose, by the text of its traceback."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_FRAME = re.compile(r' *File "([^"]+)", line (\d+), in (.+)$')
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_NOT_THE_USERS = ("site-packages", "dist-packages", _OWN, "lib/python3", "<frozen")


class Line(NamedTuple):
    """A line of a traceback; `file` has its folder's name before it."""

    file: str
    number: int
    function: str


def users_line(trace: str | None, *, or_last: bool = False) -> Line | None:
    """Return the last line of a traceback that is the user's own. Where none is, return None, or with
    `or_last` the last one."""
    frames = [frame for text in (trace or "").split("\n") if (frame := _FRAME.match(text))]
    own = [frame for frame in frames if not any(mark in frame[1] for mark in _NOT_THE_USERS)]
    lines = own or (frames if or_last else [])
    if not lines:
        return None
    path, number, function = lines[-1].groups()
    return Line("/".join(path.replace("\\", "/").split("/")[-2:]), int(number), function.strip())
