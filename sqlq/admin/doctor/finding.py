"""The findings of `sqlq doctor`, and the form of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection

from sqlq.admin.queues import Queues, QueueStatus
from sqlq.admin.workers import Workers, WorkerStatus
from sqlq.config.durations import span
from sqlq.config.json_text import AsJson
from sqlq.database.database import Database
from sqlq.store import health
from sqlq.store.workers.workers import Pauses, paused

P = ParamSpec("P")
T = TypeVar("T")


class Verdict(StrEnum):
    """OK: as it should be. CHECK: works, but an operator should know. TO_DO: something does not work, or will
    not for long."""

    OK = "ok"
    CHECK = "check"
    TO_DO = "to do"


@dataclass(frozen=True, slots=True)
class Finding(AsJson):
    """The result of one check, and the remedy."""

    COLUMNS = ("verdict", "about=check", "found=text")
    verdict: Verdict
    said: str
    remedy: str | None = None
    check: str = ""
    """The name of the check, which itself leaves it out."""

    @property
    def text(self) -> str:
        return self.said + (f" → {self.remedy}" if self.remedy else "")


Answers = Iterator[Finding]
ok = partial(Finding, Verdict.OK)
check = partial(Finding, Verdict.CHECK)
to_do = partial(Finding, Verdict.TO_DO)


class Case:
    """One examination of a database. An answer that several checks need is read once."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def query(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one query, in a transaction of its own with a limited time."""
        with health.reading(self.database) as conn:
            return read(conn, *args, **kwargs)

    @cached_property
    def workers(self) -> list[WorkerStatus]:
        return Workers(self.database).list()

    @cached_property
    def queues(self) -> list[QueueStatus]:
        return Queues(self.database).list()

    @cached_property
    def pauses(self) -> Pauses:
        return self.query(paused)


class Check(NamedTuple):
    """A check, and its subject. `judge` yields the troubles with their remedies. Without any the finding is
    `well`, if there is such a sentence."""

    name: str
    judge: Callable[[Case], Iterable[Finding]]
    well: str | None = None


def troubles(
    case: Case, read: Callable[[Connection, str], Any], settings: Mapping[str, Mapping[Any, Finding]]
) -> Answers:
    """Yield the answers to those settings that have one of the named values."""
    for name, answers in settings.items():
        if answer := answers.get(case.query(read, name)):
            yield answer


DAMAGED = "stop all workers, and restore a backup, or save what can be with sqlite3's .recover"
OLD_TRANSACTION_S = 300.0
"""An open transaction of this age is named: the server cannot remove a row that it may still read."""
VERY_OLD_TRANSACTION_S = 3_600.0


def old_transactions(case: Case, read: Callable[..., Any], remedy: str) -> Answers:
    """Yield the open transactions that are old, as `query` returns them."""
    for session in case.query(read, older_than_s=OLD_TRANSACTION_S):
        answer = to_do if session.seconds >= VERY_OLD_TRANSACTION_S else check
        yield answer(
            f"session {session.number} ({session.program or 'no application_name'}, {session.state}) has had "
            f"a transaction open for {span(session.seconds)}: no row that died since then can be removed",
            f"end it where it was begun, or {remedy.format(session.number)}",
        )
