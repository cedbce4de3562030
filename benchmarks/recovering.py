"""An App whose import takes a given time, and a task whose first attempt runs until its process is killed."""

from __future__ import annotations

import os
import threading
import time

import sqlq

busy_until = time.process_time() + float(os.environ.get("SQLQ_BENCHMARK_IMPORT_SECONDS", "0"))
while time.process_time() < busy_until:
    pass

app = sqlq.App()
if imported := os.environ.get("SQLQ_BENCHMARK_IMPORTED"):
    with open(imported, "a") as file:  # noqa: PTH123 - as below
        print(os.getpid(), file=file)


@app.task(backoff="0s")
def wait_to_be_killed(file: str) -> None:
    """Note the start; in the first attempt wait."""
    with open(file, "a") as starts:  # noqa: PTH123 - as quick as can be
        starts.write(f"{os.getpid()} {time.time()}\n")
    if sqlq.current_job().attempt == 1:
        threading.Event().wait(300)
