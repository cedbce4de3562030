"""A command of sqlq as messages quote it: pasted, it acts on the App and database the message is about."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import URL


@dataclass
class CommandLine:
    """The command line that runs, and how it names its App and database."""

    name: str = "sqlq"
    """The word, or words, that it is started with."""
    kind: str = "operator"
    """The kind of role that has the rights for it, one of those of `store.rights`."""

    def url(self) -> URL | None:
        """Return where its database is; None while that is not known."""
        return None

    def options(self, *, needs_app: bool) -> list[str]:
        """Return the options that name the same App and database in another command."""
        return []


OWNER = "owner"
"""The kind of role that no GRANT makes: the one that has migrated."""

current: CommandLine | None = None
"""None in programs other than `sqlq`."""


def command(words: str, url: URL | None = None, *, schema: str | None = None, needs_app: bool = False) -> str:
    """Return `sqlq WORDS` with the options that name the App and the database.

    On the command line these are the ones that were typed. In other programs, and in a message about another
    database, they are made of `url` and `schema`. A URL with a password is masked, as in all messages, and
    stands in SQLQ_DATABASE_URL.
    """
    from sqlq.config.urls import has_secret, is_same_database, shown

    known = None if current is None else current.url()
    # a driver's connection does not have all that the App was given, a password for example
    name, variables = "sqlq", dict[str, str]()
    if current is not None and (url is None or known is None or is_same_database(known, url)):
        # the next command reads the same environment
        name, options, schema = current.name, current.options(needs_app=needs_app), None
    else:
        from sqlq.config import pyproject

        standing, project = os.environ.get("SQLQ_DATABASE_URL"), pyproject.find()
        names_app = os.environ.get("SQLQ_APP") or (project and project.app)
        options = ["-a", "module:attribute"] if needs_app and not names_app else []
        if url is not None and standing in (str(url), url.render_as_string(hide_password=False)):
            pass  # the next command reads the same environment
        elif url is not None and has_secret(url):
            variables["SQLQ_DATABASE_URL"] = shown(url)
        elif url is not None:
            options += ["-d", shlex.quote(shown(url))]
    variables |= {"SQLQ_SCHEMA": schema} if schema else {}
    before = [f"{variable}={shlex.quote(value)}" for variable, value in variables.items()]
    return " ".join([*before, name, words, *options])


def granting(role: str, url: URL | None, *, schema: str | None = None, kind: str | None = None) -> str:
    """Return the advice for a role that lacks rights: one command, whichever of them it lacks."""
    kind = kind or ("producer" if current is None else current.kind)
    if kind == OWNER:
        return "connect as the role that owns the tables, or may create them"
    grants = command(f"grants {word(role)} --as {kind}", url, schema=schema)
    return f"the owner of the tables mends it by what `{grants}` prints"


# Also characters that turn the direction of text around, end a line, or have no UTF-8.
STEERS = r"\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff"  # guard: nothing-steers-a-terminal
"""Characters that could steer a terminal, for a class of a regular expression. The control characters below a
space are not among them."""
_STEERING = re.compile(rf"[\x00-\x08\x0a-\x1f{STEERS}]")


def escaped(text: str) -> str:
    r"""Return text whose characters steer no terminal and end no line: escaped as in JSON, so that two names
    stay two. Tabs stay.

    >>> escaped("mail\x1b[2J") == r"mail\u001b[2J"
    True
    """
    return _STEERING.sub(lambda match: json.dumps(match[0])[1:-1], str(text))  # SQLite lets in bytes


def escaped_lines(text: str) -> str:
    """The same, keeping line ends."""
    return "\n".join(map(escaped, text.split("\n")))


def shortened(text: str, length: int) -> str:
    """Return text of at most this number of characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def word(name: str) -> str:
    """Return a name as a word of a command to paste: quoted where a shell needs that, and escaped where it
    could steer the terminal.

    >>> word("mail"), word("my mail")
    ('mail', "'my mail'")
    """
    return shlex.quote(escaped(name))  # guard: words-steer-no-terminal
