"""Nightly reports, over both nights of a year on which clocks are changed; run it with a database of its own:

SQLQ_DATABASE_URL=sqlite:///reports.db python reports.py
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import sqlq
from sqlq.testing import drain, tick

BERLIN = ZoneInfo("Europe/Berlin")

app = sqlq.App()


@app.task(name="reports.nightly", schedule=sqlq.Schedule("30 2 * * *", timezone="Europe/Berlin"))
def nightly() -> str:
    """Return the subject of the nightly report: the day before the time that the job is for."""
    moment = sqlq.current_job().scheduled_for
    assert moment is not None
    return f"{moment.astimezone(BERLIN) - timedelta(days=1):%a %d %B}"


@app.task(name="reports.quarter", schedule="*/15 * * * *")
def quarter() -> None:
    """Goes by elapsed time, and so needs no zone."""


def nights(first: datetime, number: int) -> None:
    """Let some days pass on a clock of our own, and print what was reported when."""
    tick(app, first, since=first)
    for day in range(1, number + 1):
        jobs = tick(app, first + timedelta(days=day))
        drain(app)
        for job in jobs:
            if job.task == "reports.nightly" and job.scheduled_for is not None:
                at = job.scheduled_for.astimezone(BERLIN)
                print(f"{at:%a %d %B %H:%M %Z}  report about {app.result(job.id)}")
        quarters = sum(job.task == "reports.quarter" for job in jobs)
        print(f"    of 96 quarters of an hour that nobody ticked, {quarters} was caught up")


if __name__ == "__main__":
    app.migrate()
    print("clocks go forward")
    nights(datetime(2026, 3, 27, 12, tzinfo=UTC), 3)
    print("clocks go back")
    nights(datetime(2026, 10, 23, 12, tzinfo=UTC), 3)
