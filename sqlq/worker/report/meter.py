"""The numbers of workers for `sqlq work --metrics-port`. Each batch that was settled sends them to the
supervisor.

A child sends the numbers since its last message. The pipe delivers each message once, or not at all when the
child dies in the middle of it. So nothing is counted twice, and a child that is killed loses no more than the
batch that it had not sent. The supervisor adds it all up, and `sqlq.metrics` shows it. A worker without
metrics has no `Meter`."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import add
from time import monotonic
from typing import Any, get_args

from sqlq.events import NAMES, JobEvent
from sqlq.model.job import ClaimedJob
from sqlq.model.job_options import FailureReason
from sqlq.model.outcome import Failed, Outcome
from sqlq.worker.attempt.attempt import Attempt

BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
"""The upper bounds of the buckets, in seconds: from a claim's milliseconds to a report's half an hour."""
OTHER = "other"
"""The label of queues after the bound, and of unknown tasks: SQL may insert any number of names."""
QUEUE_NAMES = 100
OUTCOMES = NAMES[2:]
REASONS: tuple[str, ...] = get_args(FailureReason)

ATTEMPTS, FAILED, CLAIMED = "attempts", "failed", "claimed"
RUN, WAIT, SETTLE, CLAIM = "run", "wait", "settle", "claim"

Key = tuple[str, ...]
"""The name of a number, and its labels.

- `attempts`, `run`: task, queue and outcome
- `wait`: task and queue
- `failed`: task, queue and reason
- `claimed`, `settle`: the queue
- `claim`: the result
"""


class Numbers:
    """Counts and times by their keys. Times have a count for each bucket, and last the sum of the seconds.
    Any thread may use its public methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Key] = Counter()
        self._times: dict[Key, list[float]] = {}

    def event(self, event: JobEvent) -> None:
        """Count an attempt whose worker was lost."""
        labels = str(event.task), str(event.queue)
        with self._lock:
            self._count(ATTEMPTS, *labels, event.name)
            if event.name == "failed":
                self._count(FAILED, *labels, event.reason or "error")

    def _count(self, *key: str, by: int = 1) -> None:
        self._counts[self._labelled(key)] += by

    def _time(self, seconds: float, *key: str) -> None:
        times = self._of(key)
        times[bisect_left(BOUNDS, seconds)] += 1
        times[-1] += seconds

    def _of(self, key: Key) -> list[float]:
        return self._times.setdefault(self._labelled(key), [0] * (len(BOUNDS) + 2))

    def _labelled(self, key: Key) -> Key:
        return key


class Meter(Numbers):
    """The new counts of a worker; `flush` sends them."""

    _named: tuple[Any, ...] = ()

    def __init__(self, send: Callable[[dict[str, Any]], object], tasks: Mapping[str, Any]) -> None:
        """`send` takes numbers without waiting, and returns False where it does not take them. The names of
        `tasks` are sent with their queues, so that they count as known, and begin at 0."""
        super().__init__()
        self._send = send
        self._tasks = tasks

    def claimed(self, jobs: Sequence[ClaimedJob], seconds: float) -> None:
        """Count a claim, and the jobs that it found."""
        with self._lock:
            self._time(seconds, CLAIM, "jobs" if jobs else "nothing")
            for queue, number in Counter(str(job.queue) for job in jobs).items():
                self._count(CLAIMED, queue, by=number)

    def ended(self, name: str, job: Attempt, outcome: Outcome | None) -> None:
        """Count an attempt whose outcome is written, or that was lost. Adds the times for which it waited,
        ran, and waited to be written."""
        labels = str(job.task), str(job.queue)
        with self._lock:
            self._count(ATTEMPTS, *labels, name)
            if isinstance(outcome, Failed):
                self._count(FAILED, *labels, outcome.reason)
            if job.started is None:
                return
            self._time(seconds := job.seconds(), RUN, *labels, name)
            since_start = monotonic() - job.started
            # due by the database's clock: wrong by as much as the clocks of the machines differ
            self._time(max(0.0, time.time() - since_start - job.claimed.due_ms / 1000), WAIT, *labels)
            if outcome is not None:
                self._time(max(0.0, since_start - seconds), SETTLE, labels[1])

    def flush(self, send: Callable[[dict[str, Any]], object] | None = None) -> None:
        """Send the new numbers, if the pipe has room for them, else with a later call; or by another way."""
        with self._lock:
            if not (self._counts or self._times):
                return
            tasks = tuple(self._tasks.values())
            new: dict[str, Any] = {
                "counts": [[*key, number] for key, number in self._counts.items()],
                "times": [[*key, times] for key, times in self._times.items()],
            }
            if tasks != self._named:  # guard: new-tasks-are-named
                new["tasks"] = sorted(
                    {(name, task.queue) for task in tasks for name in (task.name, *task.aliases)}
                )
            if (send or self._send)(new) is not False:
                self._named = tasks
                self._counts, self._times = Counter(), {}  # guard: numbers-are-sent-once


class Totals(Numbers):
    """The numbers of all children of a supervisor, those that are gone included, with names that are bounded
    in number."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[str] = set()
        self._queues: set[str] = set()

    def add(self, message: Mapping[str, Any]) -> None:
        """Add the numbers that a `Meter` has sent."""
        with self._lock:
            for task, queue in message.get("tasks", ()):
                self._known.add(task)
                self._count(CLAIMED, queue, by=0)
                # a series that begins at another number has no increase; guard: counters-begin-at-zero
                for kind, labels in ((ATTEMPTS, OUTCOMES), (FAILED, REASONS)):
                    for label in labels:
                        self._count(kind, task, queue, label, by=0)
            for *key, number in message["counts"]:
                self._count(*key, by=number)
            for *key, times in message["times"]:
                known = self._of(tuple(key))
                known[:] = map(add, known, times)

    def now(self) -> tuple[dict[Key, int], dict[Key, tuple[list[float], float]]]:
        """Return the counts so far, and for each time the numbers of its buckets and the sum of seconds."""
        with self._lock:
            return dict(self._counts), {key: (times[:-1], times[-1]) for key, times in self._times.items()}

    def _labelled(self, key: Key) -> Key:
        """Return a key with the names of its task and queue, or with `other` for names beyond the bound."""
        kind, *labels = key
        if kind in (CLAIMED, SETTLE):
            return (kind, self._bounded(labels[0]))
        if kind == CLAIM:
            return key
        task, queue, *rest = labels
        if task not in self._known:
            task = OTHER
        return (kind, task, self._bounded(queue), *rest)

    def _bounded(self, queue: str) -> str:
        """Return the name of a queue that is known, or becomes so while there is room."""
        if queue not in self._queues:
            if len(self._queues) >= QUEUE_NAMES:  # guard: labels-are-bounded
                return OTHER
            self._queues.add(queue)
        return queue
