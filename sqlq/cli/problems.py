"""An error as one sentence for a person, with what mends it."""

from __future__ import annotations

import re

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sqlq.cli.context import Context
from sqlq.config.command_hint import escaped_lines
from sqlq.errors import SqlqError


def explain(error: Exception, context: Context) -> str | None:
    """Return the sentence for an error that comes from outside. Return None for a bug, which deserves its
    traceback."""
    if isinstance(error, SqlqError):
        message = str(error)
    elif isinstance(error, DBAPIError):
        message = _of_database(error, context)
    elif isinstance(error, SQLAlchemyError):
        message = f"{context.shown_url()} cannot be used: {_first_line(error)}"
    elif isinstance(error, OSError):
        message = _first_line(error)
    else:
        return None
    return escaped_lines(message)


_MENDS = (
    (
        r"session is read-only|server is in hot standby mode",
        "the primary is not among the hosts that answer: check them in the URL",
    ),
    (r'database "(?P<name>[^"]*)" does not exist', "create it first, as with createdb {name}"),
    (r"Unknown database '(?P<name>[^']*)'", "create it first, as with CREATE DATABASE {name}"),
    (
        r"Access denied for user '[^']*'@'[^']*' to database",
        "create it, and GRANT ALL on it, or check its name in the URL",
    ),
    (r'role "(?P<name>[^"]*)" does not exist', "create it, as with createuser, or check the user in the URL"),
    (
        r"password authentication failed|no password supplied|no pg_hba\.conf entry|Access denied for user",
        "check the user and password in the URL",
    ),
    (r"Connection refused|No such file or directory", "start the server, or check host and port in the URL"),
    (
        r"resolve|Name or service not known|nodename nor servname|Temporary failure in name",
        "check the host in the URL",
    ),
    (r"timeout expired|timed out", "check host, port and firewall"),
    (
        r"starting up|shutting down|in recovery|[Tt]oo many (clients|connections)|remaining connection slots",
        "try again in a moment",
    ),
    (r"permission denied", "GRANT that to the role in the URL"),
    (r"read-only (transaction|option)|READ ONLY transaction", "use the primary server"),
    (r"readonly database", "make the file, and its directory, ones that you may write to"),
    (
        r"disk is full|[Dd]isk full|The table '[^']*' is full|No space left on device",
        "make room on the database's disk",
    ),
    (r"file is not a database|file is encrypted", "name another file"),
    (
        r"unable to open database file",
        "check that it is a file, and that you may read and write it and its directory",
    ),
    (r"database is locked", "another program has held the write lock for long; try again when it has ended"),
    (r"Deadlock found", "another transaction came first, and nothing was changed: run it again"),
    (r"WSREP has not yet prepared node", "the node has lost its cluster: try again, or name another node"),
    (r"Lock wait timeout", "another program has held a lock for long; try again when it has ended"),
)


def _of_database(error: DBAPIError, context: Context) -> str:
    from sqlq.database.dialects import missing_grant, words

    message = words(error)
    reason = _reason(message)
    if grant := missing_grant(error, context.app().database.engine.url, context.kind):
        return f"{context.shown_url()}: {reason}; {grant}"
    for pattern, mend in _MENDS:
        if match := re.search(pattern, message):
            return f"{context.shown_url()}: {reason}; {mend.format(**match.groupdict())}"
    return f"{context.shown_url()}: {reason}"


_OF_A_HOST = re.compile(r"^- host: '([^']*)', port: '([^']*)',.* failed: (?:FATAL:\s+)?(.+)$", re.MULTILINE)


def _reason(message: str) -> str:
    """Return the useful part of a driver's message: the server's own words, or the last "failed: …" of a
    connection. With several hosts it has that of each."""
    if len(tried := _OF_A_HOST.findall(message)) > 1:
        return "; ".join(f"{host}:{port}: {why}" for host, port, why in tried)
    for line in message.splitlines():
        if match := re.search(r"(?:FATAL|ERROR):\s+(.+)", line):
            return match[1].strip()
    first = next((line.strip() for line in message.splitlines() if "failed: " in line), _first_line(message))
    return re.sub(r"^(?:- )?(?:.*connection failed: )?", "", first).strip().rstrip(":")


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
