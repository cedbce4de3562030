"""A task that calls a service, which may want fewer calls."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import urlopen

import sqlq
from tests.programs.notes import note

app = sqlq.App()
RUNNING = 6


@app.task(limit=sqlq.Limit("service", running=RUNNING), max_attempts=50, backoff="0s")
def call(n: int, url: str) -> None:
    note("call", n)
    try:
        urlopen(url, timeout=20).close()
    except HTTPError as error:
        raise sqlq.SlowDown.from_headers(error.headers) from None
    finally:
        note("call", n, "end")
