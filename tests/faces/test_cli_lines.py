"""Lines of finished jobs are made without records, where nobody but the handler that writes them looks."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from sqlq.cli.terminal.logs import ERASE, JsonLines, Lines, OfJob, Stderr
from sqlq.events import JobEvent
from sqlq.model.job import ClaimedJob
from sqlq.worker.report import reporter

ROOT, SQLQ, WORKER = (logging.getLogger(name) for name in (None, "sqlq", "sqlq.worker"))
NAMES = [
    ("shop.send", "mail"),
    ('a "quoted"\ntask', "queue\r\nwith\\backslashes"),
    ("nul\0 \ud800", "Größe ☃"),
    ("task", b"\xff"),  # SQLite lets it in
]


@pytest.mark.parametrize(("task", "queue"), NAMES)
@pytest.mark.parametrize("form", [Lines(), Lines(ERASE), JsonLines()], ids=["text", "drawn", "json"])
def test_the_line_of_a_finished_job_equals_that_of_a_log_record(
    form: Lines | JsonLines, task: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(reporter.log, "handle", records.append)
    monkeypatch.setattr(reporter.log, "isEnabledFor", lambda level: True)
    reporter.write_line(
        JobEvent(name="finished", id=7, task=task, queue=queue, attempt=2, max_attempts=5, seconds=0.0123456)
    )
    (record,) = records
    job = ClaimedJob(7, 1, queue, task, "{}", 2, 5)
    assert form.finished(job, 0.0123456, form.time(record.created)) == form.format(record)


NULL, FILTER = logging.NullHandler(), OfJob()
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "a handler beside": (lambda: ROOT.addHandler(NULL), lambda: ROOT.removeHandler(NULL)),
    "a handler of sqlq": (lambda: SQLQ.addHandler(NULL), lambda: SQLQ.removeHandler(NULL)),
    "a filter of the logger": (lambda: WORKER.addFilter(FILTER), lambda: WORKER.removeFilter(FILTER)),
    "a filter of the handler": (
        lambda: ROOT.handlers[0].addFilter(FILTER),
        lambda: ROOT.handlers[0].removeFilter(FILTER),
    ),
    "records of another kind": (
        lambda: logging.setLogRecordFactory(type("Own", (logging.LogRecord,), {})),
        lambda: logging.setLogRecordFactory(logging.LogRecord),
    ),
}
"""Changes that programs make to logging, and their ends."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_logging_setup_gets_records(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ROOT, "handlers", [handler := Stderr(Lines())])
    assert reporter.lines_of_finished() == handler.finished
    do, undo = CHANGES[change]
    do()
    try:
        assert reporter.lines_of_finished() is None
    finally:
        undo()
    assert reporter.lines_of_finished() == handler.finished
    with monkeypatch.context() as patch:
        patch.setattr("logging.Logger.callHandlers", lambda self, record: None)
        assert reporter.lines_of_finished() is None
