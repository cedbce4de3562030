"""Lines of finished jobs are made without records, where nobody but the handler that writes them looks."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from sqlq.cli.terminal.logs import ERASE, JsonLines, Lines, OfJob, Stderr
from sqlq.events import JobEvent
from sqlq.model.job import ClaimedJob
from sqlq.worker.report import reporter

NAMES = [
    ("shop.send", "mail"),
    ('a "quoted"\ntask', "queue\r\nwith\\backslashes"),
    ("nul\0 \ud800", "Größe ☃"),
    ("task", b"\xff"),  # SQLite lets it in
]


class Kept(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@pytest.mark.parametrize(("task", "queue"), NAMES)
@pytest.mark.parametrize("form", [Lines(), Lines(ERASE), JsonLines()], ids=["text", "drawn", "json"])
def test_the_line_of_a_finished_job_equals_that_of_a_log_record(
    form: Lines | JsonLines, task: str, queue: str
) -> None:
    job = ClaimedJob(7, 1, queue, task, "{}", 2, 5)
    event = JobEvent(
        name="finished", id=7, task=task, queue=queue, attempt=2, max_attempts=5, seconds=0.0123456
    )
    records: list[logging.LogRecord] = []
    handler = Kept(records)
    reporter.log.addHandler(handler)
    reporter.log.setLevel("INFO")
    try:
        reporter.write_line(event)
    finally:
        reporter.log.removeHandler(handler)
        reporter.log.setLevel("NOTSET")
    (record,) = records
    line = form.finished(job, 0.0123456, form.time(record.created))
    assert line == form.format(record)


WAYS: dict[str, Callable[[], Callable[[], object]]] = {}


def way(change: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
    WAYS[change.__name__] = change
    return change


@way
def a_handler_beside() -> Callable[[], object]:
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    return lambda: logging.getLogger().removeHandler(handler)


@way
def a_handler_of_sqlq() -> Callable[[], object]:
    handler = logging.NullHandler()
    logging.getLogger("sqlq").addHandler(handler)
    return lambda: logging.getLogger("sqlq").removeHandler(handler)


@way
def a_filter_of_the_logger() -> Callable[[], object]:
    logging.getLogger("sqlq.worker").addFilter(OfJob())
    return logging.getLogger("sqlq.worker").filters.clear


@way
def a_filter_of_the_handler() -> Callable[[], object]:
    (handler,) = logging.getLogger().handlers
    handler.addFilter(seen := OfJob())
    return lambda: handler.removeFilter(seen)


@way
def records_of_another_kind() -> Callable[[], object]:
    class Own(logging.LogRecord):
        pass

    logging.setLogRecordFactory(Own)
    return lambda: logging.setLogRecordFactory(logging.LogRecord)


@way
def a_function_in_place_of_loggings() -> Callable[[], object]:
    before = logging.Logger.callHandlers

    def seen(self: logging.Logger, record: logging.LogRecord) -> None:
        before(self, record)

    logging.Logger.callHandlers = seen  # type: ignore[method-assign]
    return lambda: setattr(logging.Logger, "callHandlers", before)


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_a_changed_logging_setup_gets_records(
    change: Callable[[], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler := Stderr(Lines())])
    assert reporter.lines_of_finished() == handler.finished
    undo = change()
    try:
        assert reporter.lines_of_finished() is None
    finally:
        undo()
    assert reporter.lines_of_finished() == handler.finished
