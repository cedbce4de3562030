"""The errors sqlq raises.

    SqlqError
    ├── ConfigurationError          the App, its URL or the installation is not usable as given
    │   ├── UnsupportedDatabaseError    a database, or a version of one, that sqlq does not run on
    │   ├── SchemaVersionError          the tables are missing, too old or too new for this version of sqlq
    │   └── MissingFileError            there is no file of an SQLite database
    ├── EnqueueError                a job was refused before anything was written
    │   ├── UnknownTaskError            no task of that name is registered
    │   └── ArgumentsError              the arguments do not fit the handler, or are not JSON
    ├── ExecutionError              an attempt ended without a verdict of its handler
    │   ├── JobTimeoutError             it ran longer than its timeout
    │   ├── LeaseLostError              the job belongs to another owner by now
    │   └── WorkerLostError             the process that ran it is gone
    ├── JobNotFoundError            there is no job with that id
    ├── ScheduleNotFoundError       there is no schedule of that name (a ConfigurationError, too)
    ├── NoResultError               a job has not finished, or its result was not kept
    │   ├── JobFailedError              it failed for good
    │   ├── JobCancelledError           it was cancelled
    │   └── WaitTimeoutError            it has not ended in the time that it was waited for
    └── PayloadKeyError             an encrypted or signed payload or result cannot be opened with these keys

Each message is one sentence with what is wrong, where, and how to mend it. An `EnqueueError` or
`ConfigurationError` is raised before any write: the caller's transaction is still usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class SqlqError(Exception):
    """The root of all errors of sqlq."""


class ConfigurationError(SqlqError):
    """The App, its URL, a setting or the installation cannot be used as given."""


class UnsupportedDatabaseError(ConfigurationError):
    """The URL names a database, or a version of one, that sqlq does not run on."""


class SchemaVersionError(ConfigurationError):
    """The tables of sqlq are missing, older or newer than this version of sqlq can use."""


class MissingFileError(ConfigurationError):
    """The file of an SQLite database is missing. A running worker waits for it."""

    sqlite_errorcode = 14
    """The error code that SQLite would have raised: SQLITE_CANTOPEN."""


class EnqueueError(SqlqError):
    """A job was refused before anything was written."""


class UnknownTaskError(EnqueueError):
    """No task of that name is registered with the App."""


class ArgumentsError(EnqueueError):
    """Arguments do not fit the handler's signature, or cannot be stored as JSON unchanged."""


class ExecutionError(SqlqError):
    """An attempt ended without a verdict of its handler."""


class JobTimeoutError(ExecutionError):
    """The attempt ran longer than its timeout."""


class LeaseLostError(ExecutionError):
    """The job was claimed by another worker, rescued or cancelled; nothing this owner writes counts any
    more."""


class WorkerLostError(ExecutionError):
    """The process that ran the attempt is gone."""


class JobNotFoundError(SqlqError):
    """There is no job with that id, in any state."""


class ScheduleNotFoundError(ConfigurationError):
    """There is no schedule of that name."""


class NoResultError(SqlqError):
    """A job has no result: it has not finished, or its handler's result was not kept."""


class JobFailedError(NoResultError):
    """The job that was waited for has failed for good.

    `id` and `task` name it. `reason` is why it failed: error, timeout, worker_lost, unknown_task, bad_payload
    or bad_signature. `exception`, `message` and `traceback` are those of its last attempt's error, as text;
    None where there is none. `attempts` were made.
    """

    def __init__(self, message: str, job: Any) -> None:
        super().__init__(message)
        self.id, self.task, self.attempts = job.id, job.task, job.attempts
        self.reason, self.exception = job.reason, job.exception
        self.message, self.traceback = job.message, job.traceback


class JobCancelledError(NoResultError):
    """The job that was waited for was cancelled. `id` and `task` name it; `reason` is why, where one is
    known."""

    def __init__(self, message: str, job: Any) -> None:
        super().__init__(message)
        self.id, self.task, self.reason = job.id, job.task, job.reason


class WaitTimeoutError(NoResultError, TimeoutError):
    """A job has not ended in the time that it was waited for. It goes on all the same."""


class PayloadKeyError(SqlqError):
    """An encrypted or signed payload or result cannot be opened. Its key is not here, it was altered, or it
    is of another task or queue. Or a row is plain where plain rows are refused. `lacks_key` is True where the
    key, or the library for it, is not here: another process may have it."""

    def __init__(self, message: str, *, lacks_key: bool = False) -> None:
        super().__init__(message)
        self.lacks_key = lacks_key
