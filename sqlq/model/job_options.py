"""The options of jobs: those of one job, and those that its task, its queue and the App have, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar

from sqlq.config.durations import Duration, aware, milliseconds
from sqlq.errors import ConfigurationError
from sqlq.model import backoff as backoffs
from sqlq.model.backoff import BackoffOption
from sqlq.model.checks import (
    FOR_EVER_MS,
    OnConflict,
    UniqueUntil,
    checked_name,
    checked_priority,
    checked_queue,
    checked_whole,
    checked_word,
)
from sqlq.model.limit import AnyLimit, checked_limit
from sqlq.payload import headers as headings

FailureReason = Literal["error", "timeout", "worker_lost", "unknown_task", "bad_payload", "bad_signature"]


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended: the one argument of the task that follows it.

    `outcome` is `finished`, `failed` or `cancelled`, `attempts` the number of attempts it took. For a failed
    job `reason` is as in `failed_jobs`: error, timeout, worker_lost, unknown_task or bad_payload; nothing
    follows a bad signature. `exception` is the class and `message` the text of its last error, or the reason
    of a cancel. `label` is the one that the
    job has. The id gives more. `app.jobs.get(ended.id)` has the traceback and the errors of earlier attempts,
    `app.result(ended.id)` the result.

    >>> @app.task  # doctest: +SKIP
    ... def alarm(ended: sqlq.JobOutcome) -> None:
    ...     pager.send(f"{ended.task} {ended.id} failed: {ended.message}")
    """

    id: int
    task: str
    queue: str
    outcome: Literal["finished", "failed", "cancelled"]
    attempts: int
    reason: FailureReason | None = None
    exception: str | None = None
    message: str | None = None
    label: str | None = None


E_contra = TypeVar("E_contra", contravariant=True)


class TakesEnding(Protocol[E_contra]):
    """A task whose handler takes how a job ended."""

    def new(self, ended: E_contra, /) -> Any: ...


Follows = TakesEnding[JobOutcome] | TakesEnding[dict[str, Any]]
"""A task that may follow the end of a job: its handler takes a `JobOutcome`, or that as a dict."""


class Kept(Enum):
    """Stands for an option that is not given, where None is a value of its own."""

    KEPT = "kept"


KEPT = Kept.KEPT


class JobOptions(TypedDict, total=False):
    """The options of a job; see `NewJob.set`."""

    queue: str | None
    delay: Duration | None
    available_at: datetime | None
    priority: int | None
    max_attempts: int | None
    timeout: Duration | None
    backoff: BackoffOption | None
    retention: Duration | None
    unique_key: str | None
    unique_until: UniqueUntil | None
    on_conflict: OnConflict | None
    max_wait: Duration | None
    start_within: Duration | None
    start_by: datetime | None
    on_success: Follows | None
    on_failure: Follows | None
    on_cancel: Follows | None
    label: str | None
    batch: str | None
    headers: Mapping[str, Any] | None
    limit: AnyLimit | str | None


def checked_follow_up(task: Any, option: str) -> str:
    """Return the JSON for a job's row that names its follow-up task; `null` for None, after which none
    follows."""
    if task is None:
        return "null"
    if not hasattr(type(task), "_as_follow_up"):
        raise ConfigurationError(
            f"{option} is {task!r}: it is a task, as in {option}=alarm, whose handler takes how the job ended"
        )
    return str(task._as_follow_up(option))


def merge_cancel(changes: dict[str, Any], on_failure: str | None = None) -> None:
    """Put the JSON of `on_cancel` among these changes into that of `on_failure`, which holds both. A column
    for that would cost all jobs, and few have one."""
    if not changes.keys() & {"on_failure", "on_cancel"}:
        return
    now = json.loads(on_failure or "{}") or {}
    cancel = now.pop("on_cancel", None)
    if "on_failure" in changes:
        now = json.loads(changes["on_failure"]) or {}
    if "on_cancel" in changes:
        cancel = json.loads(changes.pop("on_cancel"))
    if cancel:
        now["on_cancel"] = cancel
    changes["on_failure"] = json.dumps(now or None, ensure_ascii=False)


class JobOption(NamedTuple):
    """The field of jobs that holds an option, and the check that makes its value. The check gets the name of
    the option, too."""

    field: str
    check: Callable[[Any, str], Any]
    instead_of: Mapping[str, Any] = {}
    """The fields of options whose place it takes, and their values for none."""
    none: Mapping[str, Any] | None = {}
    """The fields of a job that None sets; a task, a queue or the App then has no such option. It is empty
    where None stands for an option that is not given. None where the check makes the field."""

    def fields(self, value: Any, name: str) -> dict[str, Any]:
        """Return the fields that the option sets. Raises `ConfigurationError` for a wrong value."""
        return {} if value is None and self.none else {self.field: self.check(value, name)}


def _checked_span(value: Duration, label: str) -> int:
    """Return the milliseconds of a duration in which something has to be possible."""
    ms = milliseconds(value, label)
    if ms == 0:
        raise ConfigurationError(
            f"{label} is zero: no job could be started or finished in it; leave it out for no limit"
        )
    return ms


def checked_retention(value: Duration, label: str) -> int:
    """Return how long a job is kept after its end."""
    return FOR_EVER_MS if value == "forever" else milliseconds(value, label)


JOB_OPTIONS: Mapping[str, JobOption] = {
    "queue": JobOption("queue", checked_queue),
    "priority": JobOption("priority", checked_priority),
    "max_attempts": JobOption("max_attempts", partial(checked_whole, choice=range(1, 1_000_001)), none=None),
    # a job without a timeout has 0, since NULL stands for its task's
    "timeout": JobOption("timeout_ms", _checked_span, none={"timeout_ms": 0}),
    "retention": JobOption("retention_ms", checked_retention),
    "start_within": JobOption(
        "start_within_ms",
        _checked_span,
        instead_of={"start_by": None},
        none={"start_within_ms": None, "start_by": None},
    ),
}
"""The options of a job that its task, its queue and the App have, too."""


def job_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for the options of the table that are set. Raises `ConfigurationError` for a wrong
    value."""
    fields: dict[str, Any] = {}
    for name, option in JOB_OPTIONS.items():
        if name in options:
            fields |= option.fields(options[name], name)
    return fields


_OPTIONS: Mapping[str, JobOption] = {
    **JOB_OPTIONS,
    "start_by": JobOption("start_by", aware, instead_of={"start_within_ms": None}),
    "delay": JobOption("delay_ms", milliseconds, instead_of={"available_at": None}),
    "available_at": JobOption("available_at", aware, instead_of={"delay_ms": 0}),
    "backoff": JobOption("backoff", backoffs.stored),
    "unique_key": JobOption(
        "unique_key",
        checked_name,
        none={"unique_key": None, "unique_until": "finish", "on_conflict": "keep", "max_wait_ms": None},
    ),
    "unique_until": JobOption("unique_until", partial(checked_word, choice=UniqueUntil)),
    "on_conflict": JobOption("on_conflict", partial(checked_word, choice=OnConflict)),
    "max_wait": JobOption("max_wait_ms", milliseconds),
    "on_success": JobOption("on_success", checked_follow_up, none=None),
    "on_failure": JobOption("on_failure", checked_follow_up, none=None),
    "on_cancel": JobOption("on_cancel", checked_follow_up, none=None),
    "label": JobOption("label", checked_name, none={"label": None}),
    "batch": JobOption("batch_key", checked_name, none={"batch_key": None}),
    "headers": JobOption("headers", headings.checked),
    "limit": JobOption("limit", checked_limit, none={"limit_key": None, "rule": None}),
}


def option_fields(task: Any) -> dict[str, Any]:
    """Return the fields of a task's jobs for the options that queues and the App have, too."""
    return {option.field: getattr(task, option.field) for option in JOB_OPTIONS.values()}


def changed_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job that these options of it change. Raises `ConfigurationError` for a wrong
    value."""
    changes: dict[str, Any] = {}
    for name, value in options.items():
        option = _OPTIONS[name]
        if value is None and option.none is not None:
            changes |= option.none
        else:
            changes |= {**option.instead_of, **option.fields(value, name)}
    if "limit" in changes:
        changes["limit_key"], changes["rule"] = changes.pop("limit")
    return changes
