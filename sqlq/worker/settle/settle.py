"""STAGE 4: a thread writes outcomes in batches, on a connection of its own.

While one batch is committed the next one gathers. So settling overlaps with running, and batches grow under
load. A settle is repeated until its result is known. An outage, a lost reply to COMMIT or a locked row may
delay it; only another owner's token ends it otherwise."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple
from weakref import ref

from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.database.dialects import refusal
from sqlq.errors import SqlqError
from sqlq.model.history import AttemptTimes
from sqlq.model.outcome import (
    CONTINUES,
    Cancelled,
    ErrorText,
    Failed,
    Finished,
    Outcome,
    Released,
    Retried,
    SelfCompleted,
    Settlement,
    settlement,
)
from sqlq.store.apart import REFUSALS, apart
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.progress import ProgressWriter
from sqlq.worker.decide import Signals
from sqlq.worker.report.reporter import NAMES, Reporter
from sqlq.worker.run.lease import Leases
from sqlq.worker.settle.after import Unblocker, notify_idle
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import LOG_EVERY_SECONDS, OFTEN, Loop, Outage

LARGEST_BATCH = 500
LOCKED_ROW_SECONDS = 0.02
SUSPECT_SECONDS = 60.0
MAX_TRIES = 10
"""How often one outcome is tried alone before it is tried with others again."""
MAX_WITH_LOCALS = 10
MAX_UNWRITTEN, MAX_UNWRITTEN_IN_A_FILE = 2_000, 200
"""The most outcomes that may wait to be written before a worker starts no more jobs. After a crash all of
these run again."""


@dataclass
class Counts:
    """How many attempts ended how, in one run of a worker. Its fields are called as the kinds of outcomes."""

    finished: int = 0
    retried: int = 0
    failed: int = 0
    released: int = 0
    cancelled: int = 0
    lost: int = 0


Item = tuple[Attempt, Outcome]


class Recovery(NamedTuple):
    """How the next batch of outcomes is written, after others were not."""

    failures: int = 0
    """How often a batch was not written in a row, outages apart; from `OFTEN` on it is written in parts."""
    in_doubt: bool = False
    """Whether a reply to a COMMIT may have been lost: no outcome is settled twice."""

    def after(self, *, is_away: bool, passes: bool) -> Recovery:
        """Return how to go on where the database was away, or has not written a batch. A rollback may pass.
        One outcome may be the cause of any other error."""
        if is_away:
            return Recovery(self.failures, in_doubt=True)
        # guard: what-is-rolled-back-for-long-delays-no-other
        return Recovery(self.failures + 1 if passes else OFTEN, in_doubt=True)


class Settler(Loop):
    """Writes outcomes in batches: while one batch is written the next one gathers."""

    _recovery = Recovery()
    _logged_at = -LOG_EVERY_SECONDS

    def __init__(
        self,
        database: Database,
        worker: str,
        leases: Leases,
        reporter: Reporter,
        progress: ProgressWriter,
        unblockers: Sequence[Unblocker],
        signals: Signals,
    ) -> None:
        super().__init__("sqlq-settle", Outage("settling jobs", database))
        self._database = database
        self._leases = leases
        self._reporter = reporter
        self._progress = progress
        self._unblockers = unblockers
        self._signals = signals
        self._worker = worker, f"{socket.gethostname()} pid {os.getpid()}"
        self._max_unwritten = MAX_UNWRITTEN_IN_A_FILE if database.dialect.in_a_file else MAX_UNWRITTEN
        self._items: SimpleQueue[Item | None] = SimpleQueue()
        self._pending: dict[Right, Item] = {}
        self._refused_at: dict[str, float] = {}
        """When the database last refused an outcome of a task."""
        self._with_locals: deque[ref[Attempt]] = deque()
        """The newest failures, whose exceptions have the locals of their frames."""
        self.counts = Counts()

    def settle(self, job: Attempt, outcome: Outcome) -> None:
        """Take an outcome to write; returns at once.

        The exceptions of older unwritten failures lose the locals of their frames, which may be large."""
        if job.error is not None:
            self._with_locals.append(ref(job))
            if len(self._with_locals) > MAX_WITH_LOCALS:
                oldest = self._with_locals.popleft()()
                if oldest is not None:
                    oldest.drop_locals()  # guard: unwritten-failures-keep-no-locals
        job.ended_at = monotonic()
        self._items.put((job, outcome))

    def has_room(self) -> bool:
        """Return whether more jobs may end. The jobs of unwritten outcomes run again after a crash, so their
        number is bounded."""
        return self._items.qsize() + len(self._pending) < self._max_unwritten

    def finish(self, time_left: Callable[[], float]) -> bool:
        """Write all outcomes and end. Return whether all were written before `time_left` returned 0
        seconds."""
        is_done = super().finish(time_left) and not self._pending
        if not is_done:
            unwritten = [id for id, _ in list(self._pending)]
            log.error(
                "the outcomes of %d jobs could not be written before leaving: %s; their leases run out, and "
                "they run again",
                len(unwritten),
                ", ".join(map(str, unwritten[:20])),
                event="stopping",
            )
        return is_done

    # -- the thread ------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Notify the thread that no more outcomes will come."""
        self._items.put(None)

    def _run(self) -> None:
        gathering = True
        while (gathering or self._pending) and not self._closed.is_set():
            gathering = gathering and self._gather()
            if not self._pending:
                continue
            try:
                self._write()
                self._outage.over()
            except Exception as error:
                self._closed.wait(self._failed(error))

    def _gather(self) -> bool:
        """Take the outcomes that have come, waiting for one where none is pending; return False when no more
        will come."""
        pending = self._pending
        for _ in range(LARGEST_BATCH - len(pending)):
            try:
                item = self._items.get(block=not pending)
            except Empty:
                break
            if item is None:
                return False
            pending[item[0].right] = item
        return True

    def _failed(self, error: Exception) -> float:
        problem = self._database.dialect.driver.problem(error)
        is_away = problem.is_away or isinstance(error, SqlqError)
        is_fault = not (is_away or isinstance(error, REFUSALS))
        self._recovery = self._recovery.after(is_away=is_away, passes=problem.rolled_back or is_fault)
        # guard: worker-stops-when-settles-keep-failing
        if is_fault and self._recovery.failures > 2 * OFTEN:
            self._outage.give_up(error)
            self._closed.set()
            self._signals.due_at(monotonic())  # the worker may sleep
        if is_away or is_fault:
            return super()._failed(error)
        return LOCKED_ROW_SECONDS * random.uniform(0.5, 1.5)

    def _write(self) -> None:
        """Write the pending outcomes, and take out those that are settled or lost. An outcome whose row is
        locked stays, and delays no other."""
        pending = self._pending
        self._verify_completed()
        if self._recovery.in_doubt:
            # it finds what is settled, and fails where tables or rights are missing, and no outcome is bad
            self._resolve([*pending], set())  # guard: refused-batch-keeps-its-outcomes
            self._recovery = Recovery(self._recovery.failures)
        if self._recovery.failures >= OFTEN:
            self._write_apart([*pending], among=len(pending))
            self._recovery = Recovery()
        # guard: the-last-word-is-written
        locked = {
            right: pending.pop(right) for right in self._progress.flush([job for job, _ in pending.values()])
        }
        try:
            number, suspects = len(pending), self._suspects()
            self._write_together([right for right in pending if right not in suspects])
            if suspects:
                self._write_apart([*suspects], among=number)
            self._recovery = Recovery()  # guard: what-passes-at-last-is-no-refusal
        finally:
            pending |= locked
        if pending:
            self._closed.wait(LOCKED_ROW_SECONDS)

    def _states_of(
        self, rights: Collection[Right], *, completed: Collection[Right] = ()
    ) -> dict[Right, lease.LeaseState]:
        if not rights:
            return {}
        with self._database.read() as conn:
            return lease.states_of(conn, rights, completed=completed)

    def _settle(self, settlements: list[Settlement]) -> set[Right]:
        """Write settlements and return the rights that were still good.

        One transaction writes them if a job follows one of them, or joins a waiting list. Otherwise each
        statement commits by itself, since each job is in one of them only."""
        # a move joins nothing, so that its plan suits tables of any size
        moves = not any(isinstance(settlement.outcome, CONTINUES) for settlement in settlements)
        database = self._database.for_claims if moves else self._database
        # guard: callback-commits-with-the-settle
        followed = any(settlement.is_one for settlement in settlements)
        with database.begin() if followed else database.single_statements() as conn:
            return settling.settle(conn, settlements)

    def _verify_completed(self) -> None:
        """Look up, for jobs that their handlers completed themselves, whether that committed. If not, the
        attempt has its other outcome."""
        completed = {
            right: (job, outcome.otherwise)
            for right, (job, outcome) in self._pending.items()
            if isinstance(outcome, SelfCompleted)
        }
        states = self._states_of(completed, completed=completed)
        settled = {right for right, state in states.items() if state is lease.LeaseState.SETTLED}
        for right, (job, otherwise) in completed.items():
            # guard: completion-is-verified-by-token
            self._pending[right] = (job, Finished() if right in settled else otherwise)
        self._end(settled, states)

    def _write_together(self, rights: Sequence[Right]) -> None:
        """Write some of the pending outcomes, and take out those that are settled or lost."""
        settlements = [self._settlement(*self._pending[right]) for right in rights]
        self._resolve(rights, self._settle(settlements) if settlements else set())

    def _resolve(self, rights: Sequence[Right], done: set[Right]) -> None:
        """Take settled and lost jobs of `rights` out of the pending ones."""
        states = self._states_of([right for right in rights if right not in done])
        self._end([right for right in rights if states.get(right) is not lease.LeaseState.HELD], states)

    def _end(self, ended: Collection[Right], states: Mapping[Right, lease.LeaseState]) -> None:
        items: list[Item] = []
        try:
            for right in ended:
                job, outcome = item = self._pending.pop(right)
                items.append(item)
                if states.get(right) is lease.LeaseState.LOST:  # guard: lost-lease-is-not-settled
                    self.counts.lost += 1
                    self._reporter.lost(job, "another owner has it")
                else:
                    vars(self.counts)[NAMES[type(outcome)]] += 1
                    if isinstance(outcome, CONTINUES):
                        self._signals.due_at(monotonic() + (outcome.delay_ms or 0) / 1000)
                    self._reporter.ended(job, outcome)
                job.forget()
        finally:  # guard: what-is-settled-is-let-go
            if items:
                self._let_go(items)

    def _let_go(self, items: Sequence[Item]) -> None:
        """Drop the leases of jobs whose outcomes are committed. Have others start that waited for them."""
        leaves_jobs = False
        for job, outcome in items:
            claimed = job.claimed
            # guard: release-wakes-other-workers
            released = isinstance(outcome, Released) and outcome.delay_ms is None
            if released or claimed.on_success is not None or claimed.on_failure is not None:
                leaves_jobs = True
        for unblocker in self._unblockers:
            waited_for, key = unblocker.waited_for, unblocker.key
            if waited_for is None:
                continue
            # also of jobs that were lost: the worker that has ended them may be gone
            keys = {
                job.claimed[key]
                for job, outcome in items
                if job.claimed[waited_for] is not None
                and not (unblocker.until_end and isinstance(outcome, CONTINUES))
            }
            if keys:
                unblocker.ended(keys)  # guard: blocked-jobs-are-freed-after-the-settle
        self._leases.drop([job.right for job, _ in items])
        self._signals.settled()
        self._reporter.flush()
        if leaves_jobs:  # else this worker, and idle ones, would find them within a second
            self._signals.due_at(monotonic())
            notify_idle(self._database)

    def _suspects(self) -> set[Right]:
        """Return the outcomes of tasks of which the database has lately refused one. With them a batch might
        be written in vain."""
        since = monotonic() - SUSPECT_SECONDS
        self._refused_at = {task: at for task, at in self._refused_at.items() if at > since}
        # guard: a-refused-task-slows-no-other
        return {right for right, (job, _) in self._pending.items() if job.claimed.task in self._refused_at}

    def _write_apart(self, rights: Sequence[Right], *, among: int) -> None:
        """Write some outcomes, each apart from those that the database refuses; these without their texts.

        Raises the error where none of these outcomes can be written, by no fault of the database."""
        if monotonic() >= self._logged_at + LOG_EVERY_SECONDS:  # guard: what-is-locked-is-told-seldom
            self._logged_at = monotonic()
            log.warning("the database refuses a batch of outcomes; writing it in parts")
        dialect, lost = self._database.dialect, dict[Right, Exception]()

        def refused(right: Right, error: Exception) -> None:
            job, outcome = self._pending[right]
            self._refused_at[job.task] = monotonic()
            versions = (version for version in _plainer(outcome) if version != outcome)
            for _ in range(MAX_TRIES):
                if not dialect.driver.problem(error).rolled_back:  # else this version may pass
                    job.log_warning("unstorable", "its outcome could not be stored: %s", refusal(error))
                    if (version := next(versions, None)) is None:
                        lost[right] = error
                        return
                    self._pending[right] = (job, version)
                try:
                    self._write_together([right])
                    return
                except Exception as again:
                    if dialect.driver.problem(again).is_away:
                        raise
                    error = again.with_traceback(None)  # it would hold this frame, and all outcomes with it

        apart(rights, self._write_together, refused, dialect, kinds=(Exception,))
        errors = [error for error in lost.values() if not isinstance(error, REFUSALS)]
        if errors and len(errors) == among:
            raise errors[0]  # guard: settle-raises-library-errors
        for right in lost:  # nothing of it can be written; the attempt counts as lost, and another may follow
            self._pending.pop(right)[0].forget()
            self._leases.let_go(right)

    def _settlement(self, job: Attempt, outcome: Outcome) -> Settlement:
        """Return the settlement of an attempt that ended with this outcome."""
        encryption = self._database.encryption
        if type(outcome) is Finished and job.is_first_claim:  # guard: first-attempt-writes-no-history
            return settlement(job.claimed, outcome, encryption=encryption)
        if type(outcome) is Released and job.claimed.late_ms is not None and job.started is not None:
            outcome = replace(outcome, in_time=True)
        if type(outcome) is Retried and outcome.queue is not None and encryption is not None:
            log.warning("job %d: it stays in its queue, for which its payload was signed", job.id)
            outcome = replace(outcome, queue=None)  # guard: what-is-protected-stays-in-its-queue
        return settlement(
            job.claimed, outcome, AttemptTimes(*job.times(), *self._worker), encryption=encryption
        )


def _plainer(outcome: Outcome) -> Sequence[Outcome]:
    """Return the outcome with ever less in it that a database could refuse: at first with escapes for the
    characters that its encoding may lack."""
    match outcome:
        case Finished(result):
            return [
                replace(outcome, result=_escaped(result)),  # guard: what-an-encoding-lacks-is-escaped
                Finished(None, "its result could not be stored; null is"),
            ]
        case Cancelled(reason):
            return [Cancelled(_escaped(reason)), Cancelled(None)]
        case Failed(error=written) | Retried(error=written):
            texts = map(_escaped, (written.exception, written.message, written.traceback))
            text = "the error of this attempt could not be stored; the worker's log has it"
            plain = replace(outcome, error=ErrorText("sqlq.errors.SqlqError", text))
            versions = [replace(outcome, error=ErrorText(*texts)), plain]
            if isinstance(plain, Retried):
                versions.append(replace(plain, queue=None))  # the other queue may hold its key
            return versions
        case Released() | SelfCompleted():
            return []


def _escaped(text: Any) -> Any:
    """Return a text with all that is no ASCII in JSON's escapes, so that JSON stays the same."""
    return text and re.sub(r"[^\0-\x7f]+", lambda match: json.dumps(match[0])[1:-1], text)
