"""`sqlq work`: a supervisor with children that work, so that no crash of a handler goes unnoticed.

    supervisor ──starts, watches, replaces──► child (a worker) ──► subprocesses (see there)
        │                                       │
        └── Heartbeat: heartbeats for its children; releases at once the jobs of one that died

It imports neither the App nor a handler, and so cannot be starved or killed by one. A child sends it the
facts of the database. The fork server (see there) forks children, or
`python -m sqlq …` starts them anew. This process never forks one, so that no connection is shared."""

from __future__ import annotations

import math
import os
import queue
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from sqlq.config.durations import readable
from sqlq.worker.ipc.parent import Facts
from sqlq.worker.ipc.pipe import Message
from sqlq.worker.ipc.process import LAST_SECONDS, TICK_SECONDS, Child, bury_orphans
from sqlq.worker.ipc.shared_memory import Started
from sqlq.worker.log import log
from sqlq.worker.maintain.control import PAUSES, RESUMES
from sqlq.worker.report.meter import Totals
from sqlq.worker.supervise.dispatch import Dispatcher
from sqlq.worker.supervise.health_file import HealthFile
from sqlq.worker.supervise.heartbeat import Heartbeat

FAILED_STARTS = 5
"""The supervisor gives up after so many children in a row that died before they were ready."""
LONGEST_PAUSE_SECONDS = 10.0
WARM = 2
"""How many subprocesses start with the replacement of a child that died: its jobs run there next."""
SHORTAGE_SECONDS = 1.0
"""How long the supervisor waits where the machine has no process, memory or file for a child."""
SHORTAGES = (OSError, RuntimeError, MemoryError)
"""Python's errors where the machine has no process, file, memory or thread."""
SILENT_SECONDS = 30.0
"""After so long without a sign of life a process is stuck, however busy the machine is."""
LONGEST_TICK_SECONDS = 1.0
"""The longest time between two looks that counts: after a longer one the supervisor did not run itself."""
MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The errors of a malformed message."""


class Watchdog:
    """Watches the signs of life of worker processes, and kills one that is stuck. A stuck process is frozen,
    or in a call that holds the interpreter's lock.

    Such a process keeps no timeout, and its supervisor renews its leases. The time without a sign counts only
    while the supervisor itself runs. So no process looks stuck on a machine that slept, or is busy.
    """

    _now = _whole_at = 0.0

    def __init__(self, heartbeat: Heartbeat, options: SupervisorOptions) -> None:
        self._heartbeat = heartbeat
        self._start_seconds, self._stuck_seconds = options.start_ms / 1000, options.stuck_ms / 1000
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


def _counted(said: dict[str, int]) -> Counter[str]:
    return Counter({name: int(number) for name, number in said.items()})


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """The options of `sqlq work` that the supervisor uses itself."""

    processes: int
    lease_ms: int
    grace_ms: int
    health_file: HealthFile | None = None
    max_idle_ms: int | None = None
    """When no child has had work for so long, all stop."""
    start_ms: int = 60_000
    """How long a child may take to be at work."""
    stuck_ms: int = 600_000
    """After this time without a sign of life a child is killed; while it begins, after both. It is killed
    sooner where it runs no handler, or one past its timeout."""


class Supervisor:
    """Keeps a number of children at work. `run` blocks; `stop`, `pause`, `resume` and `kill` may be called
    from any thread."""

    _any_ready = False
    _started = _failed_starts = 0
    _pause_until = 0.0
    _warm = _code = 0
    _stop_asked = False
    _stopping_since: float | None = None
    _is_paused = False
    ready_since: float | None = None
    """Since when a child is at work, by the monotonic clock."""
    lost = 0
    """How many children have died that were at work."""
    place: tuple[str, str | None] | None = None
    """URL and schema of the database, once a child has sent them."""

    def __init__(
        self,
        command: Sequence[str],
        options: SupervisorOptions,
        totals: Totals | None = None,
        setup: Message | None = None,
    ) -> None:
        """`command` starts a child; `setup` has its options; `totals` takes the numbers of all."""
        self._command = command
        self._setup = setup or {}
        self.totals = totals
        self._options = options
        self._events: queue.SimpleQueue[tuple[Child | None, Message | None]] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._heartbeat = Heartbeat(options.lease_ms, totals)
        self._vigil = Watchdog(self._heartbeat, options)
        self._dispatcher = Dispatcher(lambda: list(self._children), self._heartbeat)
        self._began_at = monotonic()
        self._wanted = options.processes
        self._ended: Counter[str] = Counter()
        """How many attempts ended how, in children that are gone."""

    def stop(self) -> None:
        """Let children finish their running jobs within the grace time, and end."""
        self._stop_asked = True
        self._events.put((None, None))

    def pause(self, *, paused: bool = True) -> None:
        """Have the children claim nothing, those started later included, or claim again. Running jobs go
        on."""
        self._events.put((None, {"paused": paused}))

    def kill(self) -> None:
        """Kill the children now. While `run` goes on, it gives their jobs back."""
        for child in list(self._children):
            child.kill()

    @property
    def tally(self) -> Counter[str]:
        """How many attempts ended how so far. A child that died counts with the attempts it had reported, and
        those that were ended for it."""
        return sum((child.tally for child in list(self._children)), self._ended + self._heartbeat.tally)

    @property
    def running(self) -> int:
        """How many jobs ran by the last reports of the children."""
        return sum(child.running for child in list(self._children))

    @property
    def slots(self) -> int:
        """How many jobs the children that are ready run at a time."""
        return sum(child.slots for child in list(self._children))

    @property
    def ready(self) -> int:
        """How many children are at work."""
        return sum(child.worker is not None for child in self._children)

    def run(self) -> int:
        """Work until stopped, or until every child has ended in good order; return the exit code."""
        code: int | None = None
        try:
            while code is None:
                if self._stop_asked and self._stopping_since is None:
                    self._begin_to_stop()
                self._fill()
                if not self._children and (self._wanted == 0 or self._stopping_since is not None):
                    break
                code = self._next_event()
                self._tick()
        finally:
            self.kill()
            self._dispatcher.close()
            self._heartbeat.close()
        return self._code if code is None else code

    @property
    def is_well(self) -> bool:
        """Whether all children are at work, and give signs of life."""
        return self._vigil.all_is_well(self._children)

    @property
    def idle_ms(self) -> float:
        """For how long no child has had work."""
        return min((child.idle_ms for child in self._children), default=0.0)  # guard: all-are-idle

    # -- children --------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start the children that are missing."""
        if self._stopping_since is not None or monotonic() < self._pause_until:
            return
        try:
            while sum(not child.leaving for child in self._children) < self._wanted:
                self._children.append(self._start())
                self._warm = 0
        except SHORTAGES as error:  # guard: a-shortage-of-threads-is-waited-out
            log.error("no worker process can be started now: %s", error, event="worker_lost")
            self._pause_until = monotonic() + SHORTAGE_SECONDS

    def _start(self) -> Child:
        setup = {
            **self._setup,
            "generation": self._started,
            "warm": self._warm,
            "began_at": self._began_at,
            "paused": self._is_paused,
        }
        self._started += 1
        return Child(self._command, self._heard, setup)

    def _heard(self, child: Child, message: Message | None) -> None:
        if message is not None and "more" in message:
            self._dispatcher.more(child)  # at once: others wait for it
        elif message is not None and "metrics" in message:
            if self.totals is not None:
                self.totals.add(message["metrics"])  # in this thread: before the event of the child's end
        else:
            self._events.put((child, message))

    def _next_event(self) -> int | None:
        """Handle the next event, if one comes soon; return an exit code when all is over."""
        try:
            child, message = self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return None
        if message is not None and "paused" in message:
            self._pause(paused=message["paused"])
        elif child is not None and child in self._children:
            if message is None:
                return self._gone(child)
            try:
                self._follow(child, message)
            except MISFITS:  # guard: no-word-ends-a-supervisor
                log.exception("what worker process %d says could not be followed", child.process.pid)
        return None

    def _follow(self, child: Child, message: Message) -> None:
        if "ready" in message:
            self._ready(child, Facts(**message["ready"]))
        elif "leaving" in message:
            child.leaving, child.replaced = True, message["replace"]
            if not child.replaced:
                self._wanted -= 1
            else:
                log.info(
                    "worker process %d ends (%s); another takes its place",
                    child.process.pid,
                    message["leaving"],
                )
        elif "ended" in message:
            child.ended = True
            child.tally = _counted(message["ended"])
        elif "report" in message:
            child.tally = _counted(message["report"]["tally"])
            child.running = int(message["report"]["running"])
            child.idle_ms = float(message["report"]["idle_ms"])
            self._stop_idle()

    def _ready(self, child: Child, facts: Facts) -> None:
        child.slots, child.worker = facts.options["concurrency"], facts.worker
        self.ready_since = self.ready_since or monotonic()
        self.place = (facts.url, facts.schema)
        self._any_ready, self._failed_starts = True, 0
        self._heartbeat.keep(facts, child.link)
        if self._options.processes > 1:  # guard: one-lookout-a-host
            try:
                self._dispatcher.begin(facts)
            except SHORTAGES as error:  # guard: without-a-host-each-looks-itself
                log.warning("each worker looks for jobs, and runs its services, itself: %s", error)
        if self._started > self._options.processes:
            log.info("worker process %d is at work", child.process.pid, event="started")

    def _gone(self, child: Child) -> int | None:
        """Handle a child that has closed its pipe: let it end, and have its jobs released. Return an exit
        code when all is over."""
        status = child.end()
        if status is None:
            return None
        self._children.remove(child)
        self._ended = self._ended + child.tally  # read by other threads
        started = child.box.read()
        child.close()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        if child.worker is None:
            return self._failed_to_start(how, status)
        self._heartbeat.keep_no_more(child.worker)
        if child.ended and status in (0, 1):  # with 1 it has logged why, as another one would
            if not child.leaving and self._stopping_since is None:
                self._wanted -= 1
            self._code = max(self._code, status)
            return None
        self.lost += 1
        log.error(
            "worker process %d %s; %s its jobs are given back",
            *(
                child.process.pid,
                how,
                "another takes its place, and" if self._stopping_since is None else "now",
            ),
            event="worker_lost",
        )
        why, late = child.stuck or (f"died: its process {how}", ())
        self._heartbeat.worker_died(child.worker, started, why, late)
        self._warm = WARM if started is None else min(len(started), WARM)
        if not child.replaced:
            self._wanted += 1
        return None

    def _failed_to_start(self, how: str, status: int) -> int | None:
        if self._stopping_since is not None:
            return None
        if not self._any_ready and status in (1, 2):  # it has logged why, as the next one would
            return status
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            log.error(
                "%d worker processes in a row %s before they were ready: giving up", self._failed_starts, how
            )
            return 1
        pause = min(LONGEST_PAUSE_SECONDS, 0.25 * 2**self._failed_starts)
        log.error(
            "a worker process %s before it was ready; trying again in %.1f s",
            how,
            pause,
            event="worker_lost",
        )
        self._pause_until = monotonic() + pause
        return None

    # -- time ------------------------------------------------------------------------------------------------

    def _pause(self, *, paused: bool) -> None:
        """Pause all children, or resume them. A request of an operator to one of them by its row counts for
        all."""
        if paused != self._is_paused:
            self._is_paused = paused
            log.info(PAUSES if paused else RESUMES, event="paused" if paused else "resumed")
        for child in list(self._children):
            child.link.offer(paused=paused)

    def _stop_idle(self) -> None:
        """Stop when no child has had work for long. One idle child among several is no reason."""
        most = self._options.max_idle_ms
        if most is None or self._stopping_since is not None:
            return
        if self.idle_ms >= most:
            log.info("stopping: nothing has come for %s", readable(most), event="stopping")
            self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._stopping_since = monotonic()
        for child in list(self._children):
            child.link.offer(stop=None)

    def _tick(self) -> None:
        moment = monotonic()
        self._heartbeat.begin()
        self._vigil.look(self._children, wanted=self._wanted)
        for child in list(self._children):
            child.link.flush()
            if child.closed_since is not None:
                self._events.put((child, None))
            # a process that a handler forked may keep the pipe open after the child's end
            elif child.has_ended():
                child.dead_since = child.dead_since or moment
                if moment > child.dead_since + TICK_SECONDS:
                    self._events.put((child, None))
        if self._stopping_since is not None:
            if moment > self._stopping_since + self._options.grace_ms / 1000 + LAST_SECONDS:
                log.error("worker processes did not end in time and are killed; their jobs are given back")
                self.kill()
        elif self._options.health_file is not None:
            self._options.health_file.tick(is_well=self.is_well)
        if os.getpid() == 1:
            bury_orphans()
