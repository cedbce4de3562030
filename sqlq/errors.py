"""The errors sqlq raises.

SqlqError
├── ConfigurationError          the App, its URL or the installation is not usable as given
│   ├── UnsupportedDatabaseError    a database, or a version of one, that sqlq does not run on
│   └── SchemaVersionError          the tables are missing, too old or too new for this version of sqlq
├── EnqueueError                a job was refused before anything was written
│   ├── UnknownTaskError            no task of that name is registered
│   └── ArgumentsError              the arguments do not fit the handler, or are not JSON
├── ExecutionError              an attempt ended without a verdict of its handler
│   ├── JobTimeoutError             it ran longer than its timeout
│   ├── LeaseLostError              the job belongs to another owner by now
│   └── WorkerLostError             the process that ran it is gone
├── JobNotFoundError            there is no job with that id
└── NoResultError               a job has not finished, or its result was not kept

Each message is one sentence that says what is wrong, where, and how to mend it. Whatever is raised as an
`EnqueueError` or `ConfigurationError` was raised before any write: the caller's transaction is still usable.
"""

from __future__ import annotations


class SqlqError(Exception):
    """The root of all errors of sqlq."""


class ConfigurationError(SqlqError):
    """The App, its URL, a setting or the installation cannot be used as given."""


class UnsupportedDatabaseError(ConfigurationError):
    """The URL names a database, or a version of one, that sqlq does not run on."""


class SchemaVersionError(ConfigurationError):
    """The tables of sqlq are missing, older or newer than this version of sqlq can use."""


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


class NoResultError(SqlqError):
    """A job has no result: it has not finished, or what its handler returned was not kept."""
