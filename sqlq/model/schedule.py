"""When a schedule is due, and for which of its runs a job is enqueued.

Nothing here looks at a clock or a database. The due runs follow from the plan, the time up to which runs were
decided, and the time of the database.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from sqlq.config.durations import Duration, aware, milliseconds, readable, written
from sqlq.errors import ConfigurationError
from sqlq.model.checks import Rule, checked_whole, checked_word
from sqlq.model.job import NewJob

CatchUp = Literal["latest", "all", "skip"]
Overlap = Literal["allow", "skip", "queue"]

MINIMUM = timedelta(seconds=1)
MAX_REPEATS = 1_000_000_000
MAX_CAUGHT_UP = 1_000
"""The most jobs that follow an outage with `catch_up="all"`: those of the newest runs."""
LATE = timedelta(seconds=60)
"""With `catch_up="skip"` a run that is further past has been missed. A new schedule runs first at a `starts`
that is no further past."""
QUEUE_LOOK = timedelta(seconds=1)
"""How often a run that waits for the job before looks whether that has ended."""
MENDED_LOOK = timedelta(seconds=60)
"""How often a schedule that could not be ticked is tried again."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WINDOW = timedelta(hours=1)


@dataclass(frozen=True)
class Schedule:
    """When jobs are enqueued: by a cron expression, at an interval, or once at a given time.

    - `cron`: five fields, minute hour day month weekday; six with the second first; or "@daily" and its like.
    - `every`: a duration of 1 s or more, counted from `starts`, else from 1970 in UTC: "1h" is at full hours.
    - `at`: the time of a single run.
    - `timezone`: the IANA name of the zone in which `cron` is read; UTC without it.
    - `repeats`: the most jobs that it enqueues.
    - `starts`: there are no runs before; one that is up to 60 s past when it is added is the first run.
    - `ends`: there are no runs from then on.
    - `jitter`: a job is available up to that time after its run time.
    - `catch_up`: after an outage one job for the "latest" run, for "all" (the newest 1,000), or "skip".
    - `overlap`: where the last job has not ended, "allow" another one, "skip" the run, or "queue" it.

    A schedule has one of `cron`, `every` and `at`. Where clocks go forward, a job at a fixed time that is
    left out comes at once after the gap. Where they go back, it comes once, at the first of the two. An
    expression with `*` for its hour, or with minutes that begin with `*`, goes by elapsed time. With
    `catch_up="skip"` none follows for runs more than 60 s past. Raises `ConfigurationError` for options that
    are out of range or contradict each other.

    >>> Schedule("0 3 * * *", timezone="Europe/Berlin").next(datetime(2026, 3, 28, 12, tzinfo=UTC))
    datetime.datetime(2026, 3, 29, 1, 0, tzinfo=datetime.timezone.utc)
    """

    cron: str | None = None
    _: KW_ONLY
    every: Duration | None = None
    at: datetime | None = None
    timezone: str | None = None
    repeats: int | None = None
    starts: datetime | None = None
    ends: datetime | None = None
    jitter: Duration | None = None
    catch_up: CatchUp = "latest"
    overlap: Overlap = "allow"

    def __post_init__(self) -> None:
        if [self.cron, self.every, self.at].count(None) != 2:
            raise ConfigurationError(
                'a schedule has one of cron="0 3 * * *", every="90s" and at=, a time with a time zone'
            )
        for name in _DURATIONS:
            if (duration := getattr(self, name)) is not None:
                self._become(name, timedelta(milliseconds=milliseconds(duration, name)))
        for name in _TIMES:
            if (time := getattr(self, name)) is not None:
                # in whole milliseconds, as every database keeps it: else it would be due before it is
                whole = aware(time, name)
                # guard: moments-are-whole
                self._become(name, whole.replace(microsecond=whole.microsecond // 1000 * 1000))
        checked_word(self.catch_up, "catch_up", choice=CatchUp)
        checked_word(self.overlap, "overlap", choice=Overlap)
        if self.repeats is not None:
            checked_whole(self.repeats, "repeats", range(1, MAX_REPEATS + 1))
        if isinstance(self.every, timedelta) and self.every < MINIMUM:
            raise ConfigurationError(f"every is {_text_of(self.every)}: it must be at least 1 s")
        if self.cron is not None:
            self._become("cron", _checked_cron(self.cron))
            _zone(self.timezone)
        elif self.timezone is not None:
            raise ConfigurationError(
                f"timezone is {self.timezone!r}, but only cron is read in a time zone: leave it out"
            )

    def _become(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    # -- times -----------------------------------------------------------------------------------------------

    def next(self, after: datetime) -> datetime | None:
        """Return the time of the first run after another time, in UTC; None where there is none."""
        return next(self.moments(after), None)

    def begins(self, now: datetime) -> datetime:
        """Return the time after which the runs of a schedule count that is added now."""
        if self.starts is not None and now - LATE <= self.starts <= now:
            return self.starts - timedelta(milliseconds=1)  # as every database keeps it
        return now

    def moments(self, after: datetime) -> Iterator[datetime]:
        """Yield the times of the runs after another time, in UTC and ascending; `repeats` does not count
        here."""
        if self.starts is not None:
            after = max(after, self.starts - timedelta(microseconds=1))
        for time in self._unbounded(after):
            if self.ends is not None and time >= self.ends:
                return
            yield time

    def _unbounded(self, after: datetime) -> Iterator[datetime]:
        if self.at is not None:
            if self.at > after:
                yield self.at
        elif isinstance(self.every, timedelta):
            anchor = self.starts or _EPOCH
            number = (after - anchor) // self.every + 1
            while True:
                yield anchor + number * self.every
                number += 1
        else:
            yield from self._by_cron(after)

    def _by_cron(self, after: datetime) -> Iterator[datetime]:
        from cronsim import CronSim

        last = after
        for local in CronSim(self.cron or "", after.astimezone(_zone(self.timezone))):
            time = local.astimezone(UTC)
            # After a gap two times of day may fall together. Within the hour that comes twice the first of
            # the two lies behind. This check lets each run come once, and none before the one before it.
            if time > last:  # guard: schedule-times-ascend
                last = time
                yield time

    def due(
        self, since: datetime, until: datetime, limit: int = MAX_CAUGHT_UP + 1
    ) -> tuple[list[datetime], datetime | None]:
        """Return the runs after `since`, up to and with `until`, and the first one after that. Where they are
        more than `limit`, it returns only the newest, found without going through all of them."""
        window = _WINDOW
        while True:
            begin = max(since, until - window)
            runs: list[datetime] = []
            later = None
            for time in self.moments(begin):
                if time > until:
                    later = time
                    break
                runs.append(time)
            if begin == since or len(runs) >= limit:
                return runs[-limit:], later
            window *= 4

    # -- in a row --------------------------------------------------------------------------------------------

    def as_text(self) -> str:
        """Return the schedule as a row has it: JSON of the options that differ from their defaults."""
        options = {
            option.name: _stored(value)
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        }
        return json.dumps(options, sort_keys=True, ensure_ascii=False)

    def __str__(self) -> str:
        if self.at is not None:
            return f"at {written(self.at)}"
        if isinstance(self.every, timedelta):
            return f"every {_text_of(self.every)}"
        return str(self.cron) if self.timezone is None else f"{self.cron} {self.timezone}"


class Turn(NamedTuple):
    """The decision about a schedule that is due. It has the runs that get a job, and the number of those that
    get none. `last_at` is up to where that is decided, `next_at` when to look next."""

    runs: list[datetime]
    skipped: int
    last_at: datetime
    next_at: datetime | None


def turn(plan: Schedule, *, last_at: datetime, now: datetime, ticks: int, alive: bool) -> Turn:
    """Decide about the runs after `last_at` that are due `now`. `ticks` jobs were enqueued so far, and
    `alive` is whether the last of them has not ended."""
    runs, later = plan.due(last_at, now)
    if not runs:
        return Turn([], 0, last_at, None if is_spent(plan, ticks) else later)
    if alive and plan.overlap == "queue":
        return Turn([], 0, last_at, now + QUEUE_LOOK)  # guard: queue-waits
    selected = _caught_up(plan, runs, now)
    if plan.overlap == "skip":
        selected = [] if alive else selected[-1:]  # guard: overlap-is-skipped
    elif plan.overlap == "queue":
        selected = selected[:1]
    if plan.repeats is not None:
        selected = selected[: max(0, plan.repeats - ticks)]  # guard: schedule-respects-repeats
    # the others of a queue are decided when it is their turn
    decided = selected[-1] if selected and plan.overlap == "queue" else runs[-1]
    skipped = sum(run <= decided for run in runs) - len(selected)
    next_at = later if decided == runs[-1] else now + QUEUE_LOOK
    return Turn(selected, skipped, decided, None if is_spent(plan, ticks + len(selected)) else next_at)


def _caught_up(plan: Schedule, runs: list[datetime], now: datetime) -> list[datetime]:
    if plan.catch_up == "all":
        return runs[-MAX_CAUGHT_UP:]
    if plan.catch_up == "skip":
        return [run for run in runs[-1:] if now - run <= LATE]
    return runs[-1:]


def is_spent(plan: Schedule, ticks: int) -> bool:
    """Whether a schedule has enqueued as many jobs as it may."""
    return plan.repeats is not None and ticks >= plan.repeats


@lru_cache(maxsize=20_000)
def read(text: str) -> Schedule:
    """Return the schedule in a row. Raises `ConfigurationError` for text that is none, as another program or
    a newer release may have written it."""
    try:
        return Schedule(**{name: _restored(name, value) for name, value in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ConfigurationError(f"the plan of this schedule cannot be read: {text[:200]}") from None


_DURATIONS, _TIMES = ("every", "jitter"), ("at", "starts", "ends")


def _stored(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    return value.isoformat() if isinstance(value, datetime) else value


def _restored(name: str, value: Any) -> Any:
    if name in _DURATIONS:
        return timedelta(milliseconds=int(value))
    return datetime.fromisoformat(value) if name in _TIMES else value


def _text_of(duration: timedelta) -> str:
    return readable(duration / timedelta(milliseconds=1))


# -- declarations --------------------------------------------------------------------------------------------


class Options(TypedDict, total=False):
    """The options of a plan, as those of `sqlq.Schedule`."""

    cron: str | None
    every: Duration | None
    at: datetime | None
    timezone: str | None
    repeats: int | None
    starts: datetime | None
    ends: datetime | None
    jitter: Duration | None
    catch_up: CatchUp | None
    overlap: Overlap | None


def planned(when: Schedule | str | None, **options: Unpack[Options]) -> Schedule:
    """Return the schedule that is meant by a Schedule, a cron expression, or options by name."""
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := values.keys() - Options.__annotations__:
        raise ConfigurationError(f"a schedule has no option {', '.join(sorted(unknown))}")
    if not isinstance(when, Schedule):
        return Schedule(**({"cron": when} | values))
    if values:
        raise ConfigurationError(f"a Schedule and {', '.join(values)} are given together: give one Schedule")
    return when


def checked_template(job: Any, name: str) -> NewJob:
    """Return the job of a schedule. Raises `ConfigurationError` for a job that cannot be enqueued again and
    again."""
    if not isinstance(job, NewJob):
        raise ConfigurationError(
            f"the schedule {name!r} was given {type(job).__name__}: it takes what task.new(…) returns"
        )
    if job._results:  # guard: a-schedule-takes-no-results
        raise ConfigurationError(
            f"an argument of the job of the schedule {name!r} is {job._results[0][1]!r}: a schedule has no "
            "steps; give it a job that enqueues the flow"
        )
    if job.available_at is not None or job.start_by is not None:
        raise ConfigurationError(
            f"the job of the schedule {name!r} has an available_at or start_by of its own: give the times "
            'to the schedule, and start_within="90s" to the job'
        )
    return job


@dataclass(frozen=True, slots=True)
class Declared:
    """A schedule as code declares it: its name, its plan, and its job."""

    name: str
    plan: Schedule
    job: NewJob


@dataclass(eq=False)
class Declarations:
    """The schedules that the code of an App declares, and the name of the service that it is."""

    service: str | None = None
    declared: dict[str, Declared] = field(default_factory=dict)

    def add(self, new: Declared) -> None:
        """Declare a schedule. Raises `ConfigurationError` where another one has its name."""
        known = self.declared.setdefault(new.name, new)
        if known != new:
            raise ConfigurationError(
                f"two schedules are named {new.name!r} ({known.plan} of {known.job.task}, and {new.plan} of "
                f"{new.job.task}): give one of them another name"
            )


_NOT_IN_OPTIONS = {"task", "queue", "payload", "available_at", "_options_set", "schedule", "scheduled_for"}


def options_text(job: NewJob) -> str:
    """Return the options of a job beside its task, queue and payload, as a schedule's row has them."""
    plain = NewJob("", "", "", None)
    options = {
        name: value
        for name in (option.name for option in fields(job))
        if name not in _NOT_IN_OPTIONS and (value := getattr(job, name)) != getattr(plain, name)
    }
    return json.dumps(options, sort_keys=True, ensure_ascii=False)


def template(task: str, queue: str, payload: str, options: str) -> NewJob:
    """Return the job in a schedule's row. Raises `ConfigurationError` for options that are none, or unknown
    here."""
    try:
        values = json.loads(options)
        if "rule" in values:
            values["rule"] = Rule(*values["rule"])
        return replace(NewJob(task, payload, queue, None), **values)
    except (ValueError, TypeError, RecursionError):
        raise ConfigurationError(f"the options of its job cannot be read: {options[:200]}") from None


_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
"""As crontab(5) has them, but for @reboot, which is no time."""


def _checked_cron(cron: Any) -> str:
    from cronsim import CronSim, CronSimError

    form = (
        'five fields, minute hour day month weekday, as in "0 3 * * *", six with the second first, or one of '
        f"{', '.join(_NICKNAMES)}"
    )
    if not isinstance(cron, str):
        raise ConfigurationError(f"cron is {cron!r}: it is text of {form}")
    cron = _NICKNAMES.get(cron.strip().lower(), cron)
    try:
        CronSim(cron, _EPOCH)
    except (CronSimError, ValueError, AssertionError, TypeError) as error:
        raise ConfigurationError(
            f"cron is {cron!r} ({str(error).lower() or 'unreadable'}): it has {form}"
        ) from None
    return " ".join(cron.split())


@lru_cache(maxsize=1_000)
def _zone(name: str | None) -> tzinfo:
    if name is None or name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise ConfigurationError(
            f"timezone is {name!r}, which this machine does not know: give an IANA name such as "
            '"Europe/Berlin" (where a machine has no zones at all: pip install tzdata)'
        ) from None
