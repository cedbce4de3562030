"""The options of a worker, checked before anything is started."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlq.config import pyproject
from sqlq.config.durations import Duration, milliseconds, readable
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.events import Events
from sqlq.model.checks import checked_name, checked_queue, checked_whole
from sqlq.model.flow import AnyFlow, Plan
from sqlq.model.middleware import Scope
from sqlq.model.schedule import Declarations
from sqlq.model.task import Registry

LARGEST_WEIGHT = 1_000
POLLS_MS = 20, 5_000
"""A longer one would come to the time after which a worker takes its poller for dead."""
BATCHES = range(1, 1_001)
AHEADS_MS = 0, 1_000
"""A job that has not started after a second is released."""


@dataclass(frozen=True, slots=True)
class AppParts:
    """The parts of an App that a worker uses."""

    database: Database
    tasks: Registry
    plan: Callable[[AnyFlow], Plan]
    """Returns a flow as it is written."""
    lifespan: Scope | None = None
    events: Events = field(default_factory=Events)
    schedules: Declarations = field(default_factory=Declarations)
    has_limits: bool = False
    newest_first: frozenset[str] = frozenset()
    """The queues whose newest jobs are claimed first."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker; `of` makes and checks them."""

    queues: tuple[str, ...] | None
    concurrency: int
    lease_ms: int
    grace_ms: int = 30_000
    drain: bool = False
    max_jobs: int | None = None
    max_lifetime_ms: int | None = None
    retention_ms: int | None = None
    name: str | None = None
    max_rss: int | None = None
    """In bytes."""
    max_idle_ms: int | None = None
    weights: dict[str, int] | None = None
    """How many turns each queue has of those of all; None where queues come in the order given."""
    isolate: bool = False
    """Whether every job runs in a subprocess, whatever option its task has."""
    poll_ms: int | None = None
    """How long an idle host waits for its next look; None for the default of its database."""
    claim_batch: int | None = None
    """The most jobs that a claim brings; None for the default."""
    ahead_ms: int | None = None
    """Jobs are held that start within so long; None for the default."""

    @classmethod
    def of(
        cls,
        *,
        queues: Sequence[str] | Mapping[str, int] | None,
        concurrency: int,
        lease: Duration,
        grace: Duration,
        drain: bool,
        max_jobs: int | None,
        max_lifetime: Duration | None = None,
        retention_ms: int | None,
        name: str | None = None,
        max_rss: str | int | None = None,
        max_idle: Duration | None = None,
        isolate: bool = False,
        poll: Duration | None = None,
        claim_batch: int | None = None,
        ahead: Duration | None = None,
    ) -> WorkerOptions:
        if isinstance(queues, str):
            raise ConfigurationError(f"queues is the text {queues!r}: give a list, as in queues=[{queues!r}]")
        weights = checked_weights(queues) if isinstance(queues, Mapping) else None
        names = None if queues is None else tuple(checked_queue(name, ConfigurationError) for name in queues)
        if names == ():
            raise ConfigurationError(
                "queues is an empty list: name at least one queue, or leave it out to serve all"
            )
        checked_whole(concurrency, "concurrency", range(1, 1_001), ConfigurationError)
        lease_ms = milliseconds(lease, "lease")
        if not 1_000 <= lease_ms <= 24 * 3_600_000:
            raise ConfigurationError(
                f"lease is {lease!r}: it must lie between 1s and 1d; 30s suits nearly all"
            )
        if max_jobs is not None and not (isinstance(max_jobs, int) and max_jobs >= 1):
            raise ConfigurationError(f"max_jobs is {max_jobs!r}: it must be a whole number of at least 1")
        max_lifetime_ms = None if max_lifetime is None else milliseconds(max_lifetime, "max_lifetime")
        if max_lifetime_ms == 0:
            raise ConfigurationError(
                "max_lifetime is zero: a worker could claim nothing in it; leave it out for no limit"
            )
        max_idle_ms = None if max_idle is None else milliseconds(max_idle, "max_idle")
        if max_idle_ms == 0:
            raise ConfigurationError("max_idle is zero: leave it out for no limit, or drain to end at once")
        return cls(
            names,
            concurrency,
            lease_ms,
            milliseconds(grace, "grace"),
            drain,
            max_jobs,
            max_lifetime_ms,
            retention_ms,
            None if name is None else checked_name(name, "name", ConfigurationError),
            None if max_rss is None else checked_bytes(max_rss, "max_rss"),
            max_idle_ms,
            weights,
            isolate,
            _between(("poll", "SQLQ_POLL"), poll, *POLLS_MS),
            _checked_batch(claim_batch),
            _between(("ahead", "SQLQ_AHEAD"), ahead, *AHEADS_MS),
        )

    def jittered(self) -> WorkerOptions:
        """Return these options with up to a tenth less of jobs and lifetime, so that workers started together
        do not end together."""
        return replace(self, max_jobs=_less(self.max_jobs), max_lifetime_ms=_less(self.max_lifetime_ms))


def _between(names: tuple[str, str], argument: Duration | None, least: int, most: int) -> int | None:
    """Return the milliseconds of a setting of workers that lies in a range; None where it is set nowhere."""
    what, value = pyproject.setting(argument, *names, names[0])
    if value is None:
        return None
    ms = milliseconds(value, what)
    if not least <= ms <= most:
        lie = f"it must lie between {readable(least)} and {readable(most)}"
        raise ConfigurationError(f"{what} is {value!r}: {lie}")
    return ms


def _checked_batch(argument: int | None) -> int | None:
    what, value = pyproject.setting(argument, "claim_batch", "SQLQ_CLAIM_BATCH", "claim_batch")
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    return None if value is None else checked_whole(number, what, BATCHES, ConfigurationError)


def _less(limit: int | None) -> int | None:
    return None if limit is None else limit - int(limit * random.uniform(0, 0.1))


def checked_weights(weights: Mapping[Any, Any]) -> dict[str, int]:
    """Return the weights of queues. Raises `ConfigurationError` for a weight that is no whole number in
    range."""
    for name, weight in weights.items():
        whole = isinstance(weight, int) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= LARGEST_WEIGHT:
            raise ConfigurationError(
                f"queues[{name!r}] is {weight!r}: a weight is a whole number from 1 to {LARGEST_WEIGHT:,}"
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
