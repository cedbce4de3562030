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
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from sqlq.config.durations import readable
from sqlq.worker.ipc.parent import Facts
from sqlq.worker.ipc.pipe import Message, bury_orphans
from sqlq.worker.maintain.control import PAUSES, RESUMES
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.supervise.child import FAILED_STARTS, LAST_SECONDS, TICK_SECONDS, Child, RestartPolicy, Stage
from sqlq.worker.supervise.heartbeat import Dispatcher, Heartbeat
from sqlq.worker.threads.log import log

SHORTAGE_SECONDS = 1.0
"""How long the supervisor waits where the machine has no process, memory or file for a child."""
SHORTAGES = (OSError, RuntimeError, MemoryError)
"""Python's errors where the machine has no process, file, memory or thread."""
SILENT_SECONDS = 30.0
"""After this time without a sign of life a process is stuck, however busy the machine is."""
MAX_TICK_SECONDS = 1.0
"""The longest time between two looks that counts: after a longer one the supervisor did not run itself."""


def touch(file: Path) -> None:
    """Make a health file, or make it young. Raises `OSError`."""
    # in /tmp others may make a symlink or a pipe; guard: no-health-file-behind-a-symlink
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        os.utime(fd)
    finally:
        os.close(fd)


def notify(state: str) -> None:
    """Send systemd the state of this service, where systemd waits for it."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        name = f"\0{address[1:]}" if address[0] == "@" else address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # guard: no-manager-holds-up-the-supervisor
            sender.sendto(state.encode(), socket.MSG_DONTWAIT, name)


class Watchdog:
    """Watches the signs of life of worker processes, and kills one that is stuck. A stuck process is frozen,
    or in a call that holds the interpreter's lock.

    Such a process keeps no timeout, and its supervisor renews its leases. The time without a sign counts only
    while the supervisor itself runs. So no process looks stuck on a machine that slept, or is busy.
    """

    _incomplete_for = 0.0

    def __init__(self, heartbeat: Heartbeat, options: WorkerOptions) -> None:
        self._heartbeat = heartbeat
        self._start_seconds = options.start_timeout_ms / 1000
        self._stuck_seconds = options.stuck_after_ms / 1000
        self._silent_seconds = min(SILENT_SECONDS, self._stuck_seconds / 2)
        self._last_at = monotonic()

    def look(self, children: Sequence[Child], *, is_whole: bool) -> None:
        """Look at the children; with `is_whole` none of them is missing."""
        now = monotonic()
        # guard: watchdog-skips-its-own-pause
        elapsed = min(now - self._last_at, MAX_TICK_SECONDS)
        self._last_at = now
        self._incomplete_for = 0.0 if is_whole else self._incomplete_for + elapsed
        for child in children:
            sign = child.box.last_sign()
            child.silent = 0.0 if sign != child.sign else child.silent + elapsed
            child.sign = sign
            limit = self._start_seconds if child.worker is None else self._silent_seconds
            if child.is_silent != (child.silent >= limit):
                child.is_silent = not child.is_silent
                self._report(child)
            if child.is_silent and child.stuck is None and self._is_stuck(child, now):
                log.warning("worker process %d is stuck: it is killed", child.process.pid)
                child.process.kill()

    def all_is_well(self, children: Sequence[Child]) -> bool:
        """Whether all children are there, are at work in time, and turn their loops."""
        return self._incomplete_for < self._start_seconds and not any(
            child.is_silent
            or (child.worker is not None and child.box.last_pulse() <= monotonic() - SILENT_SECONDS)
            for child in children  # guard: unready-process-is-unhealthy
        )

    def _report(self, child: Child) -> None:
        if child.worker is not None:
            self._heartbeat.worker_stuck(child.worker, stuck=child.is_silent)
        if not child.is_silent:
            state = "gives signs of life again"
        elif child.worker is None:
            state = "has not begun to work: it imports the App, or enters its lifespan"
        else:
            ids = [id for (id, _), _ in child.box.running() or ()]
            state = f"is stopped, or a call holds Python's interpreter lock; it runs jobs {ids}"
        log.warning(
            "worker process %d, silent for %s, %s", child.process.pid, readable(child.silent * 1000), state
        )

    def _is_stuck(self, child: Child, now: float) -> bool:
        """Whether nothing that a silent child does may take that time. Notes why, and the late jobs."""
        running = child.box.running()
        begins = child.worker is None
        is_late = any(until + self._silent_seconds <= now for _, until in running or ())
        runs_none = running is not None and all(math.isnan(until) for _, until in running)
        is_idle = runs_none and not begins and not child.has_reported
        if not (is_late or is_idle or child.silent >= self._stuck_seconds + begins * self._start_seconds):
            return False
        why = f"gave no sign of life for {readable(child.silent * 1000)}, and its process was killed"
        child.stuck = why, {right for right, until in running or () if until <= now}
        return True


class Supervisor:
    """Keeps a number of children at work. `run` blocks; `stop`, `pause`, `resume` and `kill` may be called
    from any thread."""

    _started = 0
    _stops = False
    """Whether no other child is started."""
    _stopping_since: float | None = None
    """Since when the children are to end."""
    _is_paused = False
    _touch_at = 0.0
    """When the health file is next touched."""
    _touch_failed = False
    _request_time: Any = None
    _failed_request: Any = None
    """The times of the last request to restart, and of the last one that failed."""
    ready_since: float | None = None
    """Since when a child is at work, by the monotonic clock."""
    lost = 0
    """How many children have died that were at work."""
    location: tuple[str, str | None] | None = None
    """URL and schema of the database, once a child has sent them."""

    def __init__(
        self,
        command: Sequence[str],
        options: WorkerOptions,
        setup: Message,
        health_file: Path | None = None,
    ) -> None:
        """`command` starts a child; `setup` has its options."""
        self._command = command
        self._setup = setup
        self.totals = Totals()
        """The numbers of all children."""
        self._options = options
        self._health_file = health_file
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls that other threads leave to the one that runs."""
        self._children: list[Child] = []
        self._heartbeat = Heartbeat(options.lease_ms, self.totals)
        self._watchdog = Watchdog(self._heartbeat, options)
        self._dispatcher = Dispatcher(lambda: list(self._children), self._heartbeat)
        self._began_at = monotonic()
        self._restarts = RestartPolicy(options.processes)
        self._ended: Counter[str] = Counter()
        """How many attempts ended how, in children that are gone."""
        self._handlers: dict[str, Callable[[Child, Any], None]] = {
            "ready": self._ready,
            "leaving": self._leaving,
            "ended": self._has_ended,
            "report": self._report,
            "restart": self._restart,
            "start_error": lambda child, error: setattr(child, "start_error", str(error)),
            "paused": lambda child, paused: self._pause(paused=paused),
        }

    def stop(self) -> None:
        """Let children finish their running jobs within the grace time, and end."""
        self._stops = True
        self._calls.put(self._begin_to_stop)

    def pause(self, *, paused: bool = True) -> None:
        """Have the children claim nothing, those started later included, or claim again. Running jobs go
        on."""
        self._calls.put(partial(self._pause, paused=paused))

    def kill(self) -> None:
        """Kill the children now. While `run` goes on, it gives their jobs back."""
        for child in list(self._children):
            child.process.kill()

    @property
    def counts(self) -> Counter[str]:
        """How many attempts ended how so far. A child that died counts with the attempts it had reported, and
        those that were ended for it."""
        ended = self._ended + self._heartbeat.deaths.counts
        return sum((child.counts for child in list(self._children)), ended)

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

    @property
    def idle_ms(self) -> float:
        """For how long no child has had work."""
        return min((child.idle_ms for child in self._children), default=0.0)  # guard: all-children-are-idle

    def run(self) -> int:
        """Work until stopped, or until every child has ended in good order; return the exit code."""
        try:
            while not self._is_over():
                self._fill()
                with suppress(queue.Empty):
                    self._calls.get(timeout=TICK_SECONDS)()
                self._tick()
        finally:
            self.kill()
            self._dispatcher.close()
            self._heartbeat.close()
        return self._restarts.code

    def _is_over(self) -> bool:
        has_ended = not self._children and (self._stops or self._restarts.closed == self._restarts.number)
        return has_ended or self._restarts.is_hopeless

    def _missing(self) -> int:
        return self._restarts.missing(child.stage for child in self._children)

    def _fill(self) -> None:
        """Start the children that are missing."""
        if self._stops or monotonic() < self._restarts.start_at:
            return
        try:
            for _ in range(self._restarts.to_start([child.stage for child in self._children])):
                setup = {
                    **self._setup,
                    "generation": self._started,
                    "began_at": self._began_at,
                    "paused": self._is_paused,
                }
                self._started += 1
                self._children.append(Child(self._command, self._receive, setup))
        except SHORTAGES as error:  # guard: a-shortage-of-threads-is-waited-out
            log.error("no worker process can be started now: %s", error, event="worker_lost")
            self._restarts.start_at = monotonic() + SHORTAGE_SECONDS

    # -- messages of children --------------------------------------------------------------------------------

    def _receive(self, child: Child, message: Message | None) -> None:
        """Take a message in the thread that receives it."""
        if message is None:
            self._calls.put(partial(self._gone, child))
        elif "more" in message:
            self._dispatcher.more(child)  # at once: others wait for it
        elif "metrics" in message:
            self.totals.add(message["metrics"])  # in this thread: before the event of the child's end
        else:
            self._calls.put(partial(self._follow, child, message))

    def _follow(self, child: Child, message: Message) -> None:
        if child not in self._children:
            return
        try:
            for name in message.keys() & self._handlers:
                self._handlers[name](child, message[name])
        except Exception:  # guard: supervisor-survives-a-bad-message
            log.exception("a message of worker process %d could not be followed", child.process.pid)

    def _ready(self, child: Child, message: Message) -> None:
        facts = Facts(**message)
        child.slots, child.worker = int(facts.options["concurrency"]), facts.worker
        if child.stage is Stage.STARTING:
            child.stage = Stage.WORKING
        self.ready_since = self.ready_since or monotonic()
        self.location = (facts.url, facts.schema)
        self._restarts.ready()
        if self.ready == self._options.processes:
            notify("READY=1")
        self._heartbeat.keep(facts, child.link)
        self._heartbeat.note_start(None)
        if self._missing() < 0:
            # itself, where an operator has stopped the other one meanwhile; guard: the-old-one-leaves-last
            old = next((each for each in self._children if each.stage is Stage.OUTDATED), child)
            old.link.offer(retire="an operator restarts it")
            old.stage = Stage.LEAVING
        if self._options.processes > 1:  # guard: host-has-one-poller
            try:
                self._dispatcher.begin(facts)
            except SHORTAGES as error:  # guard: worker-polls-without-a-host
                log.warning("each worker looks for jobs, and runs its services, itself: %s", error)
        if self._started > self._options.processes:
            log.info("worker process %d is at work", child.process.pid, event="started")

    def _restart(self, child: Child, request_time: Any) -> None:
        """Have another process start, which takes the place of this one when it works. The children pass on
        one request at different times, perhaps when it was given up."""
        if child.stage is Stage.WORKING and request_time != self._failed_request:
            child.stage, self._request_time = Stage.OUTDATED, request_time

    def _leaving(self, child: Child, message: Message) -> None:
        if not message["replace"]:
            child.stage = Stage.RETIRING
            return
        child.stage = Stage.LEAVING
        log.info("worker process %d ends (%s); another takes its place", child.process.pid, message["why"])

    def _has_ended(self, child: Child, counts: dict[str, int]) -> None:
        child.has_reported = True
        child.counts = +Counter(counts)  # raises for values that are no numbers

    def _report(self, child: Child, message: Message) -> None:
        child.counts = +Counter(message["counts"])
        child.running, child.idle_ms = int(message["running"]), message["idle_ms"]
        limit = self._options.max_idle_ms
        # one idle child among several is no reason
        if limit is not None and self.idle_ms >= limit and not self._stops:
            log.info("stopping: nothing has come for %s", readable(limit), event="stopping")
            self._begin_to_stop()

    # -- children that end -----------------------------------------------------------------------------------

    def _gone(self, child: Child) -> None:
        """Handle a child that has left: let it end, and have its jobs released."""
        if child not in self._children or (status := child.end()) is None:
            return
        self._children.remove(child)
        self._ended = self._ended + child.counts  # read by other threads
        started = child.box.read()
        child.close()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        if child.worker is None:
            if not self._stops:
                self._failed_to_start(how, status, child.start_error)
            return
        self._heartbeat.keep_no_more(child.worker)
        if self._restarts.ended(child.stage, status, has_reported=child.has_reported):
            return
        self.lost += 1
        then = "now" if self._stops else "another takes its place, and"
        pid = child.process.pid
        log.error("worker process %d %s; %s its jobs are given back", pid, how, then, event="worker_lost")
        why, late = child.stuck or (f"died: its process {how}", ())
        self._heartbeat.worker_died(child.worker, started, why, late)

    def _failed_to_start(self, how: str, status: int, error: str | None) -> None:
        self._heartbeat.note_start(error or f"a worker process {how} before it was ready")
        if outdated := [child for child in self._children if child.stage is Stage.OUTDATED]:
            for child in outdated:
                child.stage = Stage.WORKING  # guard: a-failed-restart-is-given-up
            self._failed_request = self._request_time
            text = "the restart is given up: a new worker process %s before it was ready; the old ones go on"
            log.error(text, how, event="restart_failed")
            return
        others = any(child.worker is not None for child in self._children)
        wait = self._restarts.failed(status, monotonic(), others=others)
        if not self._restarts.is_hopeless:
            text = "a worker process %s before it was ready; trying again in %.1f s"
            log.error(text, how, wait, event="worker_lost")
        elif (number := self._restarts.failed_starts) >= FAILED_STARTS:
            log.error("%d worker processes in a row %s before they were ready: giving up", number, how)

    # -- all together ----------------------------------------------------------------------------------------

    def _pause(self, *, paused: bool) -> None:
        """Pause all children, or resume them. A request of an operator to one of them by its row counts for
        all."""
        if paused != self._is_paused:
            self._is_paused = paused
            log.info(PAUSES if paused else RESUMES, event="paused" if paused else "resumed")
        for child in list(self._children):
            child.link.offer(paused=paused)

    def _begin_to_stop(self) -> None:
        if self._stopping_since is None:  # at a second message a child leaves at once
            self._stops, self._stopping_since = True, monotonic()
            notify("STOPPING=1")
            for child in list(self._children):
                child.link.offer(stop=None)

    def _tick(self) -> None:
        self._heartbeat.begin()
        self._watchdog.look(self._children, is_whole=self._missing() <= 0)
        for child in list(self._children):
            child.link.flush()
            if child.has_left():
                self._calls.put(partial(self._gone, child))
        now = monotonic()
        if now >= self._touch_at:
            self._touch_at = now + 1.0
            notify("WATCHDOG=1")
            if self._health_file and not self._stopping_since and self._watchdog.all_is_well(self._children):
                self._touch(self._health_file)
        if self._stopping_since and now > self._stopping_since + self._options.grace_ms / 1000 + LAST_SECONDS:
            log.error("worker processes did not end in time and are killed; their jobs are given back")
            self.kill()
        if os.getpid() == 1:
            bury_orphans()

    def _touch(self, file: Path) -> None:
        try:
            touch(file)
            self._touch_failed = False
        except OSError as error:
            if not self._touch_failed:
                log.warning("the health file cannot be touched: %s", error)
            self._touch_failed = True
