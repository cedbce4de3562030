"""A release with tasks and schedules that the next one, `release_two`, knows otherwise, or no more."""

from __future__ import annotations

from functools import partial

import sqlq
from tests.programs.notes import note

app = sqlq.App()
EACH_SECOND = sqlq.Schedule(every="1s", catch_up="all")


def noting(name: str) -> sqlq.Task[[int], None]:
    return app.task(name=f"work.{name}", max_attempts=1)(partial(note, name))


greet, retired, before = map(noting, ("greet", "retired", "before"))
for name in ("beat", "gone"):
    app.task(name=name, schedule=EACH_SECOND, max_attempts=1)(lambda: None)
