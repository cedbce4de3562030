"""The poller finds work for all workers of a host: one thread, on one connection that LISTENs (PostgreSQL).

    NOTIFY ───┐
    due next ─┼─► Poller ──► one worker with room ──► claims; it reports more jobs than it can take
    a second ─┘

A worker in a program of its own, or alone under `sqlq work`, has a poller in its process. Several workers
share that of their supervisor. Each has one of its own besides, which stands by and takes over when the
supervisor's looks cease. While its poller looks, an idle worker does not look itself.

A notification, and the time at which a job is due, reach every host at once, and one host would do. So hosts
back off at random: a few claim at once, however many there are. The others look once more within the second,
sooner rather than later: the first ones may have no room. Nothing depends on it: each host looks about once a
second in any case.
"""

from __future__ import annotations

import logging
import random
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

from sqlalchemy import Connection

from sqlq.config.constants import HEARTBEAT_MS, POLLER_MS, RESCUE_MS
from sqlq.config.durations import readable
from sqlq.database.database import Database
from sqlq.database.dialects import refuse_standby
from sqlq.database.doorbell import Doorbell
from sqlq.database.notifications import Hearing
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify
from sqlq.worker.ipc.parent import NoParent
from sqlq.worker.options import WorkerOptions
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import AWAY, STOP_SECONDS, Loop, Outage

IDLE_POLL_SECONDS = POLLER_MS / 1000
TRUSTED_SECONDS = 3 * IDLE_POLL_SECONDS
"""After this time without a look by the poller its workers look for themselves."""
STAND_BY_SECONDS = 10.0
"""After this time a worker's own poller takes over. The supervisor's waits less long for an answer."""
WINNERS = 3
SOONEST_SECONDS = 0.005
SOON_SECONDS, IDLE_SHARE = 0.1, 0.01
"""Without notifications a host looks this soon after jobs, then after this share of the time since."""
BUSY_SECONDS = 0.25
"""While jobs are due, workers that have a free slot look by themselves."""
RESCUERS = 10
"""How many hosts look for the work of services in each interval, on average."""


def look_seconds(poll_ms: int | None) -> float:
    """Return the time between two looks of an idle host."""
    return IDLE_POLL_SECONDS if poll_ms is None else poll_ms / 1000


class LastLook:
    """When a poller last looked for one worker, by the monotonic clock: its supervisor's, or its own.

    While either looks, the worker does not. While the supervisor's does, the own one stands by, and the
    supervisor runs the services of the host.
    """

    _own_at = -inf

    def __init__(self, supervision: NoParent, poll_ms: int | None = None) -> None:
        self._began_at = monotonic()
        self._supervision = supervision
        self._trusted_seconds = max(TRUSTED_SECONDS, 3 * look_seconds(poll_ms))

    def note(self) -> None:
        """Note a look of the own poller."""
        self._own_at = monotonic()

    def at(self) -> float:
        """Return when a poller last looked."""
        return max(self._own_at, self._supervision.last_poll())

    def is_recent(self) -> bool:
        """Whether a poller looks for jobs, and for work of services."""
        # guard: silent-poller-is-noticed
        return monotonic() - self.at() < self._trusted_seconds

    def supervisor_looks(self) -> bool:
        return monotonic() - self._supervision.last_poll() < self._trusted_seconds

    def stands_by(self) -> bool:
        """Whether the worker's own poller rests: the supervisor's looks, or is about to."""
        since = max(self._supervision.last_poll(), self._began_at)
        # guard: lone-worker-polls-at-once
        return not self._supervision.is_alone and monotonic() - since < STAND_BY_SECONDS


def drawn(hosts: int) -> float:
    """Return a random back-off among a number of hosts, in seconds. Three of them go at once, the others
    within the time between two looks, rather early in it."""
    if random.random() * hosts < WINNERS:  # guard: hosts-back-off-at-random
        return 0.0
    return float(SOONEST_SECONDS * (IDLE_POLL_SECONDS / SOONEST_SECONDS) ** random.random())


def seconds_without_notifications(since_jobs: float, hosts: int) -> float:
    """Return the time between two looks of one among a number of hosts, by the time since there were jobs. It
    is negative while jobs are due."""
    # guard: polls-are-frequent-after-jobs
    seconds = BUSY_SECONDS if since_jobs < 0 else max(SOON_SECONDS, since_jobs * IDLE_SHARE)
    return seconds * hosts


def looks_for_services(hosts: int) -> bool:
    """Decide at random whether one among a number of hosts looks for the work of services, which reads what
    all hosts hold. Without one of ten in a while, the next is due soon."""
    return random.random() * hosts < RESCUERS  # guard: hosts-share-the-maintenance


@dataclass
class Agenda:
    """When a poller looks, and sends a worker to claim; by the monotonic clock."""

    look_at: float
    send_at: float = inf

    def expect(self, due_at: float, back_off: float) -> None:
        """Plan for jobs that may be there from this time on, which all hosts know. This host claims then, or
        looks after its back-off."""
        if back_off == 0.0:
            self.send_at = min(self.send_at, due_at)
        else:
            self.look_at = min(self.look_at, due_at + back_off)

    def plan_next_look(self, began: float, next_at: float) -> None:
        """Plan the look after one that began at this time. It has seen the jobs of earlier notifications."""
        self.look_at = next_at
        if self.send_at > began:  # guard: poll-keeps-later-notifications
            self.send_at = inf


class Poller(Loop):
    """Looks for work for the workers of a host, in a thread of its own.

    A connection can die without a sign. So each look is made on the one that LISTENs, and checks that it
    still does. When the answer does not come, the connection is replaced. With a separate URL for LISTEN,
    whose role may see no table, looks have a connection of their own."""

    _listening: Database | None = None
    _looking: Database | None = None
    _hosts = 1
    _listens = False
    _jobs_at = -inf
    """When there were last jobs, by the monotonic clock."""
    _maintenance_at = -inf
    """When the services, and the number of hosts, were last looked at."""

    def __init__(
        self,
        database: Database,
        options: WorkerOptions,
        send: Callable[[], object],
        *,
        last_look: LastLook,
        on_look: Callable[[workers_look.Look, float], None],
        workers: Callable[[], Sequence[str]],
        quiet: bool = False,
    ) -> None:
        """`send` has a worker of this host claim. `on_look` is called with each look, and the time of its
        answer by the monotonic clock. `workers` returns the workers whose requests are read. With `quiet`
        others report an outage of the database.
        """
        super().__init__("sqlq-poller", Outage("looking for jobs", database, quiet=quiet))
        # also the driver's own errors: notifications are read without SQLAlchemy
        self._away = (*AWAY, database.engine.dialect.loaded_dbapi.Error)
        self._database = database
        self._queues = workers_look.KnownQueues(options.queues)
        self._look_seconds = look_seconds(options.poll_ms)
        self._rescue_seconds = min(RESCUE_MS, options.lease_ms / 4) / 1000
        self._send_one = send
        self._last_look = last_look
        self._on_look = on_look
        self._workers = workers
        self._hearing = Hearing()

    def start(self) -> None:
        self._bell, self._ring = socket.socketpair()
        super().start()

    def wake(self) -> None:
        super().wake()
        self._ring.close()  # which the selector takes for readable

    def close(self, seconds: float = STOP_SECONDS) -> None:
        super().close(seconds)
        self._bell.close()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            for opened in (self._listening, self._looking):
                if opened is not None:
                    opened.close()

    def _turn(self) -> float:
        if self._last_look.stands_by():
            return self._look_seconds
        # made here: the schema to listen for may need a query
        self._listening = listening = self._listening or self._database.for_listening()
        self._looking = looking = self._looking or self._database.for_looking(listening)
        with ExitStack() as open_:
            if not listening.dialect.in_a_file:  # a fork waits for the end of such blocks
                open_.enter_context(listening.answer_timeout)
                open_.enter_context(looking.answer_timeout)
            listening_conn = looking_conn = open_.enter_context(
                listening.connect(isolation_level="AUTOCOMMIT")
            )
            open_.callback(listening_conn.invalidate)  # a listening connection must not return to the pool
            if looking is not listening:
                looking_conn = open_.enter_context(looking.connect(isolation_level="AUTOCOMMIT"))
            self._watch(listening_conn, looking_conn)
        return 0.0

    def _watch(self, listening_conn: Connection, looking_conn: Connection) -> None:
        """Look, and pass on notifications, until stopped. Raises when a connection breaks or does not
        answer."""
        driver: Any = listening_conn.connection.driver_connection
        url = None if self._database.dialect.notifies else self._database.engine.url
        self._listens = listens = self._can_listen(driver)
        if listens:
            self._hearing.begin(driver)
            notify.listen(listening_conn)
        self._agenda = agenda = Agenda(look_at=monotonic())
        with selectors.DefaultSelector() as selector, closing(Doorbell(url)) as doorbell:
            selector.register(self._bell, selectors.EVENT_READ)
            selector.register(doorbell, selectors.EVENT_READ)
            if listens:
                selector.register(driver.fileno(), selectors.EVENT_READ)
            while not (self._closed.is_set() or self._last_look.stands_by()):
                now = monotonic()
                # All unread notifications of a flood would come with the answer.
                # guard: notifications-are-read-before-a-poll
                looks = now >= agenda.look_at and (not listens or self._hearing.is_dry)
                if looks:  # guard: poller-polls
                    receives = self._look(looking_conn).listens
                    if looking_conn is not listening_conn and listens:
                        receives = notify.listens(listening_conn)
                    self._outage.over(wrote=False)
                    if listens and not receives:
                        why = "the URL to listen at leads through a pooler that does not carry LISTEN"
                        self._polls(logging.WARNING, why)
                        selector.unregister(driver.fileno())
                        self._listens = listens = False
                if now >= agenda.send_at:
                    self._send()
                next_at = min(agenda.look_at, agenda.send_at)
                # The selector does not see notifications that came together with an answer.
                # guard: notifications-are-read-after-a-poll
                selector.select(0.0 if looks else max(0.0, next_at - monotonic()))
                # guard: workers-of-this-machine-are-rung
                if doorbell.read() or (listens and self._hearing.read()):
                    self._jobs_at = monotonic()
                    agenda.expect(monotonic(), drawn(self._hosts))

    def _can_listen(self, driver: Any) -> bool:
        """Whether the driver passes on notifications, and the session seems to be this connection's own.

        A pooler gives out a session's number of its own. A URL that is named for LISTEN is trusted to carry
        it.
        """
        if not callable(getattr(driver, "notifies", None)):
            return False  # psycopg2: looking suffices
        from sqlq.database.postgresql.driver import leads_to_one_server

        named = self._database.address is not None and self._database.address.listen_url is not None
        if named or leads_to_one_server(driver):
            return True
        self._polls(logging.INFO, "the connection leads through a pooler, which may not carry LISTEN")
        return False

    def _polls(self, level: int, why: str) -> None:
        log.log(
            level,
            "%s: looking for new jobs each %s; to receive them at once, name a direct connection in "
            "SQLQ_LISTEN_URL",
            why,
            readable(self._look_seconds * 1000),
            event="polling",
        )

    # -- looks and notifications -----------------------------------------------------------------------------

    def _look(self, conn: Connection) -> workers_look.Look:
        now = monotonic()
        is_due = now - self._maintenance_at >= self._rescue_seconds
        look = workers_look.look(
            conn,
            self._database,
            self._queues,
            hosts_within_ms=3 * HEARTBEAT_MS if is_due else None,
            maintenance=is_due and looks_for_services(self._hosts),
            workers=self._workers(),
        )
        # The server counts milliseconds until a job is due from its look, which was no later than this.
        answered = monotonic()
        if is_due:
            self._hosts = max(1, look.hosts or 1)
            # anew each time, so that hosts do not query together
            self._maintenance_at = now + self._rescue_seconds * random.uniform(-0.2, 0.2)
        if look.listens is None:  # once a primary, perhaps: what it shows is not what is there now
            refuse_standby(conn)  # guard: a-demoted-primary-is-left
        self._last_look.note()
        self._on_look(look, answered)
        waits = [ms / 1000 for ms in look.due.values()]
        if any(wait <= 0 for wait in waits):
            self._send()
            self._jobs_at = answered
        seconds = self._look_seconds
        if not self._listens:
            seconds = min(seconds, seconds_without_notifications(now - self._jobs_at, self._hosts))
        self._agenda.plan_next_look(now, now + seconds)
        later = [wait for wait in waits if wait > 0]
        if later:
            # guard: no-worker-is-sent-too-early
            self._agenda.expect(answered + min(later), drawn(self._hosts))
        return look

    def _send(self) -> None:
        self._send_one()
        self._agenda.send_at = inf
