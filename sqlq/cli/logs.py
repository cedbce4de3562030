"""How `sqlq work` logs: one line an event, for people or as JSON, to stderr."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from sqlq.clock import written
from sqlq.retry import scrubbed
from sqlq.settings import ERROR_BYTES
from sqlq.worker.running import running_here

ERASE = "\r\x1b[2K"
"""Takes the line away that is on the terminal."""
FIELDS = ("event", "job_id", "task", "queue", "attempt", "duration_ms")
"""What a record may carry beside its message; keys of the JSON form."""


class OfJob(logging.Filter):
    """Marks what a handler logs with the job that it runs."""

    def filter(self, record: logging.LogRecord) -> bool:
        job = running_here()
        if job is not None and not hasattr(record, "job_id"):  # guard: log-lines-name-their-job
            record.__dict__ |= job.labels()
        return True


class Bounded(logging.Formatter):
    """Cuts texts of many megabytes, as exceptions may have them, in the middle."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return scrubbed(super().formatException(ei), ERROR_BYTES)  # guard: log-tracebacks-are-bounded


class Lines(Bounded):
    """`2026-01-31 12:30:05.123+00:00 INFO    job 7 …`; the traceback of an exception follows on lines of its
    own. What is not sqlq's begins with the logger's name in brackets, and the job."""

    def __init__(self, before: str = "") -> None:
        super().__init__(f"{before}%(asctime)s %(levelname)-7s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return written(datetime.fromtimestamp(record.created, UTC), "milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        # a message may quote what a row holds; that must not look like a second event
        said = scrubbed(record.message, ERROR_BYTES).replace("\r", "").replace("\n", " / ")
        if not f"{record.name}.".startswith("sqlq."):
            of_job = "job {job_id} {task}: ".format_map(vars(record)) if hasattr(record, "job_id") else ""
            said = f"[{record.name}] {of_job}{said}"
        record.message = said
        return super().formatMessage(record)


class JsonLines(Bounded):
    """One JSON object a line: time (UTC), level, logger, message, and the fields of its event or job."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": scrubbed(record.getMessage(), ERROR_BYTES),
            **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class NoLineAJob(logging.Filter):
    """Leaves out the jobs that ended as they should: another line counts them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or not hasattr(record, "duration_ms")


def set_up(form: Literal["text", "json"], level: str, *, drawn: bool = False) -> None:
    """Send what sqlq logs from this level on, and what the App's code logs, to stderr in this form; where a
    line of progress is `drawn` there, past that.

    To be called when the App has been imported: where its module has given the root logger a handler, all
    goes there instead, since then it is the App's to say.
    """
    for name, known in logging.root.manager.loggerDict.items():
        if f"{name}.".startswith("sqlq.") and isinstance(known, logging.Logger):
            # logging.config disables loggers that its configuration does not name
            known.disabled = False  # guard: loggers-are-enabled
    logging.getLogger("sqlq").setLevel(level.upper())
    if drawn:
        logging.getLogger("sqlq.worker").addFilter(NoLineAJob())
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines(ERASE if drawn else ""))
    handler.addFilter(OfJob())
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
