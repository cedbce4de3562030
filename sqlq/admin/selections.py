"""Which jobs an operation means, and the errors where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from typing import Any, TypedDict

from sqlalchemy import Connection

from sqlq.config.durations import Duration, milliseconds
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.checks import checked_bool, checks_arguments
from sqlq.model.handle import AnyJob, AnyJobs, Handle, id_of
from sqlq.model.job import JobDetails, State
from sqlq.store.jobs import lookup
from sqlq.store.jobs.lookup import Selection, look


class _Fields(TypedDict, total=False):
    """Fields of jobs; all that is given must fit. `since` and `until` are times of the end, and for jobs that
    have not ended, of their creation."""

    task: str | None
    queue: str | None
    label: str | None
    batch: str | None
    key: str | None
    limit_key: str | None
    since: datetime | Duration | None
    until: datetime | Duration | None


class Search(_Fields, total=False):
    """Which jobs to look for. `header` is a name, or "name=value"; `text` stands in the arguments or the
    error. `visible` is called with each job, and leaves it out by False. Without `ids` all are meant."""

    ids: tuple[int, ...]
    header: str | None
    text: str | None
    before: int | None
    visible: Callable[[JobDetails], bool] | None


class Chosen(_Fields, total=False):
    """Which jobs are meant, beside ids: those with these fields, or `all`. `error` is the fingerprint of an
    error of failed jobs."""

    error: str | None
    state: str | None
    all: bool


selection = checks_arguments(Selection)


def selections(ids: Sequence[int], noun: str, *, all: bool = False, **fields: Any) -> Sequence[Selection]:
    """Return the selected jobs in portions: a statement takes some ten thousand parameters at most."""
    is_named = bool(ids) or any(value is not None for value in fields.values())
    if is_named == checked_bool(all, "all"):
        both = ", and not both" if all else ""
        raise ConfigurationError(
            f"name the {noun} that are meant: by id, task, queue or batch, or all of them{both}"
        )
    if fields.get("state") is not None:
        checked_state(fields["state"])
    meant = selection(**fields)
    numbers = sorted(set(ids))
    starts = range(0, max(len(numbers), 1), lookup.BATCH)
    return [replace(meant, ids=tuple(numbers[i : i + lookup.BATCH])) for i in starts]


def checked_state(state: str) -> State:
    if state not in list(State):
        raise ConfigurationError(f"state is {state!r}: it is one of {', '.join(State)}")
    return State(state)


def no_job(id: int) -> JobNotFoundError:
    return JobNotFoundError(
        f"there is no job {id} in this database and schema: it never was, its transaction has not committed, "
        "or it ended and is kept no more"
    )


def delay_ms_of(at: datetime | None, delay: Duration | None) -> int | None:
    if at is not None and delay is not None:
        raise ConfigurationError("a time and a delay both say when: give one of the two")
    return None if delay is None else milliseconds(delay, "delay")


def ids_of(jobs: AnyJob | AnyJobs, read: Callable[[], AbstractContextManager[Connection]]) -> list[int]:
    """Return ids in place of the answers of `enqueue`. Raises `JobNotFoundError` for a job that is not there,
    as after a rollback."""
    jobs = [jobs] if isinstance(jobs, int | Handle) else jobs
    handles = [job for job in jobs if isinstance(job, Handle)]
    if handles:
        with read() as conn:
            rows = look(conn, {job.id: False for job in handles})
        for job in handles:
            row = rows.get(job.id)
            job.require_own(row and row.created)
            if row is None:
                raise no_job(job.id)
    return [id_of(job) for job in jobs]
