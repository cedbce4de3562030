"""The reasons why a job is blocked: how each frees jobs after a commit, sweeps, and explains the wait.

Callers loop over `BLOCKERS`, and name no reason. For another one, a migration lets `blocked_by` have its
name, a folder beside this module stores it, and a class here has its entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from time import monotonic
from typing import Any, NamedTuple

from sqlalchemy import Connection

from sqlq.config.command_hint import command, word
from sqlq.config.constants import RESCUE_MS, WAIT_TASK
from sqlq.config.durations import ending, span
from sqlq.database.database import Database
from sqlq.model.job import JobDetails
from sqlq.store.events import free as events
from sqlq.store.flows import flows, unblock
from sqlq.store.jobs import lookup
from sqlq.store.limits import admit
from sqlq.store.limits.admit import FreedJobs
from sqlq.store.signals import waits

RECENT_MS = 3 * RESCUE_MS
"""How far back a sweep looks: further than the time between two, so that one may be late."""
SWEEP_SHARE = 50
"""The rest after a sweep, as a multiple of its duration."""
ALL_STEPS_SECONDS = 60.0
SWEPT_AT_ONCE = 1_000
LOOKS_AT_ONCE = 20
UNUSED_MS = 30 * 24 * 3_600_000
"""Finished jobs, whose replays need their keys, are kept for a week unless an App sets another retention."""


class Reason(NamedTuple):
    """A sentence about a job, and the words of the command that changes it."""

    text: str
    words: str | None = None
    needs_app: bool = False

    @property
    def command(self) -> str | None:
        """The command, as it is pasted."""
        return self.words and command(self.words, needs_app=self.needs_app)


class Blocker:
    """A reason to wait. Each thread that frees jobs has an instance, which keeps the state between calls."""

    name: str
    """As in `jobs.blocked_by`, in listings, and in the log."""
    waited_for: str | None = None
    """The column that is NULL for jobs for which no other waits; None where none waits for a job."""
    key: str = "id"
    """The column of such a job by which `free` finds those that wait."""
    until_end = False
    """Whether they wait for its end, so that a retry or a snooze frees none."""
    has_wakes = False
    """Whether each transaction that lets jobs go on writes a wake. `free` then also takes the wakes."""
    called_by: str | None = None
    """The field of a `Look` that calls for a sweep; None where the poller looks for no such jobs."""
    share = SWEEP_SHARE
    """The rest after a sweep that has left some, as a multiple of its duration."""
    rhythm_seconds = RESCUE_MS / 1000
    """The wait between two sweeps where no poller looks."""
    unused_seconds: float | None = None
    """The wait between sweeps where no job waits; None for the usual one."""

    def free(self, database: Database, keys: Collection[Any]) -> FreedJobs:
        """Free jobs after a commit: those of these keys, and those of wakes that are due."""
        raise NotImplementedError

    def sweep(self, database: Database) -> FreedJobs | None:
        """Free some of the jobs that a dead process has left blocked; None where no job waits."""
        raise NotImplementedError

    def clear_up(self, conn: Connection, limit: int) -> int:
        """Delete at most `limit` rows that are of no use any more; return their number."""
        return 0

    def explain(self, database: Database, job: JobDetails) -> Iterator[Reason]:
        """Yield the reasons why a blocked job waits."""
        raise NotImplementedError


class FlowBlocker(Blocker):
    """A step waits for the ends of the steps before it. Each sweep looks at those after jobs that ended
    lately, and each minute one begins to look at all."""

    name = "flow"
    waited_for, key = "flow_id", "id"
    until_end = True
    unused_seconds = ALL_STEPS_SECONDS

    _position: unblock.FlowPosition | None = None
    """Where the sweep over all steps goes on; None between two of them."""
    _all_at = float("-inf")

    def free(self, database: Database, keys: Collection[int]) -> FreedJobs:
        return FreedJobs(unblock.after(database, keys).free)

    def sweep(self, database: Database) -> FreedJobs | None:
        if not unblock.are_in_use(database):
            return None
        claims, done = database.for_claims, FreedJobs()
        # guard: what-ended-lately-is-swept
        done.number += unblock.sweep_recent(claims, RECENT_MS).free
        began = monotonic()
        if began >= self._all_at:
            unblocked, self._position = unblock.sweep_all(claims, self._position or (0, 0), SWEPT_AT_ONCE)
            done.number += unblocked.free
            rest = SWEEP_SHARE * (monotonic() - began)
            self._all_at = began + (max(rest, ALL_STEPS_SECONDS) if self._position is None else rest)
        done.has_more = self._position is not None
        return done

    def explain(self, database: Database, job: JobDetails) -> Iterator[Reason]:
        if job.flow_id is None:  # SQL has inserted it
            return
        with database.read() as conn:
            flow = flows.rows_of(conn, job.flow_id)
        if flow is None:
            yield Reason("it waits for steps that are kept no more; a sweep frees it within a minute")
            return
        _, steps, edges = flow
        before = {edge.depends_on for edge in edges if edge.job_id == job.id}
        for step in steps:
            if step.id in before and step.state != "finished":
                yield Reason(
                    f"it waits for job {step.id}, {step.task}, which is {step.state}",
                    f"flows skip {step.id}" if step.state == "failed" else None,
                )


class LimitBlocker(Blocker):
    """A job waits in the line of a limit for a slot, or for the next start of a rate."""

    name = "limit"
    waited_for = key = "limit_key"
    has_wakes = True
    called_by = "limited"

    _after_key = ""
    """The key after which the sweep goes on; empty between two of them."""

    def free(self, database: Database, keys: Collection[str]) -> FreedJobs:
        return admit.look(database, keys)

    def sweep(self, database: Database) -> FreedJobs | None:
        if not admit.are_in_use(database):
            return None
        # guard: limit-keys-are-swept
        done, self._after_key = admit.sweep(database.for_claims, self._after_key)
        done.has_more = done.has_more or self._after_key != ""
        return done

    def clear_up(self, conn: Connection, limit: int) -> int:
        return admit.forget_unused(conn, unused_ms=UNUSED_MS, limit=limit)

    def explain(self, database: Database, job: JobDetails) -> Iterator[Reason]:
        key, leader = job.limit_key or "", None
        with database.read() as conn:
            status = admit.status(conn, key)
            if not status:
                return
            if status.closed_until is not None:
                yield Reason(
                    f"its limit {key} is closed, and opens {status.opens}", f"limits open {word(key)}"
                )
                return
            if status.in_order and (id := admit.leader(conn, key, holds=status.holds)) not in (None, job.id):
                leader = lookup.details(conn, id)
        if leader:
            why = "".join(f": {reason.text}" for reason in put_back(leader))
            yield Reason(
                f"it waits for job {leader.id}, {leader.task}, which is {leader.state}, and before it in the "
                f"line of {key}{why}",
                f"why {leader.id}",
            )
            return
        wait = status.next_start_seconds
        if not wait and status.running + status.waiting <= (status.max_running or 1):
            yield Reason(f"its limit {key} has room: a worker admits it at its next look")
            return
        soon = f"; the next one may start in {span(wait)}" if wait else ""
        yield Reason(
            f"it waits for its turn under the limit {key} ({status.says}): "
            f"{status.running:,} run, {status.waiting:,} wait{soon}",
            f"limits set {word(key)} --running N",
        )


class EventBlocker(Blocker):
    """A step or a job waits for a signal from outside, or for the end of its timeout. The poller's look finds
    out whether there is one."""

    name = "event"
    has_wakes = True
    called_by = "signalled"
    share = 1
    rhythm_seconds = 1.0

    def free(self, database: Database, keys: Collection[Any] = ()) -> FreedJobs:
        done = FreedJobs()
        for _ in range(LOOKS_AT_ONCE):
            if not events.is_due(database):
                return done
            rows, done.has_more = database.run(events.look)
            free_after(database, [row for row in rows if row.task == WAIT_TASK])
            done.number += len(rows)
        return done

    def sweep(self, database: Database) -> FreedJobs | None:
        return self.free(database.for_claims)

    def clear_up(self, conn: Connection, limit: int) -> int:
        return waits.prune(conn, limit)

    def explain(self, database: Database, job: JobDetails) -> Iterator[Reason]:
        with database.read() as conn:
            wait = waits.of(conn, job.id)
        if wait is not None:
            text = f"it waits for the signal {wait.name}{ending(wait.until)}"
            yield Reason(text, f"signal {word(wait.name)}")


_PUT_BACK = {
    "unknown_task": (
        "the last worker that met it does not know its task",
        "deploy it, or give a renamed task an alias",
    ),
    "bad_payload": (
        "the handler of the last worker that met it does not take its arguments",
        "give new parameters a default",
    ),
}
"""Why no worker could start a job, and the mend, by the reason in its history."""


def put_back(job: JobDetails) -> Iterator[Reason]:
    """Yield why the last worker that claimed a job could not start it, where that is so."""
    if texts := _PUT_BACK.get(job.history[-1].reason or "") if job.history else None:
        cause, mend = texts
        yield Reason(f"{cause}, and it was put back: {mend}; it fails when that has lasted for a day")


BLOCKERS: tuple[type[Blocker], ...] = (FlowBlocker, LimitBlocker, EventBlocker)


def free_after(database: Database, ended: Iterable[Any]) -> None:
    """Free, after a commit, the jobs that wait for those of these rows, which have ended or are gone. Where
    the transaction wrote wakes, workers do it by these."""
    rows = list(ended)
    for blocker in BLOCKERS:
        if not blocker.has_wakes:
            name = str(blocker.waited_for)
            keys = [getattr(row, blocker.key) for row in rows if getattr(row, name) is not None]
            if keys:
                blocker().free(database, keys)
