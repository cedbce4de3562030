"""Operators' methods, which are discovered, refuse a wrong argument in one sentence, before any SQL."""

from __future__ import annotations

import faulthandler
import inspect
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from typing import Any

import pytest
from sqlalchemy import event

import sqlq
from sqlq.admin.selections import Chosen, Search
from sqlq.config.durations import FAR
from sqlq.errors import ConfigurationError, EnqueueError, JobNotFoundError, SqlqError
from sqlq.model.schedule import Options
from tests.kit import for_each, needs


class Number(IntEnum):
    """Numbers for which `in range(…)` counts, and keeps the interpreter's lock meanwhile."""

    LARGE = 2**40


WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 7, 10**30, 1.5, math.nan, Number.LARGE, Decimal(7), 7j, object(), len, int),
    *("", " ", "7", "0s", "x" * 300, "a\0b", "\ud800", "no", b"7", bytearray(b"7"), uuid.UUID(int=7)),
    *([], ["7"], [None], [7, "x"], [[7]], {}, {"id": 7}, {7}, (each for each in [7])),
    *(datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None), datetime(9998, 1, 1, tzinfo=UTC)),
    *(timedelta(-1), timedelta(days=10**6)),
)
GIVEN: dict[str, Any] = {"id": 7, "ids": [7], "jobs": [7], "job": None, "limit": 10, "parts": 3}
GIVEN |= {"name": "nightly", "names": "mail", "queue": "mail", "key": "stripe", "batch": "import"}
GIVEN |= {"states": ["failed"], "fingerprint": "f00", "older_than": "90d", "finished": "7d", "length": "1h"}
GIVEN |= {"since": datetime(2026, 1, 1, tzinfo=UTC), "until": datetime(2026, 1, 2, tzinfo=UTC)}
"""The arguments beside the wrong one, by name: those that are required, and one that chooses."""


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def are_ids(value: Any) -> bool:
    return isinstance(value, list | set) and all(map(is_whole, value))


FITS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("str", "Schedule | str", "CatchUp", "Overlap"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("int", "Priority", "Rows", "AnyJob", "FlowOrId"), is_whole),
    **dict.fromkeys(("AnyJobs", "tuple[int, ...]"), are_ids),
    "AnyJob | AnyJobs": lambda value: is_whole(value) or are_ids(value),
    "Collection[str]": lambda value: value in ([], ["7"]),
    "Duration": lambda value: isinstance(value, str | timedelta),
    "NewJob[Any]": lambda value: False,
    "bool": lambda value: isinstance(value, bool),
    "datetime": lambda value: isinstance(value, datetime),
    "datetime | Duration": lambda value: isinstance(value, datetime | str | timedelta),
}
"""Whether a value is of a declared type. One that is may be answered."""
NOT_TRIED = {"session", "args", "kwargs", "visible"}  # no id, name, time, number or choice
KEYWORDS: Mapping[str, Any] = {"Chosen": Chosen, "Search": Search, "Options": Options}


def methods_of(part: Any) -> Iterator[tuple[str, Any]]:
    for name, method in inspect.getmembers(part, inspect.ismethod):
        if not name.startswith("_") and not inspect.iscoroutinefunction(method):
            yield name, method


def arguments_of(method: Any) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a method with their types as they are declared."""
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            known = KEYWORDS[parameter.annotation.removeprefix("Unpack[").removesuffix("]")]
            yield from ((name, declared.__forward_arg__) for name, declared in known.__annotations__.items())
        else:
            yield name, parameter.annotation


def call(method: Any, name: str, value: Any) -> None:
    """Call a method with one value, and right ones beside it."""
    positional: list[Any] = []
    named = {name: value}
    for other, parameter in inspect.signature(method).parameters.items():
        if other != name and parameter.default is not parameter.empty and other not in ("ids", "finished"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [] if name in ("all", "task") else [named.pop(other, GIVEN[other])]
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(named.pop(other) if other == name else GIVEN[other])
        elif parameter.kind is not parameter.VAR_KEYWORD:
            named.setdefault(other, GIVEN.get(other))
    method(*positional, **named)


def misfits(part: Any, said: list[str]) -> Iterator[str]:
    """Yield each call with a wrong value that has another answer than an error, before what is `said`."""
    for word, method in methods_of(part):
        for name, declared in arguments_of(method):
            kind = declared.removesuffix(" | None")
            for value in WRONG if name not in NOT_TRIED else ():
                fits = (value is None and kind != declared) or FITS[kind](value)
                said.clear()
                faulthandler.dump_traceback_later(60, exit=True)  # which needs no interpreter's lock
                began, outcome = time.thread_time(), "an answer"
                try:
                    call(method, name, value)
                except SqlqError as error:
                    outcome = "" if str(error) and not (said and not fits) else "an error after SQL"
                except BaseException as error:
                    outcome = repr(error)
                faulthandler.cancel_dump_traceback_later()
                if time.thread_time() - began > 1 or (outcome and not (fits and outcome == "an answer")):
                    yield f"{word}({name}={value!r:.40}) of {declared}: {outcome}"


PARTS = ("audit", "flows", "jobs", "limits", "queues", "schedules", "workers")


def test_each_asynchronous_method_is_the_twin_of_the_one_of_its_name(app: sqlq.App) -> None:
    members = [each for part in PARTS for each in vars(type(getattr(app, part))).items()]
    twins = {name: method for name, method in members if inspect.iscoroutinefunction(method)}
    assert {"acancel", "alist", "arun"} <= twins.keys()
    assert [name for name, twin in twins.items() if f"a{inspect.unwrap(twin).__name__}" != name] == []


@pytest.mark.parametrize("part", PARTS)
def test_each_argument_of_each_method_is_checked_before_any_sql(app: sqlq.App, part: str) -> None:
    said: list[str] = []
    event.listen(app.database.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
    assert list(misfits(getattr(app, part), said)) == []


def test_unknown_options_are_one_error(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GIVEN, "job", app.named("report").new())
    for part in PARTS:
        for _, method in methods_of(getattr(app, part)):
            with pytest.raises(ConfigurationError, match=r"\bcolour\b"):
                call(method, "colour", "red")


def test_no_number_counts_up_to_an_id(app: sqlq.App) -> None:
    for look in (app.jobs.get, app.flows.get, app.flows.skip, app.result, lambda id: app.wait_all([id])):
        with pytest.raises(JobNotFoundError, match=str(2**40)):
            look(Number.LARGE)
    assert app.jobs.cancel([Number.LARGE]) == {2**40: "unknown"}
    for wrong in WRONG:
        if not isinstance(wrong, bool):
            with pytest.raises(ConfigurationError, match="raw is"):
                app.result(7, raw=wrong)
            with pytest.raises(ConfigurationError, match="all is"):
                app.wait_all([7], all=wrong)
        if not isinstance(wrong, str | timedelta | None):
            with pytest.raises(ConfigurationError, match="timeout is"):
                app.as_completed([7], wrong)


def test_a_due_time_lies_before_that_of_blocked_jobs(app: sqlq.App) -> None:
    new, latest = app.named("report").new(), FAR - timedelta(milliseconds=1)
    job = app.enqueue(new.set(available_at=latest))
    assert app.jobs.get(job).state == "scheduled"
    with pytest.raises(EnqueueError, match=r"available_at is 9998-01-01 .*: it must lie between the years"):
        app.enqueue(new.set(available_at=FAR))
    with pytest.raises(ConfigurationError, match="it must lie between the years"):
        app.jobs.reschedule([job], available_at=FAR)
    assert app.jobs.reschedule([job], available_at=latest) == [job.id]


NOW = datetime(2030, 1, 1, tzinfo=UTC)
CALLS: list[tuple[Callable[[Any], object], str]] = [
    (lambda app: app.jobs.get("7"), "'7' is not the id of a job"),
    (lambda app: app.jobs.reschedule([1], available_at=NOW, delay="1h"), "give one of the two"),
    (lambda app: app.jobs.change([1]), "^nothing is to change: give a queue"),
    (lambda app: app.jobs.change([], priority=1), "^name the waiting jobs"),
    (lambda app: app.jobs.change([1], delay="1h", available_at=NOW), "give one of the two"),
    (lambda app: app.jobs.prune(), "say what to prune"),
    (lambda app: app.jobs.prune(finished="200000d"), "finished is '200000d': it must lie between"),
    (lambda app: app.queues.pause(), "name at least one queue"),
    (lambda app: app.queues.pause("mail", all=True), "and not both"),
    (lambda app: app.acting_as("").__enter__(), "actor is ''"),
]


@needs("cheap")
@for_each(("call", "says"), CALLS)
def test_an_operators_call_is_refused(app: sqlq.App, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as refusal:
        call(app)
    assert "\n" not in str(refusal.value)
