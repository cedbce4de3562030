"""What a worker gives back: jobs that have not started in time, and at the end those that have not ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlq.outcome import Outcome, SelfCompleted
from sqlq.retry import broken_off, given_back
from sqlq.worker.execute import late
from sqlq.worker.executors import Executors
from sqlq.worker.lease import Leases
from sqlq.worker.running import RunningJob

log = logging.getLogger("sqlq.worker")

UNSTARTED_SECONDS = 1.0
"""A job that has not started after this long is given back: another worker may have a free slot."""
ISOLATED_UNSTARTED_SECONDS = 10.0
"""The same for a job that needs a process of its own, which takes a start of Python."""
CROWDED_SECONDS = 0.25
"""Of more such jobs than there are slots, those are given back that have waited for so long: where processes
that are up take one after the other none does."""
CANCELLED_SECONDS = 1.0


class GivesBack:
    """What one worker gives back, so that it runs again, here or elsewhere; no attempt is counted for it."""

    def __init__(
        self,
        executors: Executors,
        leases: Leases,
        settle: Callable[[RunningJob, Outcome], None],
        *,
        slots: int,
        drain: bool,
    ) -> None:
        self._executors = executors
        self._leases = leases
        self._settle = settle
        self._slots = slots
        self._drain = drain

    def ready(self) -> None:
        """Give back what has not started."""
        for job in (*self._executors.take_back(), *self._executors.take_back_isolated()):
            self._settle(job, given_back(job.claimed))

    def unstarted(self) -> None:
        """Give back what has waited long for a slot."""
        for job in self._executors.take_back(claimed_before=time.monotonic() - UNSTARTED_SECONDS):
            self._settle(job, given_back(job.claimed))

    def forgotten(self, claimed_before: float) -> int:
        """Give back what is held, waits for no slot or process, and does not start; return how many jobs did
        not so far."""
        for job in self._leases.unstarted(claimed_before) or ():
            if job.kill is None and not self._executors.waits(job):
                log.error("job %d: it does not start", job.id, extra=job.fields("not_started"))
                self._executors.give_up(job)
                self._settle(job, given_back(job.claimed))
        return self._executors.unstarted

    def isolated(self) -> None:
        """Give back what has waited long for a process of its own, and more of that than there are slots. A
        worker that drains keeps it: what is due later, it would leave behind."""
        if self._drain:  # guard: drains-keep-what-waits-for-processes
            return
        moment = time.monotonic()
        for job in self._executors.take_back_isolated(
            moment - ISOLATED_UNSTARTED_SECONDS, but=self._slots, more_before=moment - CROWDED_SECONDS
        ):
            self._settle(job, given_back(job.claimed, crowded=True))

    def running(self) -> None:
        """End what the time did not suffice for: coroutines are cancelled, processes killed, threads left
        behind."""
        for job in self._executors.running():
            job.cancel()
        self._executors.wait_idle(CANCELLED_SECONDS)
        killed = [kill for job in self._executors.running() if (kill := job.kill) is not None]
        for kill in killed:
            kill()  # guard: no-process-outlives-its-give-back
        if killed:  # the slot of each waits for its process, and then says how the attempt ended
            self._executors.wait_idle(CANCELLED_SECONDS)
        for job in self._executors.running():
            # the handler may have completed the job, here or in its own process
            otherwise = late(job) or (given_back if job.started is None else broken_off)(job.claimed)
            self._settle(job, SelfCompleted(otherwise))  # guard: give-back-after-grace
