"""The shop, with schedules that are due each second."""

from __future__ import annotations

from tests.programs.shop import app

BEATS = [f"beat{n}" for n in range(5)]


@app.task(max_attempts=1)
def beat() -> None: ...


for name in BEATS:
    app.schedule(name, beat.new(), every="1s", catch_up="all")
