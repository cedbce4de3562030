"""Every transition in every order, beside a model that fits on a page.

There are two owners, the crash of either at any point, lost replies, an operator, and a clock that the test
moves. After each step the database must equal the model, and the guard must have rejected nothing. No
statement of an owner with a lost lease may change a row.

Times are whole hours, so that the seconds a test takes decide nothing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.admin.flows import SKIPPED
from sqlq.database.database import Database
from sqlq.model import history
from sqlq.model.checks import Rule
from sqlq.model.flow import plan_of
from sqlq.model.job import ClaimedJob, NewJob
from sqlq.model.outcome import (
    NOT_NEEDED,
    Cancelled,
    ErrorText,
    Failed,
    Finished,
    Outcome,
    Released,
    Retried,
    settlement,
)
from sqlq.schema.types import MARIADB_NOW, POSTGRESQL_NOW, SQLITE_NOW
from sqlq.store.flows import flows
from sqlq.store.flows import unblock as unblocking
from sqlq.store.jobs import insert, lease, lookup, operate
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import LeaseState
from sqlq.store.limits import admit as admission
from sqlq.store.limits.grant import Wake
from tests.faults import guard
from tests.faults.account import record
from tests.kit import claim_on, committed, count, execute, span

HOUR = 3_600_000
LEASE = 2  # hours
LIMITS = {"two": Rule(max_running=2), "serial": Rule(max_running=1, in_order=True)}


@dataclass
class Modelled:
    """A job as it should be. `due` and `start_within` are hours by the model's clock."""

    id: int
    due: int
    max_attempts: int = 2
    priority: int = 0
    key: str | None = None
    key_until: str = "finish"
    place: str = "jobs"
    created: int = 0
    attempts: int = 0
    token: int = 0
    releases: int = 0
    losses: int = 0
    owner: str | None = None
    expires: int | None = None
    errors: int = 0
    cursor: str | None = None
    payload: str = "{}"
    start_by: int | None = None
    reason: str | None = None
    followed: bool = False
    blocked: bool = False
    waits: tuple[tuple[int, str], ...] = ()
    """Which jobs it waits for, each with how it has to end."""
    limit: str | None = None
    """The key of its limit."""
    in_line: bool = False
    is_step: bool = False
    skipped: bool = False

    def is_live(self) -> bool:
        return self.place == "jobs"

    def holds_key(self) -> bool:
        return self.is_live() and self.key is not None and (self.key_until == "finish" or self.token == 0)


class Model:
    """The jobs, a clock of whole hours, and what everybody believes to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.model: dict[int, Modelled] = {}
        self.rights: list[ClaimedJob] = []
        """Everything anybody ever claimed; whoever claimed it may still believe to hold it."""
        self.closed: dict[str, int] = {}
        """Until when a key of a limit is closed."""
        self.followed: Counter[tuple[int, str]] = Counter()
        """How often each job was followed as finished, and as failed."""

    # -- flows -----------------------------------------------------------------------------------------------

    def skips(self, id: int, when: str) -> bool:
        return id in self.model and self.model[id].skipped and when in ("success", "either")

    def holds(self, id: int, when: str) -> bool | None:
        """Whether a step before another has ended as that wants; None where that is not decided yet."""
        before = self.model.get(id)
        if before is None or before.reason == "cancelled":
            return when == "ended"
        if before.is_live():
            return None
        if before.place == "failed_jobs":
            return None if when == "success" else True
        return when != "failure"

    def live(self) -> list[Modelled]:
        """Return the jobs that have not ended, in the order of ids."""
        return sorted((job for job in self.model.values() if job.is_live()), key=lambda job: job.id)

    def unblock_in_model(self) -> tuple[int, int]:
        """Do in the model what an unblock should; return how many steps are free, and cancelled."""
        free = cancelled = 0
        for job in self.live():
            if not job.blocked or any(self.model[id].is_live() for id, _ in job.waits if id in self.model):
                continue
            job.skipped = all(self.skips(id, when) for id, when in job.waits)
            if not job.skipped:
                job.waits = tuple((id, "ended" if self.skips(id, when) else when) for id, when in job.waits)
            verdicts = [self.holds(id, when) for id, when in job.waits]
            if False in verdicts:
                job.blocked, job.place, job.reason = False, "finished_jobs", "cancelled"
                cancelled += 1
            elif None not in verdicts:
                job.blocked, job.due = False, max(job.due, self.clock)
                free += 1
        return free, cancelled

    def failed(self) -> list[int]:
        return sorted(job.id for job in self.model.values() if job.place == "failed_jobs")

    def skippable(self) -> list[int]:
        waiting = [job.id for job in self.live() if job.owner is None]
        return sorted(id for id in (*waiting, *self.failed()) if self.model[id].is_step)

    # -- limits ----------------------------------------------------------------------------------------------

    def line(self, key: str) -> list[Modelled]:
        """Return what is in line for a key, in the order of ids."""
        return [job for job in self.live() if job.limit == key and job.in_line]

    def holders(self, key: str) -> int:
        return sum(job.limit == key and not job.in_line for job in self.live())

    def close_in_model(self, key: str, until: int) -> None:
        """Close a key, and take back what has been admitted and not claimed."""
        self.closed[key] = max(until, self.closed.get(key, 0))
        for job in self.live():
            if job.limit == key and job.owner is None:
                job.in_line = True

    # -- claims and their ends -------------------------------------------------------------------------------

    def waiting(self) -> list[Modelled]:
        free = [job for job in self.live() if job.owner is None and not (job.blocked or job.in_line)]
        return sorted((job for job in free if job.due <= self.clock), key=lambda job: -job.priority)

    def claimed(self, owner: str, got: list[ClaimedJob], limit: int, waiting: list[Modelled]) -> None:
        priorities = [self.model[job.id].priority for job in got]
        assert priorities == [job.priority for job in waiting[:limit]], "the most urgent that are due"
        for job in got:
            known = self.model[job.id]
            assert known in waiting, "nobody else holds it, and it is due"
            known.token, known.attempts = known.token + 1, known.attempts + 1
            known.owner, known.expires = owner, self.clock + LEASE
            expected = known.token, known.attempts, known.max_attempts
            assert (job.lease_token, job.attempts, job.max_attempts) == expected
            self.rights.append(job)

    def held(self, job: ClaimedJob) -> Modelled | None:
        """The job as modelled, if this right to it is still good."""
        known = self.model.get(job.id)
        if known is None or known.owner is None or not known.is_live():
            return None
        return known if known.token == job.lease_token else None

    def is_followed(self, known: Modelled, outcome: str) -> None:
        if known.followed:
            self.followed[known.id, outcome] += 1

    def settle_in_model(self, known: Modelled, outcome: Outcome) -> None:
        known.owner = known.expires = None
        match outcome:
            case Finished():
                known.place, known.reason = "finished_jobs", "finished"
                self.is_followed(known, "finished")
            case Cancelled(reason):
                known.place, known.reason = "finished_jobs", "cancelled"
                known.skipped = reason == NOT_NEEDED
            case Failed(reason):
                known.place, known.reason = "failed_jobs", reason
                self.is_followed(known, "failed")
            case Retried(delay_ms):
                known.due, known.errors = self.clock + delay_ms // HOUR, known.errors + 1
                known.in_line = known.limit is not None
            case Released(delay_ms):
                if delay_ms is not None:
                    known.due = self.clock + delay_ms // HOUR
                known.attempts, known.releases = known.attempts - 1, known.releases + 1
                known.in_line = known.limit is not None
                if outcome.closes and known.limit is not None:
                    self.close_in_model(known.limit, known.due)

    def moved_back(self, moved: list[int]) -> None:
        """Put failed jobs back, with all their attempts."""
        for id in moved:
            job = self.model[id]
            job.place, job.due, job.errors = "jobs", self.clock, job.errors + 1
            job.attempts = job.releases = job.losses = 0
            job.start_by = job.reason = None
            job.in_line = job.limit is not None

    # -- what the tables should say --------------------------------------------------------------------------

    def expected(self) -> dict[int, tuple[object, ...]]:
        """Return the expected row of each job."""
        return {
            j.id: (
                *(j.place, j.attempts, j.token, j.releases, j.errors, j.cursor, j.payload, j.reason, j.owner),
                j.losses if j.is_live() else 0,
            )
            for j in self.model.values()
        }

    def state(self, job: Modelled) -> str:
        if not job.is_live():
            failed = job.place == "failed_jobs"
            return "failed" if failed else "cancelled" if job.reason == "cancelled" else "finished"
        if job.blocked or job.in_line:
            return "blocked"
        return "running" if job.owner is not None else "available" if job.due <= self.clock else "scheduled"


pytestmark = pytest.mark.each_database

OWNERS = ("one", "two")
ERROR = ErrorText("ValueError", "no")
FOLLOWER = '{"task": "follows", "queue": "follow"}'
"""A callback in another queue, from which nothing is claimed."""
FIGURES = (
    *("stale_settles_accepted", "follow_ups_lost", "follow_ups_doubled", "steps_lost"),
    *("steps_unblocked_twice", "over_the_limit", "out_of_order"),
)


def right_of(job: ClaimedJob) -> tuple[int, int]:
    return job.id, job.lease_token


class CrashError(Exception):
    """The process died before its transaction was committed."""


class Contract(Model, RuleBasedStateMachine):
    """The transitions of one queue. `database` and `engine` are set by the test."""

    database: Database
    engine: Engine
    counts: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.largest_id = 0

    @initialize(running=st.integers(0, 4))
    def begin(self, running: int) -> None:
        """Begin with nothing but a few jobs that run."""
        with self.engine.begin() as conn, guard.unguarded(conn):
            waits = ("sqlq_edges", "sqlq_flows", "sqlq_limits", "sqlq_wakes")
            for table in ("jobs", "finished_jobs", "failed_jobs", *waits):
                conn.execute(text(f"DELETE FROM {table}"))
        for _ in range(running):
            self.enqueue(0, 0, 3, None, "finish", followed=True, crash=False)
        self.claim("one", max(running, 1), crash=False)

    @contextmanager
    def transaction(self, crash: bool = False) -> Iterator[Connection]:
        """A transaction of sqlq's own; with `crash` the process dies before COMMIT."""
        try:
            with self.database.begin() as conn:
                yield conn
                if crash:
                    raise CrashError
        except CrashError:
            pass

    # -- enqueue (T1) ----------------------------------------------------------------------------------------

    @rule(
        delay=st.sampled_from([0, 0, 0, 1, 3]),
        priority=st.sampled_from([0, 0, 10]),
        max_attempts=st.integers(1, 3),
        key=st.sampled_from([None, None, "a", "b"]),
        until=st.sampled_from(["finish", "start"]),
        followed=st.booleans(),
        crash=st.booleans(),
        conflict=st.sampled_from(["keep", "replace", "debounce"]),
        expires=st.sampled_from([None, None, 1]),
    )
    def enqueue(
        self,
        delay: int,
        priority: int,
        max_attempts: int,
        key: str | None,
        until: Any,
        followed: bool,
        crash: bool,
        conflict: Any = "keep",
        expires: int | None = None,
    ) -> None:
        new = NewJob(
            "t", f"[{self.clock}]", "q", max_attempts, priority, delay_ms=delay * HOUR, unique_key=key
        )
        new = replace(new, unique_until=until, start_within_ms=None if expires is None else expires * HOUR)
        if followed:
            new = replace(new, on_success=FOLLOWER, on_failure=FOLLOWER)
        if key is not None:
            new = replace(new, on_conflict=conflict, max_wait_ms=2 * HOUR if conflict == "debounce" else None)
        due = self.clock + delay
        start_by = None if expires is None else due + expires
        modelled = Modelled(
            *(0, due, max_attempts, priority, key, until),
            created=self.clock,
            payload=new.payload,
            start_by=start_by,
            followed=followed,
        )
        rivals = (job for job in self.live() if key is not None and job.holds_key() and job.key == key)
        rival = next(rivals, None)
        with self.transaction(crash) as conn:
            (made,) = insert.insert(conn, [new])
        assert made.created == (rival is None), "at most one live job holds a key"
        if rival is not None:
            replaced = rival.owner is None and conflict != "keep"
            assert (made.id, made.replaced) == (rival.id, replaced)
            if replaced and not crash:
                later = min(due, rival.created + 2) if conflict == "debounce" else rival.due
                modelled.due, modelled.key_until = max(rival.due, later), rival.key_until
                modelled.token, modelled.created = rival.token, rival.created
                self.add(rival.id, modelled)
        elif not crash:
            self.add_new(made.id, modelled)

    def add(self, id: int, job: Modelled) -> None:
        self.model[id] = replace(job, id=id)

    def add_new(self, id: int, job: Modelled) -> None:
        assert id > self.largest_id, "an id was given twice"
        self.largest_id = id
        self.add(id, job)

    # -- flows (T16 to T18) ----------------------------------------------------------------------------------

    @rule(
        width=st.integers(1, 2),
        whens=st.lists(st.sampled_from(["success", "failure", "ended", "either"]), min_size=2, max_size=2),
        delay=st.sampled_from([0, 0, 3]),
        crash=st.sampled_from([False, False, True]),
    )
    def enqueue_flow(self, width: int, whens: list[Any], delay: int, crash: bool) -> None:
        """One or two steps, one that waits for them as drawn, and one that waits for that one's success."""
        flow = sqlq.Flow()
        wanted = whens[:width]
        first = [flow.add(NewJob("t", "{}", "q", 2), optional=when == "either") for when in wanted]
        edges: Any = {step: "success" if step.optional else whens[step.number] for step in first}
        join = flow.add(NewJob("t", "{}", "q", 2, delay_ms=delay * HOUR), after=edges)
        join.then(NewJob("t", "{}", "q", 2))
        with self.transaction(crash) as conn:
            made = [job.id for job in flows.insert_flow(conn, plan_of(flow)).jobs]
        if crash:
            return
        *parents, joined, last = made
        step, due = Modelled(0, self.clock, is_step=True), self.clock + delay
        for id in parents:
            self.add_new(id, step)
        waits = tuple(zip(parents, whens, strict=False))
        self.add_new(joined, replace(step, due=due, waits=waits, blocked=True))
        self.add_new(last, replace(step, waits=((joined, "success"),), blocked=True))

    @precondition(lambda self: any(job.blocked for job in self.live()))
    @rule(again=st.booleans())
    def unblock(self, again: bool) -> None:
        """Whoever comes by unblocks what it can, whoever has ended what was waited for."""
        expected = self.unblock_in_model()
        done, place = unblocking.sweep_all(self.database, (0, 0), 1_000)
        assert place is None
        self.counts["steps_lost"] += max(0, expected[0] - done.free)
        assert (done.free, len(done.cancelled)) == expected
        if again:
            twice, _ = unblocking.sweep_all(self.database, (0, 0), 1_000)
            self.counts["steps_unblocked_twice"] += twice.free
            assert twice == unblocking.Unblocked(), "a step was unblocked twice"

    @precondition(lambda self: self.skippable())
    @rule(data=st.data(), crash=st.booleans())
    def skip(self, data: st.DataObject, crash: bool) -> None:
        """An operator goes on as if a step had finished, whether it waits or has failed."""
        id = data.draw(st.sampled_from(self.skippable()))
        with self.transaction(crash) as conn:
            assert settling.skip(conn, id, SKIPPED)
        if not crash:
            job = self.model[id]
            job.place, job.reason, job.blocked = "finished_jobs", "finished", False

    # -- limits (T16, T19) -----------------------------------------------------------------------------------

    @rule(
        key=st.sampled_from([*LIMITS]),
        delay=st.sampled_from([0, 0, 2]),
        priority=st.sampled_from([0, 10]),
        number=st.integers(1, 3),
        crash=st.sampled_from([False, False, True]),
        looked=st.booleans(),
    )
    def enqueue_limited(
        self, key: str, delay: int, priority: int, number: int, crash: bool, looked: bool
    ) -> None:
        new = NewJob("t", "{}", "q", 3, priority, delay_ms=delay * HOUR, limit_key=key, rule=LIMITS[key])
        with self.transaction(crash) as conn:
            made = insert.insert(conn, [new] * number)
        assert {job.state for job in made} == {"blocked"}
        if crash:
            return
        for job in made:
            due = self.clock + delay
            self.add_new(job.id, Modelled(job.id, due, 3, priority, limit=key, in_line=True))
        if looked:
            self.admit(crash=False, swept=False)

    @precondition(lambda self: any(job.in_line for job in self.live()))
    @rule(crash=st.sampled_from([False, False, True]), swept=st.booleans())
    def admit(self, crash: bool, swept: bool) -> None:
        """Any owner admits jobs of a limit, after a wake or in a sweep."""
        before = {id: job.in_line for id, job in self.model.items()}
        if swept:
            admission.sweep(self.database, "")
            crash = False
        else:
            with self.transaction(crash) as conn:
                admission.look_on(conn, LIMITS, limit=500)
        free = set(committed(self.engine, "jobs WHERE limit_key IS NOT NULL AND blocked_by IS NULL"))
        for key, said in LIMITS.items():
            line, slots = self.line(key), (said.max_running or 0) - self.holders(key)
            if self.clock < self.closed.get(key, 0):
                slots = 0
            got = [job for job in line if job.id in free]
            due = [job for job in line if job.due <= self.clock]
            if crash or not self.is_known(key):  # a key without a row is for a sweep
                assert not got
                continue
            if said.in_order:
                expected = line[:1] if slots > 0 and line and line[0] in due else []
                self.counts["out_of_order"] += got != expected
            else:
                most = sorted((job.priority for job in due), reverse=True)[: max(0, slots)]
                expected = got if sorted((job.priority for job in got), reverse=True) == most else due
            assert got == expected, "what may run, and no more"
            for job in got:
                assert before[job.id]
                job.in_line, job.due = False, min(job.due, self.clock)
                self.counts["admissions"] += 1
            self.counts["over_the_limit"] += max(0, self.holders(key) - (said.max_running or 0))

    @precondition(lambda self: any(job.limit and not job.in_line and not job.owner for job in self.live()))
    @rule(key=st.sampled_from([*LIMITS]), hours=st.integers(1, 2), crash=st.booleans())
    def close(self, key: str, hours: int, crash: bool) -> None:
        """An operator closes a key."""
        if not self.is_known(key):
            return
        with self.transaction(crash) as conn:
            admission.close(conn, [Wake(key, delay_ms=hours * HOUR)])
        if not crash:
            self.close_in_model(key, self.clock + hours)

    def is_known(self, key: str) -> bool:
        return count(self.engine, f"sqlq_limits WHERE limit_key = '{key}'") == 1

    # -- claim (T2) ------------------------------------------------------------------------------------------

    @rule(owner=st.sampled_from(OWNERS), limit=st.integers(1, 3), crash=st.booleans())
    def claim(self, owner: str, limit: int, crash: bool) -> None:
        waiting = self.waiting()
        with self.transaction(crash) as conn:
            got = claim_on(conn, ["q"], limit=limit, owner=owner, lease_ms=LEASE * HOUR)
        if not crash:
            self.claimed(owner, got, limit, waiting)

    @precondition(lambda self: self.engine.dialect.name != "sqlite")
    @rule(limit=st.integers(1, 2), first_crashes=st.booleans(), second_commits_first=st.booleans())
    def claim_both_at_once(self, limit: int, first_crashes: bool, second_commits_first: bool) -> None:
        """Two transactions claim at the same time, and neither sees the other's."""
        waiting = self.waiting()
        first, second = self.database.connect(), self.database.connect()
        with first, second, first.begin() as one, second.begin() as two:
            got = claim_on(first, ["q"], limit=limit, owner="one", lease_ms=LEASE * HOUR)
            other = claim_on(second, ["q"], limit=limit, owner="two", lease_ms=LEASE * HOUR)
            assert not {job.id for job in got} & {job.id for job in other}, "one job, two owners"
            for transaction in [two, one] if second_commits_first else [one, two]:
                transaction.rollback() if transaction is one and first_crashes else transaction.commit()
        taken = {job.id for job in got}
        if not first_crashes:
            self.claimed("one", got, limit, waiting)
        self.claimed("two", other, limit, [job for job in waiting if job.id not in taken])

    # -- what owners do with their rights, whether they still have them or not (T3 to T7) --------------------

    outcomes = st.one_of(
        st.sampled_from([Finished("1"), Finished(None), Cancelled("no"), Failed("error", ERROR)]),
        st.just(Cancelled(NOT_NEEDED)),
        st.builds(Retried, st.sampled_from([0, HOUR, 3 * HOUR]), st.just(ERROR)),
        st.builds(Released, st.sampled_from([None, 0, HOUR, 3 * HOUR])),
        st.builds(partial(Released, closes=True), st.just(HOUR)),
    )

    @precondition(lambda self: self.rights)
    @rule(data=st.data(), crash=st.sampled_from([False, False, False, True]), reply_lost=st.booleans())
    def settle(self, data: st.DataObject, crash: bool, reply_lost: bool) -> None:
        """One or several rights, good and bad, in one batch; after a lost reply the same batch comes
        again."""
        one = st.sampled_from(self.rights)
        rights = st.lists(one, min_size=min(3, len(self.rights)), max_size=8, unique_by=right_of)
        chosen = data.draw(rights)
        batch = []
        for job in chosen:
            outcome: Any = data.draw(self.outcomes)
            if isinstance(outcome, Retried) and job.attempts >= job.max_attempts:
                outcome = Failed("error", ERROR)  # as sqlq.model.retry decides
            batch.append(settlement(job, outcome))
        good = {right_of(job) for job in chosen if self.held(job)}
        with self.transaction(crash) as conn:
            done = settling.settle(conn, batch)
        self.counts["stale_settles_tried"] += len(chosen) - len(good)
        self.counts["stale_settles_accepted"] += len(done - good)
        assert done == good, "exactly the rights that are still good count"
        if crash:
            return
        for job, written in zip(chosen, batch, strict=True):
            if known := self.held(job):
                self.settle_in_model(known, written.outcome)
        if reply_lost:
            with self.transaction() as conn:
                assert settling.settle(conn, batch) == set(), "settled twice"
            with self.database.read() as conn:
                fates = lease.states_of(conn, good)
            assert set(fates.values()) <= {LeaseState.SETTLED}

    @precondition(lambda self: self.rights)
    @rule(data=st.data(), crash=st.booleans())
    def extend(self, data: st.DataObject, crash: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.rights), min_size=1, max_size=4))
        good = {right_of(job) for job in chosen if self.held(job)}
        with self.transaction(crash) as conn:
            renewed = lease.extend(conn, {right_of(job) for job in chosen}, lease_ms=LEASE * HOUR)
        assert set(renewed) == good
        if not crash:
            for id, _ in good:
                self.model[id].expires = self.clock + LEASE

    @precondition(lambda self: self.rights)
    @rule(data=st.data(), cursor=st.integers(1, 3), believed=st.booleans(), crash=st.booleans())
    def save(self, data: st.DataObject, cursor: int, believed: bool, crash: bool) -> None:
        """How far a job has come is saved by its owner alone, and by one that knows how far it was."""
        job = data.draw(st.sampled_from(self.rights))
        known = self.held(job)
        before = known.cursor if believed and known is not None else '"never"'
        with self.transaction(crash) as conn:
            saved = lease.save(conn, right_of(job), before, str(cursor))
        self.counts["stale_settles_tried"] += known is None
        self.counts["stale_settles_accepted"] += known is None and saved is not None
        assert (saved is not None) == (known is not None and believed)
        if known is not None and believed and not crash:
            if known.cursor != str(cursor):
                known.releases, known.losses = 0, min(known.losses, 1)
            known.cursor = str(cursor)

    @precondition(lambda self: self.rights)
    @rule()
    def look(self) -> None:
        """An owner reads the state of each of its leases, once a reply was lost."""
        with self.database.read() as conn:
            fates = lease.states_of(conn, [right_of(job) for job in self.rights])
        for job in self.rights:
            known = self.model.get(job.id)
            if known is None or known.token != job.lease_token:
                expected = LeaseState.LOST
            else:
                expected = LeaseState.HELD if known.owner is not None else LeaseState.SETTLED
            assert fates[right_of(job)] is expected

    # -- rescue (T8, T9) -------------------------------------------------------------------------------------

    @rule(limit=st.sampled_from([1, 500]), crash=st.booleans())
    def rescue(self, limit: int, crash: bool) -> None:
        lost = [job for job in self.model.values() if job.expires is not None and job.expires <= self.clock]
        lost = sorted(lost, key=lambda job: (job.owner, job.id))[:limit]  # as the index has them
        with self.transaction(crash) as conn:
            rescued = settling.rescue(conn, limit=limit)
        seen = [(job.id, job.owner, job.attempts, job.failed) for job in sorted(rescued)]
        expected = ((job.id, job.owner, job.attempts, job.attempts >= job.max_attempts) for job in lost)
        assert seen == sorted(expected)
        if crash:
            return
        for job in lost:
            job.token, job.owner, job.expires = job.token + 1, None, None
            if job.attempts >= job.max_attempts:
                job.place, job.reason = "failed_jobs", "worker_lost"
                self.is_followed(job, "failed")
                continue
            job.losses, job.errors = job.losses + 1, job.errors + 1
            job.in_line = job.limit is not None
            if job.losses > 1:  # a wait of seconds, with jitter: rounded up to the model's hour
                longest = 1_200 * 2 ** (job.losses - 2)
                moment = "due_at" if job.in_line else "available_at"
                assert self.wait_ms(job.id, moment) <= longest
                guard.advance(self.engine, longest - HOUR, f"id = {job.id}", (moment,))
                job.due = self.clock + 1

    def wait_ms(self, id: int, moment: str) -> float:
        ms = {
            "sqlite": f"{moment} - {SQLITE_NOW}",
            "postgresql": f"EXTRACT(EPOCH FROM {moment} - {POSTGRESQL_NOW}) * 1000",
            "mariadb": f"TIMESTAMPDIFF(MICROSECOND, {MARIADB_NOW}, {moment}) / 1000",
        }[self.engine.dialect.name]
        return float(execute(self.engine, f"SELECT {ms} FROM jobs WHERE id = {id}"))

    @rule(hours=st.integers(1, LEASE + 1))
    def time_passes(self, hours: int) -> None:
        guard.advance(self.engine, hours * HOUR)
        earlier = span(self.engine, hours * HOUR / 1000)
        execute(self.engine, f"UPDATE sqlq_limits SET closed_until = closed_until - {earlier}")
        self.clock += hours

    @rule()
    def everybody_falls_silent(self) -> None:
        """For a whole lease; others take over, and whoever wakes up later holds rights that are no good."""
        self.time_passes(LEASE)
        self.rescue(500, crash=False)
        self.claim("two", 3, crash=False)

    # -- the operator (T13, T15) -----------------------------------------------------------------------------

    @precondition(lambda self: self.failed())
    @rule(data=st.data(), crash=st.booleans())
    def retry_failed(self, data: st.DataObject, crash: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.failed()), unique=True, min_size=1))
        with self.transaction(crash) as conn:
            moved, stayed = operate.retry_failed(conn, lookup.Selection(ids=tuple(chosen)))
        assert sorted(moved + stayed) == sorted(chosen)
        taken = {job.key for job in self.live() if job.holds_key()}
        by_key: dict[str, list[int]] = {}
        for id in chosen:
            job = self.model[id]
            wants_key = job.key is not None and job.key_until == "finish"
            if not wants_key:
                assert id in moved
            elif job.key in taken:
                assert id in stayed, "its key is a live job's"
            else:
                by_key.setdefault(str(job.key), []).append(id)
        for rivals in by_key.values():
            assert len(set(rivals) & set(moved)) == 1, "of several jobs with one key one comes back"
        if crash:
            return
        self.moved_back(moved)

    @precondition(lambda self: self.failed())
    @rule(data=st.data())
    def forget_failed(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.failed()))
        with self.transaction() as conn:
            assert [row.id for row in operate.forget(conn, lookup.Selection(ids=(id,)))] == [id]
        del self.model[id]

    # -- beside the model ------------------------------------------------------------------------------------

    @invariant()
    def the_database_says_what_the_model_says(self) -> None:
        self.counts["cases"] += 1
        found = {}
        with self.engine.connect() as conn:
            for table, why in {"jobs": "NULL", "finished_jobs": "outcome", "failed_jobs": "reason"}.items():
                held = "reserved_by, losses" if table == "jobs" else "NULL, 0"
                columns = f"attempts, lease_token, releases, errors, {table}.cursor, payload, {why}, {held}"
                for id, attempts, token, releases, errors, *others in conn.execute(
                    text(f"SELECT id, {columns} FROM {table} WHERE queue = 'q'")
                ):
                    assert id not in found, "a job in two tables"
                    number = sum(map(history.is_error, lookup.records(errors)))
                    found[id] = (table, attempts, token, releases, number, *others)
            rows = conn.execute(text("SELECT id, state FROM job_states WHERE queue = 'q'"))
            states = {row.id: row.state for row in rows}
            payloads = conn.scalars(text("SELECT payload FROM jobs WHERE queue = 'follow'")).all()
        ends = [ended for payload in payloads for ended in json.loads(payload)["args"]]
        followed = Counter((ended["id"], ended["outcome"]) for ended in ends)
        self.counts["follow_ups_lost"] += (self.followed - followed).total()
        self.counts["follow_ups_doubled"] += (followed - self.followed).total()
        assert followed == self.followed, "each ending is followed once"
        assert found == self.expected()
        assert states == {job.id: self.state(job) for job in self.model.values()}


def walk(app: sqlq.App, engine: Engine, examples: int, steps: int, fixed: bool) -> None:
    guard.install(engine)
    number = 20_261_128 if fixed else int(os.environ.get("SQLQ_TEST_SEED") or int.from_bytes(os.urandom(4)))
    print(f"SQLQ_TEST_SEED={number}")
    counts = Counter(dict.fromkeys(FIGURES, 0))
    attributes = {"database": app.database, "engine": engine, "counts": counts}
    here = seed(number)(type("Contract", (Contract,), attributes))
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(here, settings=options)
        guard.check(engine)
    finally:
        record("G2 to G4: every transition beside a model", seed=number, **counts)
    print(f"{counts['cases']} steps, {counts['stale_settles_tried']} settles of lost jobs")
    assert counts["admissions"] >= examples // 3, "too few jobs were admitted for this to prove anything"
    assert counts["stale_settles_tried"] >= examples // 2, "too few rights were lost to prove anything"


def test_random_walks_match_the_model(app: sqlq.App, engine: Engine) -> None:
    # a step takes six times as long on MariaDB; the long walks below are as long there
    walk(app, engine, examples=8 if app.database.dialect.name == "mariadb" else 14, steps=45, fixed=True)


@pytest.mark.slow
def test_long_random_walks_match_the_model(app: sqlq.App, engine: Engine) -> None:
    walk(app, engine, examples=400, steps=60, fixed=False)
