"""`sqlq work`: a supervisor with children that work, so that no crash of a handler goes unnoticed.

    supervisor ──starts, watches, replaces──► child (a worker) ──► isolates (see there)
        │                                       │
        └── Keeper: heartbeats for its children; gives back at once what one that died has held

It imports neither the App nor a handler, and so cannot be starved or killed by one. What it needs to know of the database a
child tells it. Children are started anew (`python -m sqlq …`), never forked, so that no connection is shared.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from sqlq.errors import SqlqError
from sqlq.job import Settlement
from sqlq.store import cluster, jobs
from sqlq.store.database import LOOPS, Database
from sqlq.store.dialect import Right
from sqlq.worker.blackbox import BlackBox
from sqlq.worker.execute import give_back
from sqlq.worker.lease import heartbeat_seconds
from sqlq.worker.link import Link, Message, spawn

log = logging.getLogger("sqlq.worker")

TICK_SECONDS = 0.2
TOUCH_SECONDS = 1.0
FAILED_STARTS = 5
"""So many children in a row that died before they were ready, and the supervisor gives up."""
LONGEST_PAUSE_SECONDS = 10.0
LAST_SECONDS = 10.0
"""How long beyond the grace time children have to end by themselves."""
WARM = 2
"""Isolates started together with the replacement of a child that died: what it ran runs there next."""
LOCKED_SECONDS = 0.05
SILENT_SECONDS = 30.0
"""A loop that has not turned for so long is no sign of life."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """What the supervisor itself needs to know of the options of `sqlq work`."""

    processes: int
    lease_ms: int
    grace_ms: int
    health_file: Path | None = None


class Child:
    """A worker process as its supervisor sees it."""

    def __init__(self, command: Callable[[int, int], Sequence[str]], heard: Callable[[Child, Message | None], None]) -> None:
        self.box, box_fd = BlackBox.create()
        self.link, there = Link.pair()
        with there:
            self.process: subprocess.Popen[bytes] = spawn(command(there.fileno(), box_fd), (there.fileno(), box_fd))
        os.close(box_fd)
        self.worker: str | None = None
        """Its id in the database, once it is ready."""
        self.leaving = False
        self.replaced = True
        self.ended = False
        """Whether it has said its last word: what became of its attempts."""
        self.closed_since: float | None = None
        self.dead_since: float | None = None
        self._heard = heard
        threading.Thread(target=self._hear, name="sqlq-hear", daemon=True).start()

    def _hear(self) -> None:
        while (message := self.link.receive()) is not None:
            self._heard(self, message)
        self._heard(self, None)

    def end(self) -> int | None:
        """Return the status of a process that has closed its link; None while it is still about to end by itself."""
        moment = time.monotonic()
        self.closed_since = self.closed_since or moment
        try:
            return self.process.wait(TICK_SECONDS)
        except subprocess.TimeoutExpired:
            if moment > self.closed_since + LAST_SECONDS:
                self.process.kill()
            return None

    def close(self) -> None:
        self.link.close()
        self.box.close()


class Supervisor:
    """Keeps a number of children at work. `run` blocks; `stop` and `kill` may be called from any thread."""

    def __init__(self, command: Sequence[str], options: SupervisorOptions) -> None:
        """`command` starts a child, with its ties to be added."""
        self._command = command
        self._options = options
        self._any_ready = False
        self._events: queue.SimpleQueue[tuple[Child | None, Message | None]] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._keeper = Keeper(options.lease_ms)
        self._started = 0
        self._failed_starts = 0
        self._pause_until = 0.0
        self._warm = 0
        self._touch_at = 0.0
        self._code = 0
        self._wanted = options.processes
        self._stop_asked = threading.Event()
        self._stopping_since: float | None = None
        self.tally: Counter[str] = Counter()
        """How many attempts ended how, in children that ended in good order."""

    def stop(self) -> None:
        """Let children finish what runs within the grace time, and end."""
        self._stop_asked.set()
        self._events.put((None, None))

    def kill(self) -> None:
        """Kill the children now; others take over when their leases have run out."""
        for child in list(self._children):
            child.process.kill()

    def run(self) -> int:
        """Work until stopped, or until every child has ended in good order; return the exit code."""
        code: int | None = None
        try:
            while code is None:
                if self._stop_asked.is_set() and self._stopping_since is None:
                    self._begin_to_stop()
                self._fill()
                if not self._children and (self._wanted == 0 or self._stopping_since is not None):
                    break
                code = self._next_event()
                self._tick()
        finally:
            self.kill()
            self._keeper.close()
        return self._code if code is None else code

    # -- children ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start the children that are missing."""
        if self._stopping_since is not None or time.monotonic() < self._pause_until:
            return
        while sum(not child.leaving for child in self._children) < self._wanted:
            generation, warm, self._warm = self._started, self._warm, 0
            self._started += 1

            def command(link: int, box: int, generation: int = generation, warm: int = warm) -> Sequence[str]:
                return [*self._command, "--ties", f"{link},{box},{generation},{warm}"]

            self._children.append(Child(command, lambda child, message: self._events.put((child, message))))

    def _next_event(self) -> int | None:
        """Handle the next event, if one comes soon; return an exit code when all is over."""
        try:
            child, message = self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return None
        if child is None or child not in self._children:
            return None
        if message is None:
            return self._gone(child)
        if "ready" in message:
            self._ready(child, message["ready"])
        elif "leaving" in message:
            child.leaving, child.replaced = True, message["replace"]
            if not child.replaced:
                self._wanted -= 1
            else:
                log.info("worker process %d ends (%s); another takes its place", child.process.pid, message["leaving"])
        elif "ended" in message:
            child.ended = True
            self.tally.update(message["ended"])
        return None

    def _ready(self, child: Child, facts: Message) -> None:
        child.worker = facts["worker"]
        self._any_ready, self._failed_starts = True, 0
        self._keeper.keep(child.worker, child.link, facts["url"], facts["schema"])
        if self._started > self._options.processes:
            log.info("worker process %d is at work", child.process.pid, extra={"event": "started"})

    def _gone(self, child: Child) -> int | None:
        """A child has closed its link: see to it that it ends, and to what it held."""
        status = child.end()
        if status is None:
            return None
        self._children.remove(child)
        started = child.box.read()
        child.close()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        if child.worker is None:
            return self._failed_to_start(how, status)
        self._keeper.keep_no_more(child.worker)
        if child.ended and status in (0, 1):  # with 1 it has said why, and another one would say the same
            if not child.leaving and self._stopping_since is None:
                self._wanted -= 1
            self._code = max(self._code, status)
            return None
        log.error(
            "worker process %d %s; %s its jobs are given back",
            *(child.process.pid, how, "another takes its place, and" if self._stopping_since is None else "now"),
            extra={"event": "worker_lost"},
        )
        self._keeper.bereave(child.worker, started, f"died: its process {how}")
        self._warm = WARM if started is None else min(len(started), WARM)
        if not child.replaced:
            self._wanted += 1
        return None

    def _failed_to_start(self, how: str, status: int) -> int | None:
        if self._stopping_since is not None:
            return None
        if not self._any_ready and status in (1, 2):  # it has said why, and the next one would say the same
            return status
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            log.error("%d worker processes in a row %s before they were ready: giving up", self._failed_starts, how)
            return 1
        pause = min(LONGEST_PAUSE_SECONDS, 0.25 * 2**self._failed_starts)
        log.error("a worker process %s before it was ready; trying again in %.1f s", how, pause, extra={"event": "worker_lost"})
        self._pause_until = time.monotonic() + pause
        return None

    # -- time --------------------------------------------------------------------------------------------------------

    def _begin_to_stop(self) -> None:
        self._stopping_since = time.monotonic()
        for child in self._children:
            child.link.offer(stop=True)

    def _tick(self) -> None:
        moment = time.monotonic()
        for child in self._children:
            child.link.flush()
            if child.closed_since is not None:
                self._events.put((child, None))
            # a process that a handler forked may keep the link open after the child's end
            elif child.process.poll() is not None:
                child.dead_since = child.dead_since or moment
                if moment > child.dead_since + TICK_SECONDS:
                    self._events.put((child, None))
        if self._stopping_since is not None:
            if moment > self._stopping_since + self._options.grace_ms / 1000 + LAST_SECONDS:
                log.error("worker processes did not end in time and are killed; their jobs are given back")
                self.kill()
        elif self._options.health_file is not None and moment >= self._touch_at:
            self._touch_at = moment + TOUCH_SECONDS
            self._touch(self._options.health_file)
        if os.getpid() == 1:
            self._reap()

    def _touch(self, file: Path) -> None:
        """Keep the health file young while every child that is ready turns its loop."""
        moment = time.monotonic()
        if all(moment - child.box.last_pulse() < SILENT_SECONDS for child in self._children if child.worker is not None):
            try:
                file.touch()
            except OSError as error:
                log.debug("the health file cannot be touched: %s", error)

    def _reap(self) -> None:
        """As process 1 of a container, bury the orphans that handlers have left."""
        own = {child.process.pid for child in self._children}
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and found.si_pid not in own:
            os.waitpid(found.si_pid, 0)


class Keeper:
    """Stands in for children in the database: renews what they hold, and gives back what one that died has held.

    In a thread of its own, since a database may be slow to answer. A child that does not hear of its leases renews them
    itself, and what is not given back here is rescued when its lease has run out; so this may fail.
    """

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._every = heartbeat_seconds(lease_ms)
        self._lock = threading.Lock()
        self._kept: dict[str, Link] = {}
        self._bereaved: list[tuple[str, set[Right] | None, str, float]] = []
        self._known: set[str] = set()
        """Workers seen in the database at least once."""
        self._database: Database | None = None
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sqlq-keeper", daemon=True)

    def keep(self, worker: str, link: Link, url: str, schema: str | None) -> None:
        """Renew the leases of this worker from now on, and tell it so over the link."""
        with self._lock:
            if self._database is None:
                self._database = Database.open(make_url(url), schema, use=LOOPS)
                self._thread.start()
            self._kept[worker] = link

    def keep_no_more(self, worker: str) -> None:
        """Renew for this worker no longer."""
        with self._lock:
            self._kept.pop(worker, None)

    def bereave(self, worker: str, started: set[Right] | None, why: str) -> None:
        """Give back what a dead worker held: `started` counts as an attempt that lost its worker, the rest as never begun."""
        with self._lock:
            self._bereaved.append((worker, started, why, time.monotonic() + self._lease_ms / 1000))
        self._changed.set()

    def close(self) -> None:
        """Give back what is still to be given back, and end."""
        self._closing = True
        self._changed.set()
        if self._database is not None:
            self._thread.join(LAST_SECONDS)
            self._database.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.monotonic() + self._every
        wait, failures = self._every, 0
        while not (self._closing and not self._bereaved):
            self._changed.wait(max(0.0, wait))
            self._changed.clear()
            try:
                left = self._give_back()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._every
                    self._beat()
                failures = 0
                wait = LOCKED_SECONDS if left else next_beat - time.monotonic()
            except (DBAPIError, SqlqError) as error:
                if self._closing:
                    return
                # no more than this: the workers meet the same database, and say so
                log.debug("the supervisor cannot use the database: %s", error)
                failures += 1
                wait = min(LONGEST_PAUSE_SECONDS, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)
            except Exception:
                log.exception("standing in for the workers failed; trying again")
                wait = 1.0

    def _beat(self) -> None:
        database = self._database
        assert database is not None
        with self._lock:
            kept = dict(self._kept)
        for worker, link in kept.items():
            sent_at = time.monotonic()
            with database.begin() as conn:
                entered = cluster.seen(conn, worker)
                if entered:
                    self._known.add(worker)
                elif worker not in self._known:
                    # an engine with a creator of its own may lead elsewhere than its URL: the worker has to renew for itself
                    self.keep_no_more(worker)
                    continue
                renewed = jobs.extend_owned(conn, worker, lease_ms=self._lease_ms)
            rights = [[id, token, cancelled] for (id, token), cancelled in renewed.items()]
            link.offer(droppable=True, renewed=rights, sent_at=sent_at, entered=entered)

    def _give_back(self) -> bool:
        """Give back what dead workers held; return whether something is left, because it was locked."""
        with self._lock:
            bereaved = list(self._bereaved)
        left = False
        for entry in bereaved:
            worker, started, why, until = entry
            if self._give_back_of(worker, started, why) or time.monotonic() > until:
                with self._lock:
                    self._bereaved.remove(entry)
            else:
                left = True
        return left

    def _give_back_of(self, worker: str, started: set[Right] | None, why: str) -> bool:
        database = self._database
        assert database is not None
        with database.begin() as conn:
            held = jobs.owned(conn, worker)
            lost = [(job.id, job.lease_token) for job in held if started is None or (job.id, job.lease_token) in started]
            unstarted = [job for job in held if (job.id, job.lease_token) not in set(lost)]
            if unstarted:
                jobs.settle(conn, [Settlement(job.id, job.lease_token, job.attempts, give_back(job)) for job in unstarted])
            taken = jobs.lose(conn, lost, why) if lost else []
            left = cluster.still_holds(conn, worker)
            if not left:
                cluster.leave(conn, worker)
            if held:
                cluster.wake_others(conn)
        for job in taken:
            log.warning(
                "job %d %s (queue %s, attempt %d): worker %s %s; %s",
                *(job.id, job.task, job.queue, job.attempts, job.owner, why),
                "failed, its attempts are spent" if job.failed else "it runs again, in a process of its own",
                extra={"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempts, "event": "rescued"},
            )
        if unstarted:
            log.info("%d jobs that worker %s had not started are given back", len(unstarted), worker)
        return not left
