"""Replay: ended jobs are enqueued once more, as new jobs that name the ones they are replays of."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from sqlq.admin.facet import check_names, portions
from sqlq.config.command_hint import command
from sqlq.config.durations import LONGEST_MS, Duration, aware, milliseconds
from sqlq.database.database import Database
from sqlq.enqueue.prepare import Stamps
from sqlq.errors import ConfigurationError, JobNotFoundError, SealError
from sqlq.events import Events, enqueued
from sqlq.model.handle import id_of
from sqlq.model.job import JobDetails, State
from sqlq.model.limit import checked_rate
from sqlq.model.task import NamedTask, Registry
from sqlq.payload.encryption import Unopened, looked_into
from sqlq.store.jobs import lookup
from sqlq.store.jobs import replay as replaying
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.replay import Changed, Choice, Ended, Found, Made, Pace

log = logging.getLogger("sqlq")

FIRST = 5
"""A dry run shows at most this many jobs."""
ENDED = (State.FINISHED, State.FAILED, State.CANCELLED)

EndedState: TypeAlias = Literal["finished", "failed", "cancelled"]
Progress: TypeAlias = Callable[[int, int], object]
"""Called after each batch with the number of jobs replayed so far, and the number of all."""


class ReplayOptions(TypedDict, total=False):
    """The options of a replay; see `Jobs.replay`."""

    task: str | None
    queue: str | None
    group: str | None
    state: EndedState | None
    since: datetime | Duration | None
    until: datetime | Duration | None
    args: Sequence[Any] | None
    kwargs: Mapping[str, Any] | None
    rate: str | None
    again: bool
    dry_run: bool
    progress: Progress | None


class Replayed(NamedTuple):
    """The result of a replay. `number` jobs were replayed, or would be by a dry run. `jobs` maps the id of
    each original to the new id. `already` and `steps` count jobs that were left out. `already` had been
    replayed before, or are replays themselves; `steps` are steps of flows. `first` has a few jobs of a dry
    run."""

    number: int
    jobs: dict[int, int]
    already: int
    steps: int
    first: tuple[JobDetails, ...] = ()


class Replays:
    """Enqueues copies of ended jobs in one database. The App's tasks check changed arguments, and listeners
    to its events receive `enqueued`. Its enqueue middleware adds headers on the caller of the replay."""

    def __init__(self, database: Database, tasks: Registry, events: Events, stamps: Stamps) -> None:
        self._database = database
        self._tasks = tasks
        self._events = events
        self._stamps = stamps

    def replay(
        self,
        ids: int | Sequence[int] = (),
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        state: EndedState | None = None,
        since: datetime | Duration | None = None,
        until: datetime | Duration | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        rate: str | None = None,
        again: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Replayed:
        """See `Jobs.replay`."""
        wanted = _checked_ids(ids)
        check_names(task, queue, group)
        if not wanted and all(value is None for value in (task, queue, group, since, until)):
            raise ConfigurationError(
                "name the jobs to replay: by id, task, queue or group, or by when they ended (since=, until=)"
            )
        changes = args is not None or kwargs is not None
        if changes and len(wanted) != 1:
            raise ConfigurationError(
                "arguments can be changed for one job only: name it by its id, and nothing else"
            )
        pace = None if rate is None else Pace(*checked_rate(rate))
        states = _checked_states(state, wanted)
        self._database.require_tables()
        with self._database.read() as conn:
            begin = replaying.begin(conn)
        earliest, latest = (_moment(since, "since", begin.moment), _moment(until, "until", begin.moment))
        if earliest is not None and latest is not None and latest <= earliest:
            raise ConfigurationError(f"until is {until}, which is not after since ({since})")
        selections = portions(wanted, task, queue, group)
        choices = [Choice(begin, states, chosen, earliest, latest, again) for chosen in selections]
        named = self._named(selections)
        found = self._count(choices)
        if wanted:
            _refuse_left_out(wanted, named, found, again)
        if pace is not None and pace.delay_ms(found.number) > LONGEST_MS:
            raise ConfigurationError(
                f"rate is {rate!r}: the last of {found.number:,} jobs is due in more than a hundred years"
            )
        changed = self._changed(named[wanted[0]], args, kwargs) if changes else None
        if dry_run:
            return Replayed(found.number, {}, found.already, found.steps, self._first(choices))
        done = self._replay(choices, found.number, pace, changed, progress)
        return Replayed(len(done), done, found.already, found.steps)

    def _replay(
        self,
        choices: Sequence[Choice],
        number: int,
        pace: Pace | None,
        changed: Changed | None,
        progress: Progress | None,
    ) -> dict[int, int]:
        done: dict[int, int] = {}
        began = time.monotonic()
        caller = self._stamps.of_replays()
        for choice in choices:
            last = 0
            while True:
                if pace is not None:
                    pace = pace._replace(before=len(done), passed_ms=round(1000 * (time.monotonic() - began)))
                work = partial(replaying.replay, choice=choice, after_id=last, pace=pace, changed=changed)
                batch = self._database.run(partial(work, caller=caller))
                if not batch:
                    break
                self._tell(batch, pace)  # guard: replays-are-told
                done |= {made.of: made.id for made in batch}
                last = batch[-1].of
                if progress is not None:
                    progress(len(done), number)
        return done

    def _tell(self, batch: Sequence[Made], pace: Pace | None) -> None:
        """Publish that jobs were enqueued, as for any others, once they are committed."""
        hears, shows = self._events.wants("enqueued"), log.isEnabledFor(logging.DEBUG)
        if not (hears or shows):
            return
        for place, made in enumerate(batch):
            if hears:
                delay_ms = 0 if pace is None else max(0, pace.delay_ms(place))
                self._events.tell(enqueued(made, made.max_attempts, delay_ms, made.label))
            if shows:
                log.debug(
                    "job %d: %s in queue %s, enqueued as a replay of job %d",
                    *(made.id, made.task, made.queue, made.of),
                    extra={"job_id": made.id, "task": made.task, "queue": made.queue, "event": "enqueued"},
                )

    def _named(self, selections: Sequence[Selection]) -> dict[int, Ended]:
        """Return the ended jobs of these ids. Raises `JobNotFoundError` where there is no such job, and
        `ConfigurationError` for one that has not ended, or is a step of a flow."""
        found: dict[int, Ended] = {}
        live: set[int] = set()
        with self._database.read() as conn:
            for chosen in selections:
                ended, waiting = replaying.ended(conn, chosen.ids)
                found |= ended
                live |= waiting
        for id in (id for chosen in selections for id in chosen.ids):
            if id in live and id not in found:
                raise ConfigurationError(
                    f"job {id} has not ended: what waits or runs cannot be replayed, only what finished, "
                    "failed or was cancelled"
                )
            if id not in found:
                raise JobNotFoundError(
                    f"there is no job {id} to replay: it never was, or ended longer ago than ended jobs are "
                    "kept"
                )
            if (flow := found[id].flow_id) is not None:  # guard: a-named-step-is-refused
                url = self._database.engine.url
                raise ConfigurationError(
                    f"job {id} is a step of flow {flow}, and cannot be replayed alone: "
                    f"{command(f'retry --flow {flow}', url)} runs failed steps again, a new flow all of them"
                )
        return found

    def _count(self, choices: Sequence[Choice]) -> Found:
        with self._database.read() as conn:
            counts = [replaying.count(conn, choice) for choice in choices]
        return Found(*(sum(each) for each in zip(*counts, strict=True)))

    def _first(self, choices: Sequence[Choice]) -> tuple[JobDetails, ...]:
        with self._database.read() as conn:
            ids = sorted(id for choice in choices for id in replaying.first(conn, choice, FIRST))[:FIRST]
            found = [lookup.details(conn, id) for id in ids]
        return tuple(job for job in found if job is not None)

    def _changed(self, job: Ended, args: Any, kwargs: Any) -> Changed:
        """Return the arguments of a replay, in which what is not given is as it was. Raises `ArgumentsError`
        where they do not fit the task, if that is known here, and `SealError` where what they were cannot be
        read."""
        if args is not None and (isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Sequence)):
            raise ConfigurationError(f"args is {args!r}: give a list of the arguments, as in [7]")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ConfigurationError(f"kwargs is {kwargs!r}: give a mapping of names, as in {{'copy': True}}")
        seal = self._database.seal
        payload = looked_into(seal, "payload", job.task, job.queue, job.payload).text
        if isinstance(payload, Unopened):
            raise SealError(f"the arguments of this {job.task} cannot be read, to be changed: {payload.why}")
        if seal is not None:
            seal.opened("payload", job.task, job.queue, job.payload)  # guard: a-refused-row-is-not-sealed
        before = lookup.decoded(payload)
        before = before if isinstance(before, dict) else {}
        given = json.loads(NamedTask(job.task).new(*(args or ()), **(kwargs or {})).payload)
        positional = (given if args is not None else before).get("args", [])
        named = (given if kwargs is not None else before).get("kwargs", {})
        task = self._tasks.get(job.task)
        if task is None:
            other = NamedTask(job.task).new(*positional, **named).payload
            return Changed(self._sealed(job, other), job.limit_key)
        new = task.new_from_json(positional, named)
        try:
            was = task.new_from_json(before.get("args", []), before.get("kwargs", {})).limit_key
        except Exception:  # what did not fit may be why it is replayed with other arguments
            was = job.limit_key
        if was != job.limit_key or new.limit_key is None:  # the job had a limit of its own, or none
            return Changed(self._sealed(job, new.payload), job.limit_key)
        return Changed(
            self._sealed(job, new.payload), new.limit_key, *([new.rule] if new.rule is not None else [])
        )

    def _sealed(self, job: Ended, payload: str) -> str:
        seal = self._database.seal
        # guard: changed-arguments-are-sealed
        return payload if seal is None else seal.sealed("payload", job.task, job.queue, payload)


def _refuse_left_out(ids: Sequence[int], named: Mapping[int, Ended], found: Found, again: bool) -> None:
    """Raise `ConfigurationError` where jobs that are named are not of what is named with them, or where all
    of them were replayed before."""
    if found.number + found.already < len(ids):
        raise ConfigurationError(
            f"not all of the {len(ids):,} jobs named are of the task, queue, state and time that are named "
            "with them: name ids alone, or leave those out"
            if len(ids) > 1
            else f"job {ids[0]} ({named[ids[0]].task}, {named[ids[0]].state}) is not of the task, queue, "
            "state and time that are named with it: name the id alone"
        )
    if found.number == 0 and not again:
        first = named[ids[0]].replayed_as
        others = "" if len(ids) == 1 else f", and so have the {len(ids) - 1:,} others"
        raise ConfigurationError(
            f"job {ids[0]} has been replayed as job {first} already{others}: again=True (--again) replays "
            "what has been replayed before"
        )


def _checked_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, int) and not isinstance(ids, bool):
        return (ids,)
    if isinstance(ids, (str, int)) or not isinstance(ids, Sequence):
        raise ConfigurationError(f"ids is {ids!r}: give the id of a job, or a list of them, as in [42, 43]")
    return tuple(sorted({id_of(id) for id in ids}))


def _checked_states(state: Any, ids: Sequence[int]) -> tuple[State, ...]:
    """Return the states that are meant: what was cancelled only where it is named."""
    if state is None:
        return ENDED if ids else (State.FINISHED, State.FAILED)
    if state not in ENDED:
        raise ConfigurationError(f"state is {state!r}: it is finished, failed or cancelled")
    return (State(state),)


def _moment(value: Any, what: str, now: datetime) -> datetime | None:
    """Return the time that was given, or the time a given duration before now."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return aware(value, what)
    return now - timedelta(milliseconds=milliseconds(value, what))


def lasts_ms(number: int, rate: str) -> int:
    """Return the time from the first of so many replays at a rate to the last."""
    return Pace(*checked_rate(rate)).delay_ms(number - 1)
