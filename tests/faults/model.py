"""A small reference model of the jobs of one queue, which knows no database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from sqlq.model.checks import Rule
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, Failed, Finished, Outcome, Released, Retried

HOUR = 3_600_000
LEASE = 2  # hours
LIMITS = {"two": Rule(max_running=2), "serial": Rule(max_running=1, in_order=True)}


@dataclass
class Modelled:
    """A job as it should be. `due` and `start_within` are hours by the model's clock."""

    id: int
    place: str
    max_attempts: int
    priority: int
    due: int
    key: str | None
    key_until: str
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

    def holds_key(self) -> bool:
        return (
            self.place == "jobs" and self.key is not None and (self.key_until == "finish" or self.token == 0)
        )


class Model:
    """The jobs, a clock of whole hours, and what everybody believes to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.model: dict[int, Modelled] = {}
        self.rights: list[ClaimedJob] = []
        """Everything anybody ever claimed; whoever claimed it may still believe to hold it."""
        self.followed: Counter[tuple[int, str]] = Counter()
        """How often each job was followed as finished, and as failed."""

    # -- flows -----------------------------------------------------------------------------------------------

    def holds(self, id: int, when: str) -> bool | None:
        """Whether a step before another has ended as that wants; None where that is not decided yet."""
        before = self.model.get(id)
        if before is None or before.reason == "cancelled":
            return when == "ended"
        if before.place == "jobs":
            return None
        if before.place == "failed_jobs":
            return None if when == "success" else True
        return when != "failure"

    def is_live(self, id: int) -> bool:
        before = self.model.get(id)
        return before is not None and before.place == "jobs"

    def unblock_in_model(self) -> tuple[int, int]:
        """Do in the model what an unblock should; return how many steps are free, and cancelled."""
        free = cancelled = 0
        for job in sorted(self.model.values(), key=lambda job: job.id):
            if not job.blocked or any(self.is_live(id) for id, _ in job.waits):
                continue
            verdicts = [self.holds(id, when) for id, when in job.waits]
            if False in verdicts:
                job.blocked, job.place, job.reason = False, "finished_jobs", "cancelled"
                cancelled += 1
            elif None not in verdicts:
                job.blocked, job.due = False, max(job.due, self.clock)
                free += 1
        return free, cancelled

    def skippable(self) -> list[int]:
        return sorted(
            job.id
            for job in self.model.values()
            if job.is_step and (job.place == "failed_jobs" or (job.place == "jobs" and job.owner is None))
        )

    # -- limits ----------------------------------------------------------------------------------------------

    def line(self, key: str) -> list[Modelled]:
        """Return what is in line for a key, in the order of ids."""
        found = [
            job for job in self.model.values() if job.place == "jobs" and job.limit == key and job.in_line
        ]
        return sorted(found, key=lambda job: job.id)

    def holders(self, key: str) -> int:
        here = (job for job in self.model.values() if job.place == "jobs" and job.limit == key)
        return sum(not job.in_line for job in here)

    # -- claims and their ends -------------------------------------------------------------------------------

    def waiting(self) -> list[Modelled]:
        due = [
            job
            for job in self.model.values()
            if job.place == "jobs" and job.owner is None and job.due <= self.clock
            if not (job.blocked or job.in_line)
        ]
        return sorted(due, key=lambda job: -job.priority)

    def claimed(self, owner: str, got: list[ClaimedJob], limit: int, waiting: list[Modelled]) -> None:
        priorities = [self.model[job.id].priority for job in got]
        assert priorities == [job.priority for job in waiting[:limit]], (
            "the most urgent that are due, up to the limit"
        )
        for job in got:
            known = self.model[job.id]
            assert known in waiting, "nobody else holds it, and it is due"
            known.token, known.attempts = known.token + 1, known.attempts + 1
            known.owner, known.expires = owner, self.clock + LEASE
            assert (job.lease_token, job.attempts, job.max_attempts) == (
                known.token,
                known.attempts,
                known.max_attempts,
            )
            self.rights.append(job)

    def held(self, job: ClaimedJob) -> Modelled | None:
        """The job as modelled, if this right to it is still good."""
        known = self.model.get(job.id)
        good = (
            known is not None
            and known.place == "jobs"
            and known.owner is not None
            and known.token == job.lease_token
        )
        return known if good else None

    def is_followed(self, known: Modelled, outcome: str) -> None:
        if known.followed:
            self.followed[known.id, outcome] += 1

    def settle_in_model(self, known: Modelled, outcome: Outcome) -> None:
        known.owner = known.expires = None
        match outcome:
            case Finished():
                known.place, known.reason = "finished_jobs", "finished"
                self.is_followed(known, "finished")
            case Cancelled():
                known.place, known.reason = "finished_jobs", "cancelled"
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

    def moved_back(self, moved: list[int]) -> None:
        """Put failed jobs back, with all their attempts."""
        for id in moved:
            job = self.model[id]
            self.model[id] = replace(
                job,
                place="jobs",
                attempts=0,
                releases=0,
                losses=0,
                due=self.clock,
                errors=job.errors + 1,
                start_by=None,
                reason=None,
                in_line=job.limit is not None,
            )

    # -- what the tables should say --------------------------------------------------------------------------

    def expected(self) -> dict[int, tuple[object, ...]]:
        """Return the expected row of each job."""
        return {
            j.id: (
                j.place,
                j.attempts,
                j.token,
                j.releases,
                j.errors,
                j.cursor,
                j.payload,
                j.reason,
                j.owner,
                j.losses if j.place == "jobs" else 0,
            )
            for j in self.model.values()
        }

    def state(self, job: Modelled) -> str:
        if job.place == "jobs" and (job.blocked or job.in_line):
            return "blocked"
        if job.place == "jobs":
            return (
                "running" if job.owner is not None else "available" if job.due <= self.clock else "scheduled"
            )
        return (
            "failed"
            if job.place == "failed_jobs"
            else "cancelled"
            if job.reason == "cancelled"
            else "finished"
        )
