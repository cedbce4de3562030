"""A release with tasks and schedules that the next one, `release_two`, knows otherwise, or no more."""

from __future__ import annotations

import sqlq
from tests.programs.notes import note

app = sqlq.App()
EACH_SECOND = sqlq.Schedule(every="1s", catch_up="all")


@app.task(name="work.greet", max_attempts=1)
def greet(n: int) -> None:
    note("greet", n)


@app.task(name="work.retired", max_attempts=1)
def retired(n: int) -> None:
    note("retired", n)


@app.task(name="work.before", max_attempts=1)
def before(n: int) -> None:
    note("before", n)


@app.task(name="beat", schedule=EACH_SECOND, max_attempts=1)
def beat() -> None: ...


@app.task(name="gone", schedule=EACH_SECOND, max_attempts=1)
def gone() -> None: ...
