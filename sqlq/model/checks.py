"""The check of each argument by its declared type, and of each option of jobs; the table of those that tasks,
queues and Apps have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

from sqlq.config.constants import LAST_ID, MAX_NAME, PRIORITIES
from sqlq.config.durations import MAX_MS, Duration, aware, milliseconds
from sqlq.errors import ConfigurationError, SqlqError
from sqlq.model.handle import AnyJob, Handle, id_of
from sqlq.payload.signatures import signature_of

P = ParamSpec("P")
T = TypeVar("T")

UniqueUntil = Literal["finish", "start", "pruned"]
OnConflict = Literal["keep", "replace", "debounce"]
NOT_IN_TIME = "expired: it was not started in time"
"""Why a job was cancelled that had a time to be started in."""
FOR_EVER_MS = MAX_MS
"""A retention without end: a century."""


class Rule(NamedTuple):
    """The rule of a limit for a key, as its row has it. It has a maximum number of running jobs, of starts in
    a period, or both. Or jobs run one after the other in the order of their ids, which with `holds` ends at
    one that has failed."""

    max_running: int | None = None
    rate: int | None = None
    period_ms: int | None = None
    in_order: bool = False
    holds: bool = False


@contextmanager
def refusing_by(error: type[SqlqError]) -> Iterator[None]:
    """Raise `error` where a check in the block refuses a value, as where a job is made or enqueued."""
    try:
        yield
    except ConfigurationError as refusal:
        raise error(str(refusal)) from None


def checked_name(value: str, label: str) -> str:
    """Return the name of a queue or task, or a unique key, if every database can store and compare it."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{label} is {value!r}: it must be text that is not blank")
    if len(value) > MAX_NAME:
        hashed = "; for a long key enqueue a hash of it" if "key" in label else ""
        raise ConfigurationError(
            f"{label} has {len(value)} characters: at most {MAX_NAME} are possible{hashed}"
        )
    if "\0" in value or any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise ConfigurationError(
            f"{label} is {value!r}: it holds a NUL or a lone surrogate, which databases cannot store"
        )
    return str.__str__(value)  # of an enum's member its text, not its name


def checked_word(value: Any, label: str, *, choice: Any) -> Any:
    """Return one of the words of a `Literal`."""
    if value not in get_args(choice):
        *others, last = (f'"{word}"' for word in get_args(choice))
        raise ConfigurationError(f"{label} is {value!r}: it is {', '.join(others)} or {last}")
    return value


def checked_queue(value: str, label: str = "queue") -> str:
    """Return the name of a queue that may be given to jobs."""
    name = checked_name(value, label)
    if "," in name or "=" in name:  # guard: no-separator-in-a-queue
        raise ConfigurationError(
            f"{label} is {name!r}: a comma separates queues, and = a weight, as in sqlq work -q high=3,low; "
            "leave them out"
        )
    if name != name.strip() or not name.isprintable():
        raise ConfigurationError(
            f"{label} is {name!r}: leave out blanks at its ends, line breaks and control characters"
        )
    return name


def checked_whole(value: Any, label: str, choice: range, more: str = "") -> int:
    """Return a whole number of a range; `more` ends the message about another one."""
    if not isinstance(value, int) or isinstance(value, bool) or int(value) not in choice:
        raise ConfigurationError(
            f"{label} is {value!r}: it must be a whole number from {choice[0]:,} to {choice[-1]:,}{more}"
        )
    return int(value)


def checked_bool(value: Any, label: str, more: str = "") -> bool:
    if isinstance(value, bool):  # guard: eager-is-no-text
        return value
    raise ConfigurationError(f"{label} is {value!r}: it is True or False{more}")


def checked_priority(value: int, label: str = "priority") -> int:
    return checked_whole(value, label, PRIORITIES, "; larger runs first")


# -- arguments -----------------------------------------------------------------------------------------------

Rows = int
"""How many rows a list may have, or a search may read."""
Priority = int
"""The priority of a job; it may be below zero."""


def _checked_duration(value: Any, name: str) -> Duration:
    milliseconds(value, name)
    return value  # type: ignore[no-any-return]  # checked above


def _checked_time_or_age(value: Any, name: str) -> datetime | Duration:
    if isinstance(value, str):  # of a command or a page
        with suppress(ValueError):
            time = datetime.fromisoformat(value)
            if time.tzinfo is None:
                raise ConfigurationError(
                    f"{name} is {value}, which has no time zone: write it as in {value}Z"
                )
            value = time
    return (aware if isinstance(value, datetime) else _checked_duration)(value, name)


def _checked_list(one: Callable[[Any, str], Any], example: str, values: Any, name: str) -> list[Any]:
    # the elements of bytes are numbers, which might be ids
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Collection):
        raise ConfigurationError(f"{name} is {values!r}: give a list, as in {example}")
    return [one(value, name[:-1]) for value in values]


def _checked_job(value: Any, name: str) -> AnyJob:
    return value if isinstance(value, Handle) else id_of(value)


_checked_jobs = partial(_checked_list, _checked_job, "[42, 43]")


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "AnyJob": _checked_job,
    "AnyJob | AnyJobs": lambda value, name: (
        _checked_job if isinstance(value, int | Handle) else _checked_jobs
    )(value, name),
    "AnyJobs": _checked_jobs,
    "Collection[str]": partial(_checked_list, checked_name, '["mail"]'),
    "Duration": _checked_duration,
    "FlowOrId": lambda value, name: _CHECKS["int"](
        value if isinstance(value, Handle) else getattr(value, "id", value), name
    ),
    "Priority": checked_priority,
    "Rows": partial(checked_whole, choice=range(1, 100_001)),
    "bool": checked_bool,
    "datetime": aware,
    "datetime | Duration": _checked_time_or_age,
    "int": partial(checked_whole, choice=range(LAST_ID + 1)),
    "str": checked_name,
    "tuple[int, ...]": lambda value, name: tuple(map(id_of, _checked_jobs(value, name))),
}
"""The check of each declared type, which returns the value to go on with."""


def checks_arguments(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method check its arguments by the types that it declares, before it does anything. It checks
    those of other types than the table's by itself."""
    shape = signature_of(method)

    def checked(name: str, value: Any, label: str) -> Any:
        declared = str(shape.parameters[name].annotation)
        kind = declared.removesuffix(" | None")
        is_none = value is None and kind != declared
        return value if is_none or kind not in _CHECKS else _CHECKS[kind](value, label)

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            bound = shape.bind(*args, **options)
        except TypeError as error:
            raise ConfigurationError(f"{method.__name__}: {error}") from None
        for name, value in bound.arguments.items():
            if shape.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = [checked(name, each, name[:-1]) for each in value]
            else:
                bound.arguments[name] = checked(name, value, name)
        return method(*bound.args, **bound.kwargs)

    return call
