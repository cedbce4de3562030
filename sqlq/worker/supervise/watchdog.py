"""Watches the signs of life of worker processes, and kills one that is stuck. A stuck process is frozen, or
in a call that holds the interpreter's lock.

Such a process keeps no timeout, and its supervisor renews its leases. The time without a sign counts only
while the supervisor itself runs. So no process looks stuck on a machine that slept, or is busy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from sqlq.config.durations import readable
from sqlq.worker.ipc.shared_memory import Started
from sqlq.worker.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from sqlq.worker.ipc.process import Child

log = logging.getLogger("sqlq.worker")

SILENT_SECONDS = 30.0
"""After so long without a sign of life a process is stuck, however busy the machine is."""
LONGEST_TICK_SECONDS = 1.0
"""The longest time between two looks that counts: after a longer one the supervisor did not run itself."""


class Watchdog:
    """Watches the children of one supervisor."""

    _now = _whole_at = 0.0

    def __init__(self, heartbeat: Heartbeat, *, start_ms: int, stuck_ms: int) -> None:
        """A child may take `start_ms` to be at work. Without a sign of life it is killed after `stuck_ms`, or
        after both while it begins. It is killed sooner where it runs no handler, or one past its
        timeout."""
        self._heartbeat = heartbeat
        self._start_seconds, self._stuck_seconds = start_ms / 1000, stuck_ms / 1000
        self._silent_seconds = min(SILENT_SECONDS, self._stuck_seconds / 2)
        self._looked_at = monotonic()

    def look(self, children: Sequence[Child], *, wanted: int) -> None:
        """Look at the children; `wanted` of them should be there."""
        moment = monotonic()
        # guard: who-did-not-run-heard-nothing
        self._now += min(moment - self._looked_at, LONGEST_TICK_SECONDS)
        self._looked_at = moment
        if sum(not child.leaving for child in children) >= wanted:
            self._whole_at = self._now
        for child in children:
            sign = child.box.last_sign()
            if child.sign_at is None or sign != child.sign:
                child.sign, child.sign_at = sign, self._now
            silent = self._now - child.sign_at
            is_silent = silent >= (self._start_seconds if child.worker is None else self._silent_seconds)
            if is_silent != child.is_silent:
                child.is_silent = is_silent
                self._tell(child, silent)
            if is_silent and child.stuck is None:
                self._judge(child, silent)

    def all_is_well(self, children: Sequence[Child]) -> bool:
        """Whether all children are there, are at work in time, and turn their loops."""
        turned_since = monotonic() - SILENT_SECONDS
        return self._now - self._whole_at < self._start_seconds and not any(
            child.is_silent or (child.worker is not None and child.box.last_pulse() <= turned_since)
            for child in children  # guard: who-never-begins-is-not-well
        )

    def _tell(self, child: Child, silent: float) -> None:
        running = child.box.running()
        if child.worker is not None:
            self._heartbeat.worker_stuck(child.worker, stuck=child.is_silent)
        if not child.is_silent:
            said = "gives signs of life again"
        elif child.worker is None:
            said = (
                "has not begun to work: it imports the App, or enters its lifespan; its health file grows old"
            )
        else:
            said = "gives no sign of life: it is stopped, or a call holds Python's interpreter lock; it runs "
            said += "many jobs" if running is None else ", ".join(map(_named, running)) or "nothing"
        log.warning("worker process %d, silent for %s, %s", child.process.pid, readable(silent * 1000), said)

    def _judge(self, child: Child, silent: float) -> None:
        """Kill a silent child when nothing it does may take so long."""
        moment, running = monotonic(), child.box.running()
        is_late = any(until + self._silent_seconds <= moment for _, until, _ in running or ())
        begins = child.worker is None
        runs_none = running is not None and all(math.isnan(until) for _, until, _ in running)
        is_idle = runs_none and not begins and not child.ended
        if is_late or is_idle or silent >= self._stuck_seconds + begins * self._start_seconds:
            why = f"gave no sign of life for {readable(silent * 1000)}, and its process was killed"
            child.stuck = why, {right for right, until, _ in running or () if until <= moment}
            log.warning("worker process %d is stuck: it is killed", child.process.pid)
            child.process.kill()


def _named(job: Started) -> str:
    (id, _), until, task = job
    return f"job {id} ({task}{', past its timeout' if until <= monotonic() else ''})"
