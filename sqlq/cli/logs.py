"""How `sqlq work` logs: one line an event, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

FIELDS = ("event", "job_id", "task", "queue", "attempt", "duration_ms")
"""What a record may carry beside its message; keys of the JSON form."""


class Lines(logging.Formatter):
    """`2026-01-31 12:30:05.123 INFO    job 7 …`; the traceback of an exception follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return datetime.fromtimestamp(record.created).astimezone().isoformat(sep=" ", timespec="milliseconds")[:23]

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        # a message may quote what a row holds; that must not look like a second event
        record.message = record.message.replace("\r", "").replace("\n", " / ")
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the event's fields where it has them."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(form: Literal["text", "json"], level: str) -> None:
    """Send what sqlq logs to stderr in this form; the rest, too, unless the App's own code has set logging up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logger = logging.getLogger("sqlq")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(handler)
        logging.captureWarnings(capture=True)
