"""A supervisor polls, and runs the maintenance, for all its workers together.

It does so for several workers on PostgreSQL, where each look and service of each worker would be a statement.
A worker reads the time of the last look in shared memory. If that is long ago it polls, and runs its
services, itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from sqlq.store.workers.look import Look
from sqlq.store.workers.pauses import ALL
from sqlq.store.workers.workers import Wanted
from sqlq.worker.ipc.parent import Facts, NoParent
from sqlq.worker.maintain.maintenance import Maintenance
from sqlq.worker.options import WorkerOptions
from sqlq.worker.supervise.child import Child
from sqlq.worker.supervise.heartbeat import Heartbeat
from sqlq.worker.supervise.places import Stage
from sqlq.worker.wait.poller import LastLook, Poller

HELPERS = 2
"""This number of workers follows one that does not go, or found more than it could take. A few turns bring
all."""
LAST_SECONDS = 1.0


def by_turn(children: Iterable[Child]) -> list[Child]:
    """Return the workers with a free slot, that with the fewest jobs first. Among equals a worker that does
    not rest comes first, then the one that was sent last: its caches are warm."""
    free = (child for child in children if child.box.started_now() < child.slots)
    return sorted(free, key=lambda child: (child.box.started_now(), child.rests(), -child.sent_at))


class Dispatcher:
    """Sends workers to claim, the idle ones first, and runs the services of their host."""

    _has_begun = False
    _poller: Poller | None = None
    _sent: Child | None = None
    _all_paused = False

    def __init__(self, children: Callable[[], Sequence[Child]], heartbeat: Heartbeat) -> None:
        self._children = children
        self._heartbeat = heartbeat
        self._lock = threading.RLock()

    def begin(self, facts: Facts) -> None:
        """Begin for the database of the first worker that is ready; later calls do nothing."""
        database = self._heartbeat.database
        if self._has_begun or database.dialect.in_a_file:
            return
        self._has_begun = True
        last_look, options = LastLook(NoParent()), WorkerOptions(**facts.options)
        self._maintenance = maintenance = Maintenance(
            *(database, options, []),
            reporter=self._heartbeat.reporter,
            freed=self.send,
            pauses_ended=lambda names: self.pause_all(paused=ALL not in names and self._all_paused),
            last_look=last_look,
            quiet=True,
        )
        poller = Poller(
            *(database, options, self.send),
            check=self.check,
            last_look=last_look,
            looked=self.looked,
            workers=lambda: [child.worker for child in self._children() if child.worker is not None],
            quiet=True,
        )
        poller.start()
        try:
            maintenance.start()
        except BaseException:
            # workers with a poller of their host leave the services to the host
            poller.close(LAST_SECONDS)  # guard: who-does-no-maintenance-does-not-look
            raise
        self._poller = poller

    def close(self) -> None:
        """End the poller and the services."""
        if self._poller is not None:
            self._maintenance.end()
            self._poller.close(LAST_SECONDS)
            self._maintenance.close(LAST_SECONDS)

    # -- choosing a worker -----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send a worker to claim."""
        with self._lock:
            self._sent = next(iter(self._free()), None)
            if self._sent is not None:
                self._sent.send()

    def check(self) -> None:
        """Send others where the one that was sent does not go."""
        with self._lock:
            if self._sent is not None and not self._sent.has_gone():  # guard: wake-is-passed-on
                self.more(self._sent)

    def more(self, child: Child) -> None:
        """Send others after a worker that found more than it could take, or does not go."""
        with self._lock:
            resting = [each for each in self._free() if each is not child and each.rests()]
            for each in resting[:HELPERS]:
                each.send()

    def _free(self) -> list[Child]:
        return by_turn(child for child in self._watched() if child.stage is Stage.WORKING)

    def _watched(self) -> list[Child]:
        """Return the workers for which the supervisor looks: those in its database."""
        # guard: another-database-is-not-watched
        return [each for each in self._children() if each.worker and self._heartbeat.knows(each.worker)]

    # -- after a look ----------------------------------------------------------------------------------------

    def looked(self, look: Look, at: float) -> None:
        """Pass on what a look has seen, which was answered at this time."""
        self._relay(look.wanted)
        self._maintenance.expect_end_of_pause(look.wanted.pause_ms)
        self._maintenance.looked(look, at)
        self.note_look()

    def note_look(self) -> None:
        """Note in the memory of the workers that a look was made for them."""
        for child in self._watched():
            child.box.looked(monotonic())

    def _relay(self, wanted: Wanted) -> None:
        """Send each worker the new requests of operators to it."""
        requests = {request.worker: request for request in wanted.requests}
        for child in self._children():
            request = requests.get(child.worker or "")
            if request is not None and request != child.request:
                child.request = request
                child.link.offer(request=list(request))
        self.pause_all(paused=wanted.all_paused)

    def pause_all(self, *, paused: bool) -> None:
        """Notify the workers when all queues are paused, and when they are not any more."""
        self._all_paused = paused
        for child in self._children():
            # also one that came later: it may have polled for itself before its host did
            if child.worker is not None and child.all_paused is not paused:  # guard: pause-reaches-each-child
                child.all_paused = paused
                child.link.offer(all_paused=paused)
