"""How `sqlq work` logs: one line an event, for people or as JSON, to stderr, for which no job waits."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from sqlq.cli.outlet import Outlet
from sqlq.cli.output import in_json
from sqlq.config.command_hint import escaped, escaped_lines
from sqlq.config.constants import ERROR_BYTES
from sqlq.config.durations import counted, readable, written
from sqlq.model.job import ClaimedJob
from sqlq.model.retry import scrubbed
from sqlq.worker.attempt.context import attempt_of, current_job
from sqlq.worker.report.reporter import LinesOfJobs, milliseconds, subject
from sqlq.worker.threads import serving

log = logging.getLogger("sqlq.worker")

ERASE = "\r\x1b[2K"
"""Takes the line away that is on the terminal."""
FIELDS = ("event", "job_id", "task", "queue", "attempt", "duration_ms", "trace_id", "span_id")
"""The fields of a record beside its message, as keys of the JSON form."""


class OfJob(logging.Filter):
    """Marks what a handler logs with the job that it runs."""

    def filter(self, record: logging.LogRecord) -> bool:
        job = current_job(None)
        if job is not None and not (_is_ours(record) and hasattr(record, "job_id")):
            # beside what the App's code gave the record by these names, which is other handlers' to see
            record.__dict__[_LABELS] = attempt_of(job).labels()  # guard: log-lines-name-their-job
        return True


_LABELS = "sqlq_job"


def _is_ours(record: logging.LogRecord) -> bool:
    return f"{record.name}.".startswith("sqlq.")


class NoLineAJob(logging.Filter):
    """Leaves out the jobs that ended as they should: another line counts them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.name != log.name or not hasattr(record, "duration_ms")


class Form(logging.Formatter):
    """Makes lines of records, and of finished jobs, of which there is no record. Cuts texts of many
    megabytes, as exceptions may have them, in the middle."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return scrubbed(super().formatException(ei), ERROR_BYTES)  # guard: log-tracebacks-are-bounded

    def finished(self, job: ClaimedJob, seconds: float) -> str:
        """Return the line of a finished job, as `format` returns that of its record."""
        raise NotImplementedError


class Lines(Form):
    """`2026-01-31 12:30:05.123+00:00 INFO    job 7 …`; the traceback of an exception follows on lines of its
    own. Lines of other loggers begin with the logger's name in brackets, and the job."""

    def __init__(self, before: str = "", app: str | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self._before = before
        self._app = app
        self._moment = _Moments(lambda moment: written(moment, "milliseconds"))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return self._moment(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        said = _on_one_line(record.message)
        if not _is_ours(record):
            job = getattr(record, _LABELS, None)
            of_job = "" if job is None else "job {job_id} {task}: ".format_map(job)
            said = f"[{escaped(record.name)}] {escaped(of_job)}{said}"
        record.message = said
        return f"{self._begin()}{super().formatMessage(record)}"

    def _begin(self) -> str:
        app = self._app or serving.get()
        return self._before if app is None else f"{self._before}{escaped(app)} | "

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return escaped_lines(super().formatException(ei))  # guard: tracebacks-steer-no-terminal

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        return escaped_lines(stack_info)

    def finished(self, job: ClaimedJob, seconds: float) -> str:
        return (
            f"{self._begin()}{self._moment(time.time())} INFO    job {job.id} "
            f"{_subject_on_one_line(job.task, job.queue)}{job.attempts} of {job.max_attempts}) "
            f"finished in {readable(seconds * 1000)}"
        )


def _on_one_line(text: str) -> str:
    # a message may quote what a row holds; that must not look like a second event
    # guard: lines-steer-no-terminal
    return escaped(scrubbed(text, ERROR_BYTES).replace("\r", "").replace("\n", " / "))


@lru_cache(1_000)
def _subject_on_one_line(task: str, queue: str) -> str:
    return _on_one_line(subject(task, queue))


class JsonLines(Form):
    """One JSON object a line: time (UTC), level, logger, message, and the fields of its event or job. Where
    a worker serves several Apps, its `app` comes first."""

    def __init__(self, app: str | None = None) -> None:
        super().__init__()
        self._app = app
        self._moment = _Moments(lambda moment: moment.isoformat(timespec="milliseconds"))

    def format(self, record: logging.LogRecord) -> str:
        known = {**vars(record), **getattr(record, _LABELS, {})}
        line = {
            "time": self._moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": scrubbed(record.getMessage(), ERROR_BYTES),
            **{name: known[name] for name in FIELDS if name in known},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return self._begin() + in_json(line)[1:]

    def _begin(self) -> str:
        app = self._app or serving.get()
        return "{" if app is None else f'{{"app": {in_json(app)}, '

    def finished(self, job: ClaimedJob, seconds: float) -> str:
        about, task, queue = _in_json(job.task, job.queue)
        return (
            f'{self._begin()}"time": "{self._moment(time.time())}", "level": "info", '
            '"logger": "sqlq.worker", "message": '
            f'"job {job.id} {about}{job.attempts} of {job.max_attempts}) finished in '
            f'{readable(seconds * 1000)}", "event": "finished", "job_id": {job.id}, "task": {task}, '
            f'"queue": {queue}, "attempt": {job.attempts}, "duration_ms": {milliseconds(seconds)}}}'
        )


@lru_cache(1_000)
def _in_json(task: str, queue: str) -> tuple[str, str, str]:
    """Return the subject of a job's line as the inside of a JSON text, its task and its queue."""
    about = in_json(scrubbed(subject(task, queue), ERROR_BYTES))
    return about[1:-1], in_json(task), in_json(str(queue))


class _Moments:
    """Formats times. Most of the text is that of the second before."""

    def __init__(self, write: Callable[[datetime], str]) -> None:
        self._write = write
        self._second = -1
        self._parts = ("", "")

    def __call__(self, at: float) -> str:
        second, ms = divmod(int(at * 1000), 1000)
        if second != self._second:
            text = self._write(datetime.fromtimestamp(second, UTC))
            point = text.index(".") + 1
            self._second, self._parts = second, (text[:point], text[point + 3 :])
        before, after = self._parts
        return f"{before}{ms:03}{after}"


class Stderr(LinesOfJobs):
    """Writes to stderr, and waits for no slow reader. A line is written when the call returns. Lines of
    finished jobs are written in batches."""

    its_filters = (OfJob(),)

    def __init__(self, form: Form, *, counted: bool = False) -> None:
        """Where finished jobs are `counted` in another line, they are none."""
        super().__init__()
        self._form = form
        self._leaves_out = NoLineAJob() if counted else None
        self._outlet = Outlet(sys.stderr, self._dropped)
        self.setFormatter(form)
        for known in self.its_filters:
            self.addFilter(known)

    def emit(self, record: logging.LogRecord) -> None:
        if self._leaves_out is not None and not self._leaves_out.filter(record):
            return
        try:
            self._outlet.put(f"{self.format(record)}\n")
            self._outlet.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def finished(self, job: ClaimedJob, seconds: float) -> None:
        if self._leaves_out is None:
            self._outlet.put(f"{self._form.finished(job, seconds)}\n")

    def told(self) -> None:
        self._outlet.flush()

    def draw(self, text: str) -> None:
        """Write what is no line, and of use only now."""
        self._outlet.draw(text)

    def flush(self) -> None:
        self._outlet.flush()

    def close(self) -> None:
        """Write what waits, if stderr takes it soon."""
        self._outlet.finish()
        super().close()

    def _dropped(self, lines: int) -> str:
        said = f"{counted(lines, 'line was', 'lines were')} dropped: stderr took no more"
        record = log.makeRecord(log.name, logging.WARNING, __file__, 0, said, (), None)
        return f"{self.format(record)}\n"


def set_up(form: Literal["text", "json"], level: str, *, drawn: bool = False, app: str | None = None) -> None:
    """Send the log of sqlq and of the App's code from this level on to stderr. With `drawn` the lines leave
    the line of progress alone. The name of the App, where there are several, begins each line.

    Call it when the App has been imported: if its module has given the root logger a handler, all lines go
    there instead.
    """
    for name, known in logging.root.manager.loggerDict.items():
        if f"{name}.".startswith("sqlq.") and isinstance(known, logging.Logger):
            # logging.config disables loggers that its configuration does not name
            known.disabled = False  # guard: loggers-are-enabled
    logging.getLogger("sqlq").setLevel(level.upper())
    root = logging.getLogger()
    if root.handlers:
        if drawn:
            log.addFilter(NoLineAJob())
        return
    for known in logging.root.manager.loggerDict.values():
        if isinstance(known, logging.Logger) and known.propagate:
            known.handlers = [handler for handler in known.handlers if not _writes_the_same(handler)]
    lines = JsonLines(app) if form == "json" else Lines(ERASE if drawn else "", app)
    root.addHandler(Stderr(lines, counted=drawn))
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)


def _writes_the_same(handler: logging.Handler) -> bool:
    """Whether a handler writes messages to stderr as they are, as the one of Django's own does with DEBUG."""
    return type(handler) is logging.StreamHandler and handler.stream is sys.stderr and not handler.formatter


def draw(text: str) -> None:
    """Write a line of progress, if stderr takes it now."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Stderr):
            handler.draw(text)


def finish() -> None:
    """Write what waits, if stderr takes it soon: this process is about to leave."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Stderr):
            handler.close()
