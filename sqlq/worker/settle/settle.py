"""STAGE 4: a thread writes outcomes in batches, on a connection of its own.

While one batch is committed the next one gathers. So settling overlaps with running, and batches grow under
load. A settle is repeated until its result is known. An outage, a lost reply to COMMIT or a locked row may
delay it; only another owner's token ends it otherwise."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.exc import DBAPIError

from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.model.callbacks import settlement
from sqlq.model.history import AttemptTimes
from sqlq.model.outcome import (
    GOES_ON,
    Cancelled,
    Completed,
    ErrorText,
    Failed,
    Outcome,
    Paused,
    Released,
    Retried,
    SelfCompleted,
    Settlement,
)
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.progress import ProgressWriter
from sqlq.worker.gather import Gatherer
from sqlq.worker.outage import SAY_EVERY_SECONDS
from sqlq.worker.report.reporter import NAMES, Reporter
from sqlq.worker.run.lease import Leases
from sqlq.worker.settle.after import AfterSettling, tell_idle

log = logging.getLogger("sqlq.worker")

LOCKED_ROW_SECONDS = 0.02
ROLLED_BACK_OFTEN = 5
"""After so many rollbacks the batch is written in parts, since one of its outcomes may be the cause."""
MOST_NAMED = 20


@dataclass
class Tally:
    """How many attempts ended how, in one run of a worker. Its fields are called as the kinds of outcomes."""

    completed: int = 0
    retried: int = 0
    failed: int = 0
    released: int = 0
    cancelled: int = 0
    lost: int = 0

    def count(self, outcome: Outcome) -> None:
        if type(outcome) is Completed:
            self.completed += 1
            return
        name = type(outcome).__name__.lower()
        setattr(self, name, getattr(self, name) + 1)


Item = tuple[Attempt, Outcome, float]


class Settler(Gatherer[Item]):
    LARGEST_BATCH = 500

    def __init__(
        self,
        database: Database,
        leases: Leases,
        reporter: Reporter,
        progress: ProgressWriter,
        after: AfterSettling,
        *,
        worker: tuple[str, str],
        keep_finished: bool,
    ) -> None:
        """`worker` is its id, and its host and process for people."""
        super().__init__("sqlq-settle", "settling jobs", database)
        self._leases = leases
        self._reporter = reporter
        self._progress = progress
        self._after = after
        self._worker = worker
        self._keep_finished = keep_finished
        self._most_unwritten = database.dialect.most_unwritten
        self._pending: dict[Right, Item] = {}
        self._doubtful = False
        self._refused: str | None = None
        self._rolled_back = 0
        self._said_at = -SAY_EVERY_SECONDS
        self.tally = Tally()

    def settle(self, job: Attempt, outcome: Outcome) -> None:
        """Take an outcome to write; returns at once."""
        self._items.put((job, outcome, job.seconds()))

    def has_room(self) -> bool:
        """Return whether more jobs may end. The jobs of unwritten outcomes run again after a crash, so their
        number is bounded."""
        return self._items.qsize() + len(self._pending) < self._most_unwritten

    def finish(self, patience: Callable[[], float]) -> bool:
        """Write all outcomes and end. Return whether all were written before `patience` returned 0
        seconds."""
        is_done = super().finish(patience)
        if not is_done:
            unwritten = [str(id) for id, _ in list(self._pending)]
            log.error(
                "the outcomes of these jobs could not be written before leaving: %s; their leases run out, "
                "and they run again",
                ", ".join(unwritten[:MOST_NAMED]) + (", …" if len(unwritten) > MOST_NAMED else ""),
                extra={"event": "stopping"},
            )
        return is_done

    # -- the thread ------------------------------------------------------------------------------------------

    def _add(self, items: list[Item]) -> None:
        self._pending |= {item[0].right: item for item in items}

    def _failed(self, error: Exception) -> float:
        self._doubtful = True
        if isinstance(error, DBAPIError) and not self._database.dialect.trouble(error).is_away:
            self._rolled_back += self._database.dialect.trouble(error).rolled_back
            # guard: what-is-rolled-back-for-long-delays-no-other
            if self._rolled_back in (0, ROLLED_BACK_OFTEN):
                self._refused, self._rolled_back = str(error.orig), 0
            return LOCKED_ROW_SECONDS * random.uniform(0.5, 1.5)
        return super()._failed(error)

    def _write(self) -> None:
        """Write the pending outcomes, and take out those that are settled or lost. An outcome whose row is
        locked stays, and delays no other."""
        pending = self._pending
        self._ask_for_completed(pending)
        if self._doubtful:  # the reply to a COMMIT may have been lost: no outcome is settled twice
            self._resolve(pending, set())
            self._doubtful = False
        if self._refused is not None:
            self._write_in_parts(pending, self._refused)
            self._refused = None
        # guard: the-last-word-is-written
        held_up = {
            right: pending.pop(right)
            for right in self._progress.flush([job for job, _, _ in pending.values()])
        }
        try:
            done: set[Right] = set()
            for keep, settlements in self._by_retention(pending.values()):
                done |= self._settle(settlements, keep)
            self._rolled_back = 0  # guard: what-passes-at-last-is-no-refusal
            self._resolve(pending, done)
        finally:
            pending |= held_up
        if pending:
            self._abandoned.wait(LOCKED_ROW_SECONDS)

    def _by_retention(self, items: Iterable[Item]) -> list[tuple[bool, list[Settlement]]]:
        """Return the settlements of jobs whose rows are removed and of those whose rows are kept."""
        dropped: list[Settlement] = []
        kept: list[Settlement] = []
        for item in items:  # called once for each job: a caller may begin to wait for it at any time
            is_kept = item[0].is_kept or self._is_awaited(item[0])
            (kept if is_kept else dropped).append(self._settlement(*item))
        return [(keep, settlements) for keep, settlements in ((False, dropped), (True, kept)) if settlements]

    def _is_awaited(self, job: Attempt) -> bool:
        """Whether the row of a job is kept while a caller waits for its result."""
        # guard: a-result-waits-for-who-waits
        return (
            self._keep_finished and self._after.answers.are_wanted and self._after.answers.waits_for(job.id)
        )

    def _fates(self, wanted: Collection[Right], pending: Mapping[Right, Item]) -> dict[Right, lease.Fate]:
        if not wanted:
            return {}
        dropped = {right for right in wanted if not pending[right][0].is_kept}
        with self._database.read() as conn:
            return lease.fates(conn, wanted, keep_finished=self._keep_finished, dropped=dropped)

    def _settle(self, settlements: list[Settlement], keep: bool) -> set[Right]:
        """Write settlements and return the rights that were still good.

        One transaction writes those that a job follows, or that put a job into a waiting list. The others go
        in statements that commit one by one, since each job is in one of them only."""
        # guard: a-follow-up-goes-with-the-ending
        followed = [s for s in settlements if s.is_one]
        if not followed:
            with self._database.single_statements() as conn:
                return settling.settle(conn, settlements, keep_finished=keep)
        # where there is one writer, two transactions would only cost more
        others = [] if self._database.dialect.one_writer else [s for s in settlements if not s.is_one]
        done = self._settle(others, keep) if others else set()
        with self._database.begin() as conn:
            together = followed if others else settlements
            return done | settling.settle(conn, together, keep_finished=keep)

    def _ask_for_completed(self, pending: dict[Right, Item]) -> None:
        """Look up, for jobs that their handlers completed themselves, whether that committed. If not, the
        attempt has its other outcome."""
        completed = {right: item for right, item in pending.items() if isinstance(item[1], SelfCompleted)}
        if not completed:
            return
        fates = self._fates(completed, pending)
        settled = {right for right, fate in fates.items() if fate is lease.Fate.SETTLED}
        for right, (job, outcome, seconds) in completed.items():
            assert isinstance(outcome, SelfCompleted)
            # guard: complete-is-asked-for
            pending[right] = (job, Completed() if right in settled else outcome.otherwise, seconds)
        self._end(pending, settled, fates)

    def _resolve(self, pending: dict[Right, Item], done: set[Right]) -> None:
        """Take settled and lost jobs out of `pending`."""
        unsure = [right for right in pending if right not in done]
        fates = self._fates(unsure, pending)
        self._end(pending, [right for right in pending if fates.get(right) is not lease.Fate.HELD], fates)

    def _end(
        self, pending: dict[Right, Item], ended: Collection[Right], fates: Mapping[Right, lease.Fate]
    ) -> None:
        over: list[int] = []
        if self._after.answers.are_wanted:
            over = [id for id, token in ended if not isinstance(pending[id, token][1], GOES_ON)]
        followed = False
        steps: list[int] = []
        keys: set[str] = set()
        try:
            for right in ended:
                job, outcome, seconds = pending.pop(right)
                if job.claimed.limit_key is not None:
                    keys.add(job.claimed.limit_key)
                if job.claimed.flow_id is not None and not isinstance(outcome, GOES_ON):
                    steps.append(job.id)  # also one that was lost: the worker that has ended it may be gone
                if isinstance(outcome, Paused):
                    continue  # it was no attempt
                followed = (
                    followed or job.claimed.on_success is not None or job.claimed.on_failure is not None
                )
                # guard: another-worker-hears-of-give-backs
                followed = followed or (isinstance(outcome, Released) and outcome.delay_ms is None)
                if fates.get(right) is lease.Fate.LOST:  # guard: lost-is-not-settled
                    self._lost(job, outcome)
                    continue
                self.tally.count(outcome)
                if isinstance(outcome, (Retried, Released)):
                    self._after.due_again(time.monotonic() + (outcome.delay_ms or 0) / 1000)
                self._reporter.ended(job, outcome, seconds)
        finally:  # guard: what-is-settled-is-let-go
            if steps:
                self._after.unblocker.ended(steps)  # guard: steps-are-unblocked-after-the-settle
            if keys:
                self._after.admissions.ended(keys)  # guard: slots-are-filled-after-the-settle
            self._leases.drop(ended)
            if ended:
                self._after.done()
                self._reporter.told()
            if over:  # last, since it may be done here
                # guard: who-waits-is-answered
                self._after.answers.ended(over, here=self._items.empty())
        if (
            followed
        ):  # else this worker, and idle ones, would find released jobs and follow-ups within a second
            self._after.due_again(time.monotonic())
            tell_idle(self._database)

    def _lost(self, job: Attempt, outcome: Outcome) -> None:
        self.tally.lost += 1
        log.error(
            "job %d: the lease was lost before %s ended; its outcome (%s) does not count",
            *(job.id, job.task, NAMES[type(outcome)]),
            extra=job.fields("lost"),
        )
        self._reporter.lost(job, "the lease was lost before the attempt ended")

    def _write_in_parts(self, pending: dict[Right, Item], why: str) -> None:
        """Write the outcomes in halves, since the database refuses something in the batch. A half that it
        refuses is halved again, down to a single outcome."""
        if time.monotonic() >= self._said_at + SAY_EVERY_SECONDS:  # guard: what-is-locked-is-told-seldom
            self._said_at = time.monotonic()
            log.warning("the database refuses a batch of outcomes (%s); writing it in parts", why)
        parts = [list(pending)]
        while parts:
            part = parts.pop()
            if len(part) == 1:
                self._write_one(pending, part[0])
                continue
            for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                try:
                    self._write_together(pending, {right: pending[right] for right in half})
                except DBAPIError as refusal:
                    if self._database.dialect.trouble(refusal).is_away:
                        raise
                    parts.append(half)

    def _write_together(self, pending: dict[Right, Item], items: dict[Right, Item]) -> None:
        """Write these outcomes in one transaction, and take those that are settled or lost out of
        `pending`."""
        done: set[Right] = set()
        with self._database.begin() as conn:
            for keep, settlements in self._by_retention(items.values()):
                done |= settling.settle(conn, settlements, keep_finished=keep)
        left = dict(items)
        self._resolve(left, done)
        for right in items.keys() - left.keys():
            del pending[right]

    def _write_one(self, pending: dict[Right, Item], right: Right) -> None:
        """Write an outcome that the database refused in a batch. If it refuses it alone, too, write it
        without its texts."""
        job, outcome, seconds = pending[right]
        for version in (outcome, *_plainer(outcome)):
            try:
                self._write_together(pending, {right: (job, version, seconds)})
            except DBAPIError as refusal:
                if (trouble := self._database.dialect.trouble(refusal)).is_away:
                    raise
                if trouble.rolled_back:
                    return  # it is tried again with the others
                log.warning(
                    "job %d: its outcome could not be stored: %s",
                    job.id,
                    refusal.orig,
                    extra=job.fields("unstorable"),
                )
            else:
                return
        # nothing of it can be written; the attempt counts as lost, and another may follow
        del pending[right]
        self._leases.let_go(right)

    def _settlement(self, job: Attempt, outcome: Outcome, seconds: float) -> Settlement:
        """Return the settlement of an attempt that ended with this outcome, after so many seconds."""
        seal = self._database.seal
        if type(outcome) is Completed and job.is_first_claim:  # guard: a-first-attempt-has-no-line
            return settlement(job.claimed, outcome, seal=seal)
        if type(outcome) is Released and job.claimed.late_ms is not None and job.started is not None:
            outcome = replace(outcome, in_time=True)
        if type(outcome) is Retried and outcome.queue is not None and seal is not None:
            log.warning("job %d: it stays in its queue, for which its payload is sealed", job.id)
            outcome = replace(outcome, queue=None)  # guard: what-is-sealed-stays-in-its-queue
        return settlement(job.claimed, outcome, AttemptTimes(*job.times(seconds), *self._worker), seal=seal)


def _plainer(outcome: Outcome) -> Sequence[Outcome]:
    """Return the outcome with ever less in it that a database could refuse."""
    error = ErrorText(
        "sqlq.errors.SqlqError", "the error of this attempt could not be stored; the worker's log has it"
    )
    match outcome:
        case Completed():
            return [Completed(None, "its result could not be stored; null is")]
        case Cancelled():
            return [Cancelled(None)]
        case Failed(reason):
            return [Failed(reason, error)]
        case Retried():
            plain = replace(outcome, error=error)
            return [plain, replace(plain, queue=None)]  # the other queue may hold its key
        case Released() | Paused() | SelfCompleted():
            return [outcome]
