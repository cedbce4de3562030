"""The common base of the parts of an App that operators use: `app.jobs`, `app.queues` and the others."""

from __future__ import annotations

import builtins
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sqlq.admin.batches import may_proceed, watched
from sqlq.config.command_hint import word
from sqlq.config.durations import Duration, milliseconds
from sqlq.database.caller.session import asynchronous
from sqlq.database.database import Database
from sqlq.errors import SqlqError
from sqlq.model.checks import Rows, checked_name, checks_arguments
from sqlq.model.job import NewJob
from sqlq.schema import version
from sqlq.store import audit

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("sqlq")


class Facet:
    """A group of operations in one database. Each public method checks its arguments by their types."""

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and name[0] != "_" and not inspect.iscoroutinefunction(method):
                setattr(cls, name, checks_arguments(method))  # guard: arguments-are-checked

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def _read(self, *, within_ms: int | None = None) -> Iterator[Connection]:
        """Open a connection that reads, once it is known that the tables are there."""
        with self._database.read(within_ms=within_ms) as conn:
            version.require(conn, self._database.schema)
            yield conn

    def _query(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return the answer of one query."""
        with self._read() as conn:
            return query(conn, *args, **options)

    def _to_the_end(self, work: Callable[[Connection], int], batch: int) -> int:
        """Do the work in transactions of at most a `batch` of rows each; return the number of all rows."""
        total = number = self._database.run(work)
        while number >= batch and may_proceed(number):
            number = self._database.run(work)
            total += number
        return total


# -- the record of actions -----------------------------------------------------------------------------------

_actor: ContextVar[str | None] = ContextVar("sqlq_actor", default=None)
_SUBJECTS = {"ids", "id", "name", "key"}
"""Arguments that stand in a command without a name."""
_NAMED = 20
"""The most ids that are recorded of one action."""


@contextmanager
def acting_as(actor: str | None) -> Iterator[None]:
    """Record the actions of the block as those of an actor; None records nothing."""
    token = _actor.set(None if actor is None else checked_name(actor, "the actor"))
    try:
        yield
    finally:
        _actor.reset(token)


def act_as(actor: str) -> None:
    """Record all actions of this thread from now on as those of an actor."""
    _actor.set(actor)


def audited(words: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Record the calls of a method, where an actor is known: one row before, and its number after. `words`
    are those of the command that does the same, as in "queues pause"."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def recorded(*args: P.args, **options: P.kwargs) -> T:
            actor = _actor.get()
            if actor is None:
                return method(*args, **options)
            facet: Any = args[0]
            with acting_as(None):  # guard: an-action-is-one-row
                line = command_line(words, *args[1:], **options)
                database, session = facet._database, options.get("session")  # noqa: SLF001 - of this class
                if session is None:
                    database.require_tables()
                run = database.run if session is None else partial(facet._do, session)  # noqa: SLF001 - likewise
                id = _record(run, lambda conn: audit.begin(conn, actor, words.partition(" --")[0], line))
                changed = 0

                def write(step: Callable[[Connection, int, int], bool], number: int) -> bool | None:
                    return None if id is None else _record(run, lambda conn: step(conn, id, number))

                def see(number: int) -> bool:
                    nonlocal changed
                    changed += number
                    # one that cannot be recorded goes on
                    return write(audit.advance, changed) is not False

                try:
                    with watched(see):
                        result = method(*args, **options)
                except SqlqError:  # refused, which is no interruption
                    write(audit.end, changed)
                    raise
                if write(audit.end, _number(result)) is None:
                    log.warning("%s is done, and not recorded: the database refuses that", words)
            return result

        return recorded

    return decorate


def _record(run: Callable[[Callable[[Connection], T]], T], work: Callable[[Connection], T]) -> T | None:
    """Write into the record; return None where the database refuses it, which keeps nobody from acting."""
    try:
        return run(work)
    except DBAPIError:  # guard: what-is-not-recorded-is-done
        return None


def command_line(command: str, *subjects: object, **options: object) -> str:
    """Return the words of the command that does the same as a call, without the name of the program.

    >>> command_line("queues pause", "mail", duration="10m")
    'queues pause mail --duration 10m'
    """
    parts = [command]
    for value in (*subjects, *(options[name] for name in _SUBJECTS & options.keys())):
        values: list[Any] = [*value] if isinstance(value, (list, tuple, range, set, frozenset)) else [value]
        ids = [each for each in values[:_NAMED] if each is not None and not isinstance(each, NewJob)]
        parts += [word(str(getattr(each, "id", each))) for each in ids]
        parts += [f"(and {len(values) - _NAMED:,} more)"] if len(values) > _NAMED else []
    for name, value in options.items():
        if value in (None, False) or name in _SUBJECTS or name == "session":
            continue
        parts.append(f"--{name.replace('_', '-')}")
        parts += [] if value is True else [word(str(value))]
    return " ".join(parts)


def _number(result: Any) -> int:
    """Return how much an action changed."""
    if isinstance(result, dict):  # the effects of a cancel or a change, or the ids of replays
        done = ("cancelled", "requested", "changed")
        return sum(isinstance(effect, int) or effect in done for effect in result.values())
    if isinstance(result, tuple):
        return sum(result)  # pruned jobs
    if isinstance(result, int):
        return int(result)
    return len(result) if isinstance(result, list) else 1


def for_asyncio(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the twin of a method for asynchronous code. It runs the method in a thread, so that the event
    loop goes on, or with a `session` in the transaction of that asynchronous session."""
    name = method.__name__

    @wraps(method)
    async def twin(self: Any, /, *args: Any, session: Any = None, **options: Any) -> Any:
        work = getattr(self, name)
        if session is None:
            return await self._database.in_thread(work, *args, **options)
        return await asynchronous(session).run_sync(lambda joined: work(*args, session=joined, **options))

    twin.__name__ = f"a{name}"
    twin.__qualname__ = method.__qualname__.replace(name, twin.__name__)
    twin.__doc__ = f"`{name}` for asynchronous code."
    return cast("Callable[P, Coroutine[Any, Any, T]]", twin)


class Audit(Facet):
    """The actions of operators on a database, by the command line or by `app.acting_as`: `app.audit`."""

    def list(
        self,
        *,
        limit: Rows = 100,
        before: int | None = None,
        actor: str | None = None,
        action: str | None = None,
    ) -> builtins.list[audit.Action]:
        """Return the newest actions, at most `limit`. `before` is the id of the oldest one seen, for the next
        page. `actor` and `action` choose, as in action="queues pause"."""
        return self._query(audit.listing, limit=limit, before=before, actor=actor, action=action)

    alist = for_asyncio(list)

    @audited("audit stop")
    def stop(self, id: int) -> bool:
        """Have an action stop after the batch that it is at; return False for one that has ended.

        >>> app.audit.stop(17)  # doctest: +SKIP
        True
        """
        return self._database.run(partial(audit.stop, id=id))

    def prune(self, older_than: Duration) -> int:
        """Delete the actions that began longer ago than that, as in "90d"; return how many. On PostgreSQL
        this takes the owner of the tables: no operator takes traces away."""
        work = partial(audit.prune, older_than_ms=milliseconds(older_than, "older_than"))
        self._database.require_tables()
        return self._to_the_end(work, audit.BATCH)
