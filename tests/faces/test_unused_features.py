"""No line of unused features runs for a job: Python's own profiler counts them, in a process of its own."""

from __future__ import annotations

import sys
from collections import Counter

from tests.kit.command import Command

JOBS = """
import json, sys, threading
from collections import Counter
from pathlib import Path
import sqlq

HOME = str(Path(sqlq.__file__).parent)


def called_by(app):
    '''Which functions of sqlq are called for some jobs, and how often.'''

    @app.task(name="plain")
    def plain(n):
        return n

    @app.task(name="loop")
    async def loop(n):
        return n

    @app.task(name="fails", max_attempts=2, backoff="0s")
    def fails():
        raise ValueError("no")

    def work():
        app.enqueue(plain.new(1))
        app.enqueue_many([plain.new(2), loop.new(2), fails.new()])
        app.worker(drain=True).run()

    called = Counter()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            called[f"{code.co_filename[len(HOME) + 1:]}:{code.co_qualname}"] += 1

    work()  # what is imported and prepared once
    threading.setprofile(note)
    sys.setprofile(note)
    work()
    sys.setprofile(None)
    threading.setprofile(None)
    app.close()
    return called


off = called_by(sqlq.App(sys.argv[1]))
imported = sorted(sys.modules)
from sqlq import otel
from sqlq.payload.encryption import new_key

traced = sqlq.App(sys.argv[1], keys=[new_key()])
otel.instrument(traced)
print(json.dumps([off, imported, called_by(traced)]))
"""
NOT_ASKED_FOR = (
    *("otel.py", "metrics/", "payload/encryption.py", "store/jobs/operate.py"),
    *("worker/claim/claimer.py:opened_by", "worker/report/meter.py", "results/", "store/jobs/lookup.py:look"),
)
EXTRAS = (
    *("prometheus_client", "opentelemetry", "cryptography", "setproctitle"),
    *("jinja2", "werkzeug", "a2wsgi", "waitress"),
)


def test_unused_features_run_no_code_for_a_job(bare: Command, database_url: str) -> None:
    off, imported, on = bare.process(sys.executable, "-c", JOBS, database_url).json()
    assert Counter(off)["worker/attempt/call.py:execute"] == 4, "attempts of def handlers"
    assert {name: n for name, n in off.items() if name.startswith(NOT_ASKED_FOR)} == {}
    extras = {*EXTRAS, "sqlq.otel", "sqlq.metrics", "sqlq.web"}
    if database_url.startswith("mariadb"):
        extras -= {"cryptography"}  # PyMySQL imports it
    assert [name for name in imported if name.startswith(tuple(extras))] == []
    # it would have been seen
    assert Counter(on)["otel.py:_processing"] >= 5
    assert Counter(on)["payload/encryption.py:Encryption.opened"] >= 4
