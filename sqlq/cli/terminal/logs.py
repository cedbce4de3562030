"""How `sqlq work` logs: one line an event, for people or as JSON, to stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from sqlq.cli.processes import StandardStream, nonblocking
from sqlq.config.command_hint import escaped, escaped_lines
from sqlq.config.constants import ERROR_BYTES
from sqlq.config.durations import counted, readable, written
from sqlq.config.json_text import in_json
from sqlq.model.job import ClaimedJob
from sqlq.model.retry import scrubbed
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.context import attempt_of, current_job
from sqlq.worker.report.reporter import LEVELS

log = logging.getLogger("sqlq.worker")

ERASE = "\r\x1b[2K"
"""Takes the line away that is on the terminal."""
FIELDS = ("event", "job_id", "task", "queue", "attempt", "duration_ms", "trace_id", "span_id")
"""The fields of a record beside its message, as keys of the JSON form."""
COUNTED = ("finished", "snoozed", "released")
STDERR = 2


class OfJob(logging.Filter):
    """Marks what a handler logs with the job that it runs."""

    def filter(self, record: logging.LogRecord) -> bool:
        job = current_job(None)
        if job is not None and not (_is_of_sqlq(record) and hasattr(record, "job_id")):
            # beside what the App's code gave the record by these names, which is other handlers' to see
            record.__dict__[_LABELS] = attempt_of(job).labels()  # guard: log-lines-name-their-job
        return True


_LABELS = "sqlq_job"


def _is_of_sqlq(it: logging.LogRecord | logging.Logger) -> bool:
    return f"{it.name}.".startswith("sqlq.")


class Form(logging.Formatter):
    """Cuts texts of many megabytes, as exceptions may have them, in the middle."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return scrubbed(super().formatException(ei), ERROR_BYTES)  # guard: log-tracebacks-are-bounded


class Lines(Form):
    """`2026-01-31 12:30:05.123+00:00 INFO    job 7 …`; the traceback of an exception follows on lines of its
    own. Lines of other loggers begin with the logger's name in brackets, and the job."""

    def __init__(self, before: str = "") -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self._before = before

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return self.time(record.created)

    def time(self, at: float) -> str:
        return written(datetime.fromtimestamp(at, UTC), "milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        if not _is_of_sqlq(record):
            job = getattr(record, _LABELS, None)
            of_job = "job {job_id} {task}: ".format_map(job) if job else ""
            record.message = f"[{record.name}] {of_job}{record.message}"
        record.message = _on_one_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        # guard: tracebacks-steer-no-terminal
        return f"{self._before}{escaped_lines(super().format(record))}"

    def finished(self, job: ClaimedJob, seconds: float, at: str) -> str:
        """Return the line of a finished job, as `format` returns that of its record."""
        return (
            f"{self._before}{at} INFO    job {job.id} {_texts(job.task, job.queue)[0]}{job.attempts} of "
            f"{job.max_attempts}) finished in {readable(seconds * 1000)}"
        )


def _on_one_line(text: str) -> str:
    # a message may quote what a row holds; that must not look like a second event
    # guard: lines-steer-no-terminal
    return escaped(scrubbed(text, ERROR_BYTES).replace("\r", "").replace("\n", " / "))


class JsonLines(Form):
    """One JSON object a line: time (UTC), level, logger, message, and the fields of its event or job."""

    def time(self, at: float) -> str:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")

    def format(self, record: logging.LogRecord) -> str:
        known = {**vars(record), **getattr(record, _LABELS, {})}
        line = {
            "time": self.time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": scrubbed(record.getMessage(), ERROR_BYTES),
            **{name: known[name] for name in FIELDS if name in known},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return in_json(line)

    def finished(self, job: ClaimedJob, seconds: float, at: str) -> str:
        _, about, task, queue = _texts(job.task, job.queue)
        return (
            f'{{"time": "{at}", "level": "info", '
            f'"logger": "sqlq.worker", "message": "job {job.id} {about}{job.attempts} of {job.max_attempts}) '
            f'finished in {readable(seconds * 1000)}", "event": "finished", "job_id": {job.id}, '
            f'"task": {task}, "queue": {queue}, "attempt": {job.attempts}, '
            f'"duration_ms": {round(seconds * 1000, 1)}}}'
        )


@lru_cache(1_000)
def _texts(task: str, queue: str) -> tuple[str, str, str, str]:
    """Return the begin of a job's line as text and inside a JSON text, its task and its queue."""
    about = f"{task} (queue {queue}, attempt "
    return (
        _on_one_line(about),
        in_json(scrubbed(about, ERROR_BYTES))[1:-1],
        in_json(task),
        in_json(str(queue)),
    )


class Stderr(logging.Handler):
    """Writes a line to standard error before the call returns, and counts those that cannot be written."""

    def __init__(self, form: Lines | JsonLines) -> None:
        super().__init__()
        self._form = form
        self._stream = StandardStream(nonblocking(STDERR))
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._dropped = 0
        self._after_cut = ""
        """A line's end where only a part of the last line is written."""
        self.setFormatter(form)
        self.addFilter(OfJob())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(f"{self.format(record)}\n")
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def finished(self, jobs: Sequence[Attempt]) -> None:
        """Write the lines of finished jobs, of which there are no records."""
        at = self._form.time(time.time())
        lines = [f"{self._form.finished(job.claimed, job.seconds(), at)}\n" for job in jobs]
        self._put("".join(lines))

    def draw(self, text: str) -> None:
        """Write what is no line, and of use only now."""
        with self.lock or nullcontext():
            self._stream.write(text.encode(self._encoding, "backslashreplace"))

    def flush(self) -> None:
        """Write the number of dropped lines, if any."""
        self._put("")

    def _put(self, text: str) -> None:
        """Write these lines, after the number of those that were dropped."""
        with self.lock or nullcontext():
            note = b""
            if self._dropped:
                message = f"{counted(self._dropped, 'line was', 'lines were')} dropped: stderr took no more"
                record = log.makeRecord(log.name, logging.WARNING, __file__, 0, message, (), None)
                note = f"{self._after_cut}{self.format(record)}\n".encode()
            data = note + text.encode(self._encoding, "backslashreplace")
            written = self._stream.write(data)
            if written >= len(note):
                self._dropped = 0
            # guard: dropped-lines-are-counted
            self._dropped += data.count(b"\n", max(written, len(note)))
            if written:
                self._after_cut = "" if data[:written].endswith(b"\n") else "\n"


def set_up(form: Literal["text", "json"], level: str, *, drawn: bool = False) -> None:
    """Send the log of sqlq and of the App's code from this level on to stderr. With `drawn` the lines leave
    the line of progress alone.

    Call it when the App has been imported: if its module has given the root logger a handler, all lines go
    there instead.
    """
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    for each in filter(_is_of_sqlq, loggers):
        # logging.config disables loggers that its configuration does not name
        each.disabled = False  # guard: loggers-are-enabled
    logging.getLogger("sqlq").setLevel(level.upper())
    root = logging.getLogger()
    if drawn:  # another line counts them
        for name in COUNTED:
            LEVELS.pop(name, None)
    if root.handlers:
        return
    for each in loggers:
        if each.propagate:
            each.handlers = [handler for handler in each.handlers if not _writes_the_same(handler)]
    root.addHandler(Stderr(JsonLines() if form == "json" else Lines(ERASE if drawn else "")))
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)


def _writes_the_same(handler: logging.Handler) -> bool:
    """Whether a handler writes messages to stderr as they are, as the one of Django's own does with DEBUG."""
    streams = (sys.stderr, sys.__stderr__)
    return type(handler) is logging.StreamHandler and handler.stream in streams and not handler.formatter


def draw(text: str) -> None:
    """Write a line of progress, if stderr takes it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Stderr):
            handler.draw(text)
