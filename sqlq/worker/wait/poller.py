"""Who looks for work for all the workers of a host: one thread, on one connection that LISTENs (PostgreSQL).

    NOTIFY ───┐
    due next ─┼─► Lookout ──► one worker that has room ──► claims; whoever finds more than it can take says so
    a second ─┘

A worker in a program of its own has a lookout in its process, and so has the only one of a `sqlq work`.
Several share that of their supervisor; each has one of its own besides, which stands by and takes over when
the supervisor's looks cease.
A worker whose lookout looks does not look itself while it has nothing to do.

A hint, and a moment at which a job is due, reach every host at once, and one would do. So hosts draw lots: a
few go at once, whatever their number. The others look once more within the second, sooner rather than later:
those that went may have no room. Nothing depends on it: each host looks about once a second in any case.
"""

from __future__ import annotations

import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from sqlalchemy import Connection

from sqlq.config.constants import HEARTBEAT_MS, LOOKOUT_MS, RESCUE_MS
from sqlq.config.durations import readable
from sqlq.database.database import Database
from sqlq.database.notifications import Heard, Hearing
from sqlq.database.postgresql.dialect import leads_to_one_server
from sqlq.store.jobs.results import WAITS
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify
from sqlq.store.workers.workers import Wanted
from sqlq.worker.ipc.parent import Unsupervised
from sqlq.worker.outage import Outage

log = logging.getLogger("sqlq.worker")

LOOKOUT_SECONDS = LOOKOUT_MS / 1000
TRUSTED_SECONDS = 3 * LOOKOUT_SECONDS
"""After so long without a look by the lookout its workers look for themselves."""
STAND_BY_SECONDS = 10.0
"""After so long a worker's own lookout takes over; the supervisor's waits for an answer for less."""
WINNERS = 3
SOONEST_SECONDS = 0.005
HOSTS_SECONDS = EAR_SECONDS = 10.0
"""How often it is asked how many hosts there are, and whether a connection that only LISTENs does."""
HOSTS_WITHIN_MS = 3 * HEARTBEAT_MS
NEVER = float("inf")


class Go(Protocol):
    """Has a worker of this host claim."""

    def __call__(self, *, again: bool) -> float:
        """Have one claim, or if `again` another one where the last did not go; return after how many seconds
        to ask again."""
        ...


def drawn(hosts: int) -> float:
    """Draw lots among so many hosts; return after how many seconds to go: three of them at once, the others
    within the time between two looks, and rather early in it."""
    if random.random() * hosts < WINNERS:  # guard: hosts-draw-lots
        return 0.0
    earliness: float = random.random()
    return float(SOONEST_SECONDS * (LOOKOUT_SECONDS / SOONEST_SECONDS) ** earliness)


class Lookout:
    """Looks for work for the workers of a host, in a thread of its own.

    A connection can die without a sign. So each look is made on the one that LISTENs, and asks whether it
    still does; when the answer does not come, the connection is replaced. Where a URL is named to LISTEN at,
    which may lead to a role that sees no table, looks have a connection of their own.
    """

    def __init__(
        self,
        database: Database,
        queues: Sequence[str] | None,
        go: Go,
        *,
        looked: Callable[[], None] = lambda: None,
        found: Callable[[workers_look.Look], None] = lambda look: None,
        ticks: Callable[[float], None] = lambda moment: None,
        asked: Callable[[Sequence[int] | None], None] = lambda ids: None,
        rescue_ms: float = RESCUE_MS,
        stands_by: Callable[[], bool] = lambda: False,
        quiet: bool = False,
        workers: Callable[[], Sequence[str]] = tuple,
        wanted: Callable[[Wanted], None] = lambda wanted: None,
    ) -> None:
        """`looked` hears of each look that was answered, `found` of each that asked what there is for chores,
        `ticks` when the next schedule is due, by the monotonic clock, `asked` for which jobs somebody waits
        (None: any), `wanted` what operators want of these `workers`. While it `stands_by` it does nothing;
        `quiet` where others speak of a database that is away.
        """
        self._database = database
        self._queues = queues
        self._go = go
        self._looked = looked
        self._found = found
        self._ticks = ticks
        self._asked = asked
        self._rescue_seconds = rescue_ms / 1000
        self._stands_by = stands_by
        self._workers = workers
        self._wanted = wanted
        self._outage = Outage("looking for jobs", database, quiet=quiet)
        self.leases_looked_at = float("-inf")
        """When it was last asked whether leases have run out, and what else there is for chores, by the
        monotonic clock."""
        self._hosts = 1
        self._hosts_at = self._chores_at = float("-inf")
        self._look_at = self._go_at = self._check_at = NEVER
        self._stopping = threading.Event()
        self._hearing = Hearing(WAITS)
        self._thread = threading.Thread(target=self._run, name="sqlq-lookout", daemon=True)

    def start(self) -> None:
        self._bell, self._ring = socket.socketpair()
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End looking; a look that does not come back is waited for so long."""
        self._stopping.set()
        if not self._thread.ident:
            return
        self._ring.close()  # which the selector takes for readable
        self._thread.join(seconds)
        self._bell.close()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        listening: Database | None = None
        looking: Database | None = None
        while not self._stopping.is_set():
            if self._stands_by():
                self._stopping.wait(LOOKOUT_SECONDS)
                continue
            try:
                # made here: which schema to listen for may have to be asked of the database
                listening = listening or self._database.for_listening()
                looking = looking or self._database.for_looking(listening)
                with listening.patience, looking.patience, ExitStack() as open_:
                    ear = open_.enter_context(listening.connect(isolation_level="AUTOCOMMIT"))
                    open_.callback(ear.invalidate)  # a listening connection must not return to the pool
                    eye = (
                        ear
                        if looking is listening
                        else open_.enter_context(looking.connect(isolation_level="AUTOCOMMIT"))
                    )
                    self._look_out(ear, eye)
            # also the driver's own, since SQLAlchemy is not in between when hints are read
            except Exception as error:
                self._stopping.wait(self._outage.met(error))
        for opened in (listening, looking):
            if opened is not None:
                opened.close()

    def _look_out(self, ear: Connection, eye: Connection) -> None:
        """Look, and pass on hints, until stopped; raises when a connection breaks or does not answer."""
        driver: Any = ear.connection.driver_connection
        listens = self._can_listen(driver)
        if listens:
            self._hearing.begin(driver)
            notify.listen(ear)
        self._look_at, self._go_at, self._check_at = time.monotonic(), NEVER, NEVER
        self._listened_at = -NEVER
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            if listens:
                selector.register(driver.fileno(), selectors.EVENT_READ)
            while not (self._stopping.is_set() or self._stands_by()):
                moment = time.monotonic()
                # What a flood has left unread would come with the answer, all of it.
                # guard: a-flood-is-read-before-a-look
                looks = moment >= self._look_at and (not listens or self._hearing.is_dry)
                if looks:  # guard: lookout-looks
                    hears = self._look(eye).listens
                    if eye is not ear and listens:
                        hears = self._still_hears(ear)
                    self._outage.over(wrote=False)
                    if listens and not hears:
                        self._warn_of_deaf_pooler()
                        selector.unregister(driver.fileno())
                        listens = False
                if moment >= self._go_at:
                    self._send()
                if moment >= self._check_at:
                    self._check_at = time.monotonic() + self._go(again=True)
                until = min(self._look_at, self._go_at, self._check_at)
                # The selector does not see what came together with an answer.
                # guard: no-hint-waits-for-a-look
                selector.select(0.0 if looks else max(0.0, until - time.monotonic()))
                if listens:
                    self._heard(self._hearing.read())

    def _still_hears(self, ear: Connection) -> bool:
        """Whether a connection that only LISTENs does so; asked rarely."""
        if time.monotonic() < self._listened_at + EAR_SECONDS:
            return True
        self._listened_at = time.monotonic()
        return notify.listens(ear)

    def _can_listen(self, driver: Any) -> bool:
        """Whether the driver passes on notifications, and the session is this connection's own, as far as can
        be told.

        A pooler gives out a session's number of its own. A URL that is named for it is trusted to carry
        LISTEN.
        """
        if not callable(getattr(driver, "notifies", None)):
            return False  # psycopg2: looking suffices
        named = self._database.address is not None and self._database.address.listen_url is not None
        if named or leads_to_one_server(driver):
            return True
        log.info(
            "the connection leads through a pooler, which may not carry LISTEN: looking for new jobs each "
            "%s; "
            "to be told of them at once, name a direct connection in SQLQ_LISTEN_URL",
            readable(LOOKOUT_SECONDS * 1000),
            extra={"event": "polling"},
        )
        return False

    def _warn_of_deaf_pooler(self) -> None:
        log.warning(
            "the URL to listen at leads through a pooler that does not carry LISTEN: "
            "looking for new jobs each %s; "
            "name a direct connection in SQLQ_LISTEN_URL",
            readable(LOOKOUT_SECONDS * 1000),
            extra={"event": "polling"},
        )

    # -- what happens ----------------------------------------------------------------------------------------

    def _look(self, conn: Connection) -> workers_look.Look:
        moment = time.monotonic()
        asks_hosts = moment - self._hosts_at >= HOSTS_SECONDS
        asks_for_chores = moment - self._chores_at >= self._rescue_seconds
        found = workers_look.look(
            conn,
            self._database,
            self._queues,
            hosts_within_ms=HOSTS_WITHIN_MS if asks_hosts else None,
            chores=asks_for_chores,
            workers=self._workers(),
        )
        # What is due in so many milliseconds is so from when the server looked, which was no later than this.
        answered = time.monotonic()
        self._wanted(found.wanted)
        if asks_hosts:
            self._hosts, self._hosts_at = max(1, found.hosts or 1), moment
        if asks_for_chores:
            # anew each time, so that hosts do not ask together
            self._chores_at = moment + self._rescue_seconds * random.uniform(-0.2, 0.2)
            self.leases_looked_at = moment
            self._found(found)
        if found.tick_ms is not None:
            self._ticks(answered + found.tick_ms / 1000)  # guard: the-lookout-tells-of-ticks
        self._looked()
        waits = [ms / 1000 for ms in found.due.values()]
        if any(wait <= 0 for wait in waits):
            self._send()
        self._look_at = moment + LOOKOUT_SECONDS
        if self._go_at > moment:  # guard: a-look-drops-no-hint
            self._go_at = NEVER
        later = [wait for wait in waits if wait > 0]
        if later:
            self._go_or_look(answered + min(later))  # guard: no-worker-is-sent-too-early
        return found

    def _heard(self, heard: Heard) -> None:
        if heard.ids != []:
            self._asked(heard.ids)
        if heard.hinted:
            self._hinted()

    def _hinted(self) -> None:
        self._go_or_look(time.monotonic())

    def _go_or_look(self, moment: float) -> None:
        """Draw lots who goes at a moment that all hosts know of, and who looks again somewhat later."""
        wait = drawn(self._hosts)
        if wait == 0.0:
            self._go_at = min(self._go_at, moment)
        else:
            self._look_at = min(self._look_at, moment + wait)

    def _send(self) -> None:
        self._go_at = NEVER
        self._check_at = time.monotonic() + self._go(again=False)


class Watched:
    """When somebody looked last for one worker, by the monotonic clock: its own lookout, or its
    supervisor's for all of a host."""

    def __init__(self, supervision: Unsupervised) -> None:
        self._supervision = supervision
        self.looked_at = self._began_at = float("-inf")
        self.lookout: Lookout | None = None
        """The worker's own; None where connections see commits."""

    def begin(self) -> None:
        """Note that the worker begins to work."""
        self._began_at = time.monotonic()

    def has_looked(self) -> None:
        """Note that its own lookout has looked."""
        self.looked_at = time.monotonic()

    def at(self) -> float:
        """Return when anybody has looked for jobs for this worker last."""
        return max(self.looked_at, self._supervision.looked_at())

    def own_leases_at(self) -> float:
        """Return when its own lookout has looked for leases that have run out."""
        return float("-inf") if self.lookout is None else self.lookout.leases_looked_at

    def leases_at(self) -> float:
        """Return when anybody has looked for leases that have run out."""
        return max(self.own_leases_at(), self._supervision.looked_at())

    def supervisor_looks(self) -> bool:
        """Say whether the supervisor's lookout can be relied on."""
        return time.monotonic() - self._supervision.looked_at() < TRUSTED_SECONDS

    def stands_by(self) -> bool:
        """Say whether this worker's own lookout is not needed, or may not be: the supervisor's looks, or is
        about to."""
        since = max(self._supervision.looked_at(), self._began_at)
        # guard: who-is-alone-looks
        return not self._supervision.is_alone and time.monotonic() - since < STAND_BY_SECONDS
