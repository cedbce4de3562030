"""The release after `release_one`: a new argument, a new task, a new name, and other schedules."""

from __future__ import annotations

import sqlq
from tests.programs.notes import note

app = sqlq.App()


@app.task(name="work.greet", max_attempts=1)
def greet(n: int, loudly: bool = False) -> None:
    note("loudly" if loudly else "greet", n)


@app.task(name="work.fresh", max_attempts=1)
async def fresh(n: int) -> None:
    note("fresh", n)


@app.task(name="work.after", aliases=["work.before"], max_attempts=1)
def after(n: int) -> None:
    note("after", n)


for name, schedule in {"beat": sqlq.Schedule(every="2s", catch_up="all"), "gone": None}.items():
    app.task(name=name, schedule=schedule, max_attempts=1)(lambda: None)
