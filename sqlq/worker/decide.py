"""The decisions of a worker's loop, as values. Nothing here does I/O, waits, locks or reads a clock.

    Turn ──┬─► Claim ──► Claimed ──┬─► AWAIT_WORK, REPORT_MORE ──► the next Turn
           ├─► Retire              └─► Claim (a drain's last), Retire
           └─► PAUSE, AWAIT_SETTLING, AwaitRoom ──► the next Turn

The loop of `Worker` reports an event, and does what `decide` returns for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from sqlq.database.batch import Right
from sqlq.worker.options import WorkerOptions, readable_bytes

# -- events --------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """The state of a worker as a turn of its loop begins."""

    running: int = 0
    waiting: int = 0
    """How many jobs wait for a slot or a subprocess."""
    ahead: int = 0
    """How many more jobs start within the time of the option `ahead`, by the measured pace."""
    max_claim: int = 1_000
    """How many jobs a claim may bring."""
    passes: bool = False
    """Whether jobs may be claimed past the waiting ones, which all wait for subprocesses."""
    claimed: int = 0
    """How many jobs it has claimed so far."""
    can_settle: bool = True
    """Whether more outcomes may wait to be written."""
    paused: bool = False
    idle_ms: float = 0.0
    """For how long it has had no work."""
    resident: int = 0
    """The memory of its process, in bytes."""


class Claim(NamedTuple):
    """Claim jobs."""

    limit: int
    is_last: bool = False
    """Whether a drain ends where this claim finds nothing, after the other threads have freed the jobs that
    they are about to free."""


class Claimed(NamedTuple):
    """A claim has been answered."""

    claim: Claim
    number: int
    was_idle: bool = False
    """Whether the worker held no job before the claim, and had none to unblock or admit."""


# -- actions -------------------------------------------------------------------------------------------------


class Retire(NamedTuple):
    """Claim no more, and end when all running jobs have ended, however long that takes."""

    why: str
    replace: bool = True
    """Whether another worker takes its place."""


class AwaitRoom(NamedTuple):
    """Wait until a slot is free and few jobs wait."""

    low_water: int
    """How many jobs may wait then."""


class Act(Enum):
    """An action without values."""

    PAUSE = auto()
    """Release the jobs that have not started, and wait until something happens."""
    AWAIT_SETTLING = auto()
    """Wait shortly: too many outcomes are not written."""
    AWAIT_WORK = auto()
    """Wait until there may be jobs."""
    REPORT_MORE = auto()
    """Report that there are more jobs than the claim brought."""


Event = Turn | Claimed
Action = Claim | Retire | AwaitRoom | Act


def decide(options: WorkerOptions, event: Event) -> Action:
    """Return the next action of the loop."""
    match event:
        case Turn():
            return _begin_turn(options, event)
        case Claimed(claim, 0, was_idle=True) if options.drain:
            if claim.is_last:
                return Retire("nothing is available", replace=False)
            return Claim(claim.limit, is_last=True)  # guard: drain-claims-once-more
        case Claimed(claim, number):
            return Act.REPORT_MORE if number == claim.limit else Act.AWAIT_WORK


def _begin_turn(options: WorkerOptions, turn: Turn) -> Action:
    if options.max_rss is not None and turn.resident > options.max_rss:  # guard: large-processes-are-replaced
        return Retire(
            f"it has {readable_bytes(turn.resident)} in use, more than {readable_bytes(options.max_rss)}"
        )
    if options.max_idle_ms is not None and turn.idle_ms >= options.max_idle_ms:
        return Retire("nothing has come for long", replace=False)
    if turn.paused:  # guard: paused-workers-claim-nothing
        return Act.PAUSE
    if turn.claimed == options.max_jobs and not turn.waiting:
        return Retire("it has had its number of jobs")
    if not turn.can_settle:
        return Act.AWAIT_SETTLING
    limit = claim_size(options, turn)
    return Claim(limit) if limit > 0 else AwaitRoom(turn.waiting // 2)


def claim_size(options: WorkerOptions, turn: Turn) -> int:
    """Return how many jobs to claim: none while more than half of the jobs held ahead still wait.

    A job behind those that wait for subprocesses might start in a free slot at once. A claim past them may be
    in vain, and its jobs are then released. So the worker tries it once in a while. A drain never does: it
    would leave the released jobs behind.
    """
    free = options.concurrency - turn.running
    if free <= 0 and turn.waiting * 2 > turn.ahead:
        return 0
    size = free + turn.ahead - turn.waiting
    if size <= 0 and turn.passes and not options.drain:
        size = free
    if options.max_jobs is not None:
        size = min(size, options.max_jobs - turn.claimed)
    return max(0, min(size, turn.max_claim))


# -- the calls of its parts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signals:
    """The calls by which parts of a worker report. Any thread may make them, and none waits."""

    due_at: Callable[[float], None]
    """A job can be claimed at this time, by the monotonic clock."""
    settled: Callable[[], None]
    """A batch of outcomes has been written, or nothing is left to unblock or to admit."""
    cancel: Callable[[Iterable[Right]], None]
    """An operator cancels these jobs."""
    state_changed: Callable[[], None]
    """The state in the worker's row is to be written, or its requests to be read."""
    pause_ends: Callable[[float | None], None]
    """The next pause of a queue ends in a number of milliseconds."""
    retire: Callable[[Retire], None]
    """The worker claims no more."""


# -- leases --------------------------------------------------------------------------------------------------


def compare_renewal(
    renewed: Collection[Right],
    known: Collection[Right],
    last: Mapping[Right, int],
    claims_started: int,
    claims_ended: int,
) -> tuple[dict[Right, int], set[Right]]:
    """Compare a renewal by the supervisor with the held jobs, and with the jobs that were unknown at the
    `last` one. Return the jobs that the worker does not know, with the number of claims begun when each was
    first seen. Then those of them that no claim under way may still bring: the reply of a claim was lost.

    A claim that began after a job was first seen did not claim it. Two messages alone prove nothing: a
    process that stood still receives them at once, and its claim's reply after them."""
    unknown = {right: last.get(right, claims_started) for right in set(renewed).difference(known)}
    # guard: pending-claim-is-not-lost
    lost = {right for right in unknown.keys() & last.keys() if claims_ended >= unknown[right]}
    return unknown, lost
