"""STAGE 2: how much to claim, and from which queues; and attempts of the claimed jobs.

A worker never hoards. It holds the jobs in its slots, and those that start within a tenth of a second by the
measured pace. So another worker finds its share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import inf
from time import monotonic
from typing import Any

from sqlq.database.database import Database
from sqlq.database.values import Claimant, ClaimOrder, ClaimRequest, QueuePosition
from sqlq.errors import PayloadKeyError
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Failed, Outcome
from sqlq.model.retry import describe, given_back, put_off_without_key
from sqlq.model.task import Task
from sqlq.payload.encryption import HEAD, NO_KEYS, Encryption
from sqlq.store.flows.flows import Filled, filled, takes_results
from sqlq.store.jobs import lease as leases
from sqlq.store.workers import look
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.lifespan import Lifespan
from sqlq.worker.attempt.progress import ProgressWriter
from sqlq.worker.options import AppParts, WorkerOptions
from sqlq.worker.threads.log import log

MEASURE_SECONDS = 0.01
REST_SECONDS = 0.25
RECENT_JOBS = 50
"""The duration of a job is measured over about this number of the last ones."""
QUEUES_KNOWN_SECONDS = 1.0
DEAR_SECONDS, DEAR_SECONDS_A_JOB = 0.008, 0.000_05
"""A claim takes some milliseconds, most of them to flush it to disk, and up to this time for each job. A
longer one has read many rows in vain."""
SLOW_SECONDS = 1.0
"""After a longer claim, as of rows of many megabytes, the next ones are smaller. Leases run meanwhile, and on
a database with one writer all other writers wait."""
CLAIM_BYTES = 16 * 1024**2
"""After a claim of large payloads the next one brings as many jobs as fit this, by their mean size."""
ANEW_ONCE_IN, MAX_REST_SECONDS = 20, 5.0
POSITIONS_KEPT = 10_000


class Pace:
    """How many jobs a worker ends in a second, measured over the last few tenths of one.

    The slots and the duration of the last jobs bound the pace. So two long jobs that end together do not
    count as a burst of short ones.
    """

    _per_second = 0.0
    _ended, _busy_seconds = 0, 0.0
    _recent, _recent_seconds = 0.0, 0.0
    """How many jobs the bound goes by, and how long they ran together."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._at = monotonic()

    def measure(self, ended: int, busy_seconds: float) -> float:
        """Take the number of jobs ended so far, and how long they ran together; return the pace. Each
        measurement at most doubles or halves it. So neither a pause in the claims nor a burst of short jobs
        sets the pace."""
        now = monotonic()
        elapsed = now - self._at
        if elapsed >= MEASURE_SECONDS:
            seen = (ended - self._ended) / elapsed
            # after a rest the old pace is obsolete, and a claim by it would hold jobs that other workers have
            # slots for
            least = self._per_second / 2 if elapsed < REST_SECONDS else 0.0
            self._per_second = min(max(seen, least), 2 * self._per_second + 1 / MEASURE_SECONDS)
            keeps = RECENT_JOBS / max(RECENT_JOBS, self._recent)
            self._recent = keeps * self._recent + ended - self._ended
            self._recent_seconds = keeps * self._recent_seconds + busy_seconds - self._busy_seconds
            bound = self._slots * self._recent / max(self._recent_seconds, 1e-9)
            self._per_second = min(self._per_second, bound)  # guard: long-jobs-bound-the-pace
            self._ended, self._busy_seconds, self._at = ended, busy_seconds, now
        return self._per_second


class ScanCursor:
    """The last claimed job of each queue and priority, for while a scan from the head is slow.

    An open transaction keeps the server from removing the rows that were claimed since it began. A claim from
    the head of a queue reads all of them again. After two slow ones, claims begin where the last one ended.
    They do so for twenty times as long as the last one took, and at most for `MAX_REST_SECONDS`. The next
    claim from the head finds the jobs before that position, which were committed late or lost their worker,
    and new priorities.
    """

    _valid_until = -inf
    _was_dear = False

    def __init__(self) -> None:
        self._positions: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, claimed: Sequence[ClaimedJob], head_seconds: float = 0.0) -> None:
        """Note the claimed jobs, in the order of the queue, and how long a claim from the head took. After an
        empty claim the next one is from the head."""
        if not claimed:
            self._valid_until = -inf
        elif head_seconds:
            is_dear = head_seconds > DEAR_SECONDS + len(claimed) * DEAR_SECONDS_A_JOB
            # A COMMIT may wait seconds for a standby, once, and no scan was long.
            if is_dear and self._was_dear:  # guard: slow-scan-is-measured-twice
                self._valid_until = monotonic() + min(head_seconds * ANEW_ONCE_IN, MAX_REST_SECONDS)
            self._was_dear = is_dear
        if len(self._positions) > POSITIONS_KEPT:
            self._positions.clear()
        self._positions |= {(job.queue, job.priority): (round(job.due_ms * 1_000), job.id) for job in claimed}

    def positions(self, names: Sequence[str]) -> list[QueuePosition]:
        """Return where to go on in these queues, in the order in which jobs should start. Without any, the
        next claim is one from the head."""
        if monotonic() >= self._valid_until:
            return []
        order = {name: i for i, name in enumerate(names)}
        known = [(*level, *position) for level, position in self._positions.items() if level[0] in order]
        return sorted(known, key=lambda position: (order[position[0]], -position[1]))


class Claimer:
    """Claims for one worker. Without queues in its options it serves every queue there is, in rotation.
    Queues with weights come in a random order by weight."""

    _last_look = -inf
    _short = True
    """Whether the last claim found less than it looked for."""
    next_due = inf
    """When the next job is due, by the monotonic clock, as the last claim's look saw it."""
    _turn = 0

    def __init__(
        self,
        database: Database,
        owner: str,
        options: WorkerOptions,
        tasks: Mapping[str, Task[..., Any]] = {},
        *,
        newest_first: frozenset[str] = frozenset(),
    ) -> None:
        self._options = options
        self._newest_first = newest_first
        self._database = database.for_claims
        self._owner = owner
        self._fixed = None if options.queues is None else list(dict.fromkeys(options.queues))
        self._order: ClaimOrder = "evenly" if options.queues is None else "oldest"
        self._pace = Pace(options.concurrency)
        self._cursor = ScanCursor()
        self._tasks = tasks
        self._known = look.KnownQueues(self._fixed, {task.queue for task in self._tasks.values()})
        self._claimed_from: set[str] = set()
        """The queues of the jobs that were claimed since the last look."""
        self.max_jobs = options.claim_batch
        """How many jobs a claim may bring, by the time and the bytes that the last ones took."""

    def ahead(self, ended: int, busy_seconds: float) -> int:
        """Return how many jobs start within the time of the option `ahead`. The pace goes by the number of
        jobs ended so far, and how long they ran together."""
        return int(self._pace.measure(ended, busy_seconds) * self._options.ahead_ms / 1000)

    def claim(self, limit: int, *, quiet: bool = False) -> list[ClaimedJob]:
        """Claim at most `limit` jobs, in a transaction that is committed when this returns.

        A look for due jobs costs as much as a claim, and would delay jobs that wait for a worker. So a claim
        from the known queues comes before it. The look comes first on SQLite, where a claim takes the write
        lock and a look does not. It also comes first when the database is `quiet`, since nothing is likely to
        be due. A look sets `next_due`, the time of the next job that is due later.
        """
        began, self.next_due = monotonic(), inf
        looks_first = (
            quiet
            or (self._short and self._database.dialect.in_a_file)
            or (self._fixed is None and monotonic() - self._last_look > QUEUES_KNOWN_SECONDS)
        )
        names = self._look() if looks_first else (self._fixed or self._known.with_jobs)
        claimed = self._claim(self._in_turn(names), limit)
        if not claimed and not looks_first:
            due = self._look()
            if self._fixed is None:  # due jobs of the others were locked, or taken meanwhile
                claimed = self._claim([name for name in due if name not in names], limit)
        self._claimed_from |= {job.queue for job in claimed}
        self._short = len(claimed) < limit
        seconds = monotonic() - began
        # guard: slow-claims-get-smaller
        self.max_jobs = (
            max(1, int(len(claimed) / seconds))
            if seconds > SLOW_SECONDS
            else min(2 * self.max_jobs, self._options.claim_batch)
        )
        if payload_bytes := sum([len(job.payload) for job in claimed]):
            # guard: large-claims-get-smaller
            self.max_jobs = max(1, min(self.max_jobs, len(claimed) * CLAIM_BYTES // payload_bytes))
        return claimed

    def _claim(self, names: Sequence[str], limit: int) -> list[ClaimedJob]:
        claimed: list[ClaimedJob] = []
        for newest, group in groupby(names, self._newest_first.__contains__):
            if len(claimed) < limit:
                request = ClaimRequest(list(group), limit - len(claimed), "newest" if newest else self._order)
                # new jobs come in at the head, so the newest are always claimed from there
                claimed += self._run(request) if newest else self._claim_oldest(request)
        return claimed

    def _claim_oldest(self, request: ClaimRequest) -> list[ClaimedJob]:
        dialect, names = self._database.dialect, request.queues
        positions = self._cursor.positions(names)
        has_turns = self._fixed is None or self._options.weights is not None
        # guard: turn-starts-at-its-queue
        if positions and (not has_turns or positions[0][0] == names[0]):
            claimed = self._run(request._replace(positions=positions))
            self._cursor.note(claimed)
            return claimed
        began = monotonic()
        claimed = self._run(request)
        if not dialect.in_a_file:
            parts = len({job.queue for job in claimed}) if dialect.sql.claims_queues_apart else 1
            self._cursor.note(claimed, (monotonic() - began) / max(1, parts))
        return claimed

    def _run(self, request: ClaimRequest) -> list[ClaimedJob]:
        dialect = self._database.dialect
        by = Claimant(self._owner, self._options.lease_ms, self._attempts())
        return self._database.run_raw(lambda execute: leases.claim(execute, dialect, request, by))

    def _attempts(self) -> str:
        """The attempts of each task, for rows without a number of them."""
        attempts = {
            name: task.max_attempts for task in self._tasks.values() for name in (task.name, *task.aliases)
        }
        return json.dumps(attempts, ensure_ascii=False)

    def _in_turn(self, names: Sequence[str]) -> list[str]:
        """Return the queues in the order of this claim. Queues without a given order take turns, so that a
        busy one starves no other."""
        if (weights := self._options.weights) is not None:
            return sorted(names, key=lambda name: random.random() ** (1 / weights[name]), reverse=True)
        if not names or self._fixed is not None:
            return list(names)
        ordered = sorted(names, key=repr)  # SQLite lets in bytes, too
        self._turn += 1
        first = self._turn % len(ordered)
        return ordered[first:] + ordered[:first]

    def _look(self) -> list[str]:
        """Return those of the served queues that have due jobs, and note when the next job will be due."""
        self._last_look = monotonic()
        due = look.due_in(self._database, self._known, self._claimed_from)
        self._claimed_from.clear()
        later = [ms for ms in due.values() if ms > 0]
        self.next_due = monotonic() + min(later) / 1000 if later else inf
        return [name for name in self._fixed or due if due.get(name, 1) <= 0]


@dataclass(eq=False)
class Intake:
    """Makes attempts of the jobs that one worker has claimed."""

    _worker: str
    _all_isolated: bool
    _has_isolates: bool
    _app: AppParts
    _progress: ProgressWriter
    _lifespan: Lifespan

    @cached_property
    def target(self) -> Target:
        """The place where a handler completes its job; known once the worker has its row in the database."""
        app, database = self._app, self._app.database.for_loops
        return Target(lambda: app.database, database.encryption, database.schema, app.tasks, app.plan)

    def readable(self, claimed: list[ClaimedJob]) -> Filled:
        """Return claimed jobs with decrypted payloads, and with the results of other steps in their
        arguments. Return the others with their outcomes."""
        database = self._app.database.for_loops
        unready: list[tuple[ClaimedJob, Outcome]] = []
        if database.encryption is not None or [job for job in claimed if str(job.payload).startswith(HEAD)]:
            claimed, unready = opened_by(database.encryption, claimed)
        if [job for job in claimed if job.flow_id is not None]:
            try:
                claimed, failed = filled(database, claimed)
            except Exception as error:  # without them no step may start, and the other jobs may
                log.warning(
                    "the results of earlier steps could not be read (%s); their jobs are given back", error
                )
                failed = [(job, given_back(job)) for job in claimed if takes_results(job)]
                claimed = [job for job in claimed if not takes_results(job)]
            unready = [*unready, *failed]
        return Filled(claimed, unready)

    def running(self, job: ClaimedJob, trusted_until: float) -> Attempt:
        """Return a claimed job as its handler sees it, with its task and how it is to run."""
        task = self._app.tasks.by_name.get(job.task)
        if task is not None and (task.on_success is not None or task.on_failure is not None):
            # guard: a-row-without-follow-ups-has-its-tasks
            job = job._replace(
                on_success=task.on_success if job.on_success is None else job.on_success,
                on_failure=task.on_failure if job.on_failure is None else job.on_failure,
            )
        # guard: lost-jobs-run-isolated
        isolates = task is not None and bool(self._all_isolated or task.isolate or job.losses > 0)
        running = Attempt(job, task, trusted_until, self.target, isolated=isolates and self._has_isolates)
        running.worker = self._worker
        running.alone = task is not None and task.isolate == "fresh"
        running.lifespan = self._lifespan.value
        running.on_progress = self._progress.note
        if task is not None and task.retention_ms is not None:
            self._progress.in_use = True
        return running


def opened_by(encryption: Encryption | None, claimed: Iterable[ClaimedJob]) -> Filled:
    """Return claimed jobs with their payloads decrypted. Return the others with their outcomes: failed, or
    released for a worker with the key. Their rows keep the text, and no job behind them waits."""
    done = Filled([], [])
    for job in claimed:
        try:
            plain = (encryption or NO_KEYS).opened("payload", job.task, job.queue, job.payload)
        except PayloadKeyError as error:
            bad = Failed("bad_signature", describe(error))  # guard: a-bad-signature-fails
            done.unready.append((job, put_off_without_key(job, error) if error.lacks_key else bad))
        else:
            done.ready.append(job._replace(payload=plain))
    return done
