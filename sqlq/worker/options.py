"""The options of a worker. A field of `WorkerOptions` declares each once, with its check and its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple

from sqlq.config import pyproject
from sqlq.config.constants import CONCURRENCY, LEASE_MS
from sqlq.config.durations import compact, milliseconds, readable
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.events import Events
from sqlq.model.checks import checked_bool, checked_name, checked_queue, checked_whole
from sqlq.model.flow import Plan
from sqlq.model.flow_parts import AnyFlow
from sqlq.model.middleware import Scope
from sqlq.model.schedule import Declarations
from sqlq.model.task import Registry

YEAR_MS = 365 * 24 * 3_600_000


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
    declares: Collection[str]
    """The reasons to wait that its tasks declare, by their names."""
    newest_first: frozenset[str]
    """The queues whose newest jobs are claimed first."""


# -- checks --------------------------------------------------------------------------------------------------

Check = Callable[[Any, str], Any]
"""Returns a value as a number, in milliseconds or bytes. Raises `ConfigurationError` for a wrong value; the
second argument is its name."""


def _whole(value: Any, name: str, *, maximum: int = 1_000) -> int:
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    return checked_whole(number, name, range(1, maximum + 1))


def _between(min_ms: int, max_ms: int, value: Any, name: str) -> int:
    if min_ms <= (ms := milliseconds(value, name)) <= max_ms:
        return ms
    raise ConfigurationError(
        f"{name} is {value!r}: it must lie between {readable(min_ms)} and {readable(max_ms)}"
    )


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_UNITS = ("", "K", "M", "G", "T")


def checked_bytes(value: str | int, name: str) -> int:
    """Return a size in bytes: "400MB" and "400M" are 400 million, "400MiB" 400 times 1,048,576.

    Raises `ConfigurationError` for anything but a size of more than nothing.

    >>> checked_bytes("1.5GB", "max_rss")
    1500000000
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        digits, unit, binary = match.groups()
        number = round(float(digits) * (1024 if binary else 1000) ** _UNITS.index(unit.upper()))
    if number is None or number <= 0:
        raise ConfigurationError(f'{name} is {value!r}: give a size such as "400MB" or "1.5GB"')
    return number


def readable_bytes(number: int) -> str:
    """Format a size: "412 MB", "1.5 GB"."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{max(1, round(number / 1e6)):,} MB"


# -- options -------------------------------------------------------------------------------------------------

Unit = Literal["N", "DURATION", "SIZE", "NAME", "flag"]
Reader = Literal["workers", "`sqlq work`"]
WORKERS: Reader = "workers"
WORK: Reader = "`sqlq work`"
_CHECKS: Mapping[Unit, Check] = {
    "N": _whole,
    "DURATION": milliseconds,
    "SIZE": checked_bytes,
    "NAME": checked_name,
    "flag": checked_bool,
}


class Option(NamedTuple):
    """A field of `WorkerOptions` as an argument, and an option of `sqlq work`."""

    unit: Unit
    help: str
    default: str
    """As people read it; empty where there is none."""
    read_by: Reader | None
    """The reader of its variable (SQLQ_LEASE for `lease`), and of its key of [tool.sqlq]; None where it has
    neither. A worker in a program has no supervisor, which some of them are for."""
    check: Check
    letter: str | None


def _option(
    unit: Unit,
    text: str,
    read_by: Reader | None = None,
    default: Any = None,
    *,
    check: Check | None = None,
    shown: str = "",
    letter: str | None = None,
) -> Any:
    if default is not None and unit != "flag":
        shown = compact(default) if unit == "DURATION" else f"{default:,}"
    option = Option(unit, text, shown, read_by, check or _CHECKS[unit], letter)
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker; `of` makes and checks them. A supervisor sends them to its workers."""

    queues: tuple[str, ...] | None = None
    concurrency: int = _option(
        "N", "Jobs at a time in each worker process", WORKERS, CONCURRENCY, letter="-c"
    )
    lease_ms: int = _option(
        "DURATION",
        "Lease of a job: other workers take it over this long after a crash",
        WORKERS,
        LEASE_MS,
        check=partial(_between, 1_000, 24 * 3_600_000),
    )
    grace_ms: int = _option(
        "DURATION",
        "Time for running jobs to finish after a stop, before they are released",
        WORKERS,
        25_000,
    )
    processes: int = _option("N", "Number of worker processes", WORK, 1, letter="-p")
    drain: bool = _option("flag", "Exit when no job is available", default=False)
    max_jobs: int | None = _option(
        "N",
        "Replace each worker process after this number of jobs",
        WORK,
        check=partial(_whole, maximum=1_000_000_000),
    )
    isolate: bool = _option("flag", "Run each job in a subprocess, which is reused", default=False)
    max_rss: int | None = _option(
        "SIZE", "Replace a worker process that uses more memory than this, as in 400MB", WORK
    )
    """In bytes."""
    max_idle_ms: int | None = _option(
        "DURATION", "Exit after this time without a job", check=partial(_between, 1, YEAR_MS)
    )
    # a longer one would come to the time after which a worker takes its poller for dead
    poll_ms: int | None = _option(
        "DURATION",
        "Poll interval when idle",
        WORKERS,
        check=partial(_between, 20, 5_000),
        shown="1.25s; SQLite 50ms",
    )
    """None for the default of its database."""
    claim_batch: int = _option("N", "Maximum number of jobs in one claim", WORKERS, 1_000)
    # a job that has not started after a second is released
    ahead_ms: int = _option(
        "DURATION",
        "Prefetch jobs expected to start within this time; 0s disables prefetching",
        WORKERS,
        100,
        check=partial(_between, 0, 1_000),
    )
    name: str | None = _option("NAME", "Name of this worker, as sqlq workers lists it")
    wait_ms: int = _option(
        "DURATION", "Time to wait for a database that is not ready yet, as in 60s", WORK, 0
    )
    start_timeout_ms: int = _option(
        "DURATION",
        "Report unhealthy if a worker process takes longer than this to start",
        default=60_000,
        check=partial(_between, 5_000, YEAR_MS),
    )
    stuck_after_ms: int = _option(
        "DURATION",
        "Kill a worker process that is silent for this time; after 30s if idle or past a timeout",
        default=600_000,
        check=partial(_between, 5_000, YEAR_MS),
    )
    """While it begins, after this and the timeout of a start."""
    weights: dict[str, int] | None = None
    """How often each queue comes first, beside the others; None where queues come in the order given."""
    retention_ms: int | None = None
    """The retention of the App; None for the default."""

    @classmethod
    def of(
        cls,
        queues: Sequence[str] | Mapping[str, int] | None = None,
        reader: Reader = WORKERS,
        **arguments: Any,
    ) -> WorkerOptions:
        """Check arguments that are named as in `App.worker`. Settings without an argument are looked up, as
        far as this `reader` reads them: `sqlq work` reads all."""
        if isinstance(queues, str):
            raise ConfigurationError(f"queues is the text {queues!r}: give a list, as in queues=[{queues!r}]")
        if queues is not None and not queues:
            raise ConfigurationError(
                "queues is an empty list: name at least one queue, or leave it out to serve all"
            )
        values: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            value = arguments.get(name)
            if option.read_by in (WORKERS, reader):
                value = setting(name, value)
            elif value is not None:
                value = option.check(value, name)
            if value is not None:
                values[f"{name}_ms" if option.unit == "DURATION" else name] = value
        if queues is not None:
            values["queues"] = tuple(checked_queue(name) for name in queues)
        if isinstance(queues, Mapping):
            values["weights"] = {
                name: checked_whole(weight, f"queue {name!r}: its weight", range(1, 1_001))
                for name, weight in queues.items()
            }
        return cls(**values)


OPTIONS: Mapping[str, Option] = {
    each.name.removesuffix("_ms"): each.metadata["option"] for each in fields(WorkerOptions) if each.metadata
}
"""The options by the names of arguments, in the order of the command's help."""
SETTINGS = tuple(name for name, option in OPTIONS.items() if option.read_by)
"""Those that are a variable of the environment, and a key of [tool.sqlq], too."""


def setting(name: str, argument: Any = None) -> Any:
    """Return a setting: the argument, else the variable (SQLQ_LEASE for `lease`), else the key of
    [tool.sqlq], else None. Raises `ConfigurationError` for a wrong value."""
    source, value = pyproject.setting(argument, name, f"SQLQ_{name.upper()}", name)
    return None if value is None else OPTIONS[name].check(value, source)
