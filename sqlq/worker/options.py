"""The options of a worker, checked before anything is started."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from sqlq.config import pyproject
from sqlq.config.constants import CONCURRENCY, LEASE_MS
from sqlq.config.durations import milliseconds, readable
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.events import Events
from sqlq.model.checks import checked_name, checked_queue, checked_whole
from sqlq.model.flow import AnyFlow, Plan
from sqlq.model.middleware import Scope
from sqlq.model.schedule import Declarations
from sqlq.model.task import Registry

LARGEST_WEIGHT = 1_000


@dataclass(frozen=True, slots=True)
class AppParts:
    """The parts of an App that a worker uses."""

    database: Database
    tasks: Registry
    plan: Callable[[AnyFlow], Plan]
    """Returns a flow as it is written."""
    lifespan: Scope | None
    events: Events
    schedules: Declarations
    has_limits: bool
    newest_first: frozenset[str]
    """The queues whose newest jobs are claimed first."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker; `of` makes and checks them."""

    queues: tuple[str, ...] | None = None
    concurrency: int = CONCURRENCY
    lease_ms: int = LEASE_MS
    grace_ms: int = 25_000
    drain: bool = False
    max_jobs: int | None = None
    name: str | None = None
    max_rss: int | None = None
    """In bytes."""
    max_idle_ms: int | None = None
    weights: dict[str, int] | None = None
    """How often each queue comes first, beside the others; None where queues come in the order given."""
    isolate: bool = False
    """Whether every job runs in a subprocess, whatever option its task has."""
    poll_ms: int | None = None
    """How long an idle host waits for its next look; None for the default of its database."""
    claim_batch: int = 1_000
    """The most jobs that a claim brings."""
    ahead_ms: int = 100
    """Jobs are held that start within so long, by the measured pace."""
    retention_ms: int | None = None
    """The retention of the App; None for the default."""

    @classmethod
    def of(cls, queues: Sequence[str] | Mapping[str, int] | None = None, **options: Any) -> WorkerOptions:
        """Check options that are named as in `App.worker`. Settings that are not given are looked up."""
        if isinstance(queues, str):
            raise ConfigurationError(f"queues is the text {queues!r}: give a list, as in queues=[{queues!r}]")
        if queues is not None and not queues:
            raise ConfigurationError(
                "queues is an empty list: name at least one queue, or leave it out to serve all"
            )
        options |= {name: setting(name, options.get(name)) for name in _LOOKED_UP}
        values = {
            field.name: _CHECKS[name](value, name) if name in _CHECKS else value
            for field in fields(cls)
            if (value := options.get(name := field.name.removesuffix("_ms"))) is not None
        }
        if queues is not None:
            values["weights"] = checked_weights(queues) if isinstance(queues, Mapping) else None
            values["queues"] = tuple(checked_queue(name) for name in queues)
        return cls(**values)

    def jittered(self) -> WorkerOptions:
        """Return these options with up to a tenth fewer jobs, so that workers started together do not end
        together."""
        if self.max_jobs is None:
            return self
        return replace(self, max_jobs=self.max_jobs - int(self.max_jobs * random.uniform(0, 0.1)))


def checked_weights(weights: Mapping[Any, Any]) -> dict[str, int]:
    """Return the weights of queues. Raises `ConfigurationError` for a weight that is no whole number in
    range."""
    for name, weight in weights.items():
        whole = isinstance(weight, int) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= LARGEST_WEIGHT:
            raise ConfigurationError(
                f"queue {name!r} has the weight {weight!r}: it is a whole number from 1 to {LARGEST_WEIGHT:,}"
            )
    return dict(weights)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def checked_bytes(value: str | int, what: str) -> int:
    """Return a size in bytes: "400MB" and "400M" are 400 million, "400MiB" 400 times 1,048,576.

    Raises `ConfigurationError` for anything but a size of more than nothing.

    >>> checked_bytes("1.5GB", "max_rss")
    1500000000
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        digits, unit, binary = found.groups()
        number = round(float(digits) * (1024 if binary else 1000) ** _POWERS[unit.upper()])
    if number is None or number <= 0:
        raise ConfigurationError(f'{what} is {value!r}: give a size such as "400MB" or "1.5GB"')
    return number


# -- settings ------------------------------------------------------------------------------------------------

Check = Callable[[Any, str], Any]
"""Returns a value as a number, in milliseconds or bytes. Raises `ConfigurationError` for a wrong value; the
second argument is its name."""


def _whole(value: Any, what: str, *, most: int = 1_000) -> int:
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    return checked_whole(number, what, range(1, most + 1))


def _duration(value: Any, what: str, *, least_ms: int = 0, most_ms: int) -> int:
    ms = milliseconds(value, what)
    if not least_ms <= ms <= most_ms:
        lie = f"it must lie between {readable(least_ms)} and {readable(most_ms)}"
        raise ConfigurationError(f"{what} is {value!r}: {lie}")
    return ms


def _max_idle(value: Any, what: str) -> int:
    if (ms := milliseconds(value, what)) == 0:
        raise ConfigurationError(f"{what} is zero: leave it out for no limit, or drain to end at once")
    return ms


SETTINGS: Mapping[str, Check] = {
    "processes": _whole,
    "concurrency": _whole,
    "lease": partial(_duration, least_ms=1_000, most_ms=24 * 3_600_000),
    "grace": milliseconds,
    "max_jobs": partial(_whole, most=1_000_000_000),
    "max_rss": checked_bytes,
    "wait": milliseconds,
    # a longer one would come to the time after which a worker takes its poller for dead
    "poll": partial(_duration, least_ms=20, most_ms=5_000),
    "claim_batch": _whole,
    # a job that has not started after a second is released
    "ahead": partial(_duration, most_ms=1_000),
}
"""The settings of workers: each is an option of `sqlq work`, a variable, and a key of [tool.sqlq]."""


def setting(name: str, argument: Any, default: int | None = None) -> Any:
    """Return a setting of workers: the argument, else the variable (SQLQ_LEASE for `lease`), else the key of
    [tool.sqlq], else the default. Raises `ConfigurationError` for a wrong value."""
    what, value = pyproject.setting(argument, name, f"SQLQ_{name.upper()}", name)
    return default if value is None else SETTINGS[name](value, what)


_LOOKED_UP = ("concurrency", "lease", "grace", "poll", "claim_batch", "ahead")
_CHECKS: Mapping[str, Check] = {
    "max_jobs": SETTINGS["max_jobs"],
    "max_rss": checked_bytes,
    "max_idle": _max_idle,
    "name": checked_name,
}
