"""A supervisor polls, and runs the maintenance, for all its workers together.

It does so for several workers on PostgreSQL, where each look and service of each worker would be a statement.
A worker reads the time of the last look in shared memory. If that is long ago it polls, and runs its
services, itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from sqlq.store.workers.look import Look
from sqlq.store.workers.workers import Requests
from sqlq.worker.ipc.parent import Facts, NoParent
from sqlq.worker.ipc.pipe import Message
from sqlq.worker.maintain.maintenance import Maintenance
from sqlq.worker.options import WorkerOptions
from sqlq.worker.supervise.child import Child, Stage
from sqlq.worker.supervise.heartbeat import Heartbeat
from sqlq.worker.threads.loop import Loop
from sqlq.worker.wait.poller import LastLook, Poller

HELPERS = 2
"""This number of workers follows one that found more than it could take. A few turns bring all."""
LAST_SECONDS = 1.0


class Dispatcher:
    """Sends workers to claim, the idle ones first, and runs the services of their host."""

    def __init__(self, children: Callable[[], Sequence[Child]], heartbeat: Heartbeat) -> None:
        self._children = children
        self._heartbeat = heartbeat
        self._loops: list[Loop] = []

    def begin(self, facts: Facts) -> None:
        """Begin for the database of the first worker that is ready; later calls do nothing."""
        database = self._heartbeat.database
        if self._loops or database.dialect.in_a_file:
            return
        last_look, options = LastLook(NoParent()), WorkerOptions(**facts.options)
        self._maintenance = Maintenance(
            *(database, options, []),
            reporter=self._heartbeat.reporter,
            freed=self.send,
            pauses_ended=lambda names: self.send(),
            last_look=last_look,
            quiet=True,
        )
        poller = Poller(
            *(database, options, self.send),
            last_look=last_look,
            on_look=self.receive_look,
            workers=lambda: [child.worker for child in self._children() if child.worker is not None],
            quiet=True,
        )
        # in this order: workers whose host looks leave the services to it
        for loop in (self._maintenance, poller):  # guard: poller-starts-after-its-maintenance
            loop.start()
            self._loops.append(loop)

    def close(self) -> None:
        """End the poller and the services."""
        for loop in self._loops:
            loop.end()
        for loop in self._loops:
            loop.close(LAST_SECONDS)

    def send(self) -> None:
        """Send the worker with a free slot and the fewest jobs to claim. Among equals it is the one that was
        sent last, whose caches are warm. One that did not react comes last."""
        free = self._free()
        if free:
            # guard: wake-goes-to-a-late-worker-last
            min(free, key=lambda child: (child.is_late(), child.box.started_now(), -child.sent_at)).send()

    def more(self, child: Child) -> None:
        """Send others, those first that rest for longest, after a worker that found more than it could
        take."""
        others = [other for other in self._free() if other is not child]
        for other in sorted(others, key=lambda other: (other.box.started_now(), other.sent_at))[:HELPERS]:
            other.send()

    def receive_look(self, look: Look, at: float) -> None:
        """Pass on what a look has seen, which was answered at this time."""
        self.publish(look.wanted)
        self._maintenance.expect_end_of_pause(look.wanted.pause_ms)
        self._maintenance.looked(look, at)

    def publish(self, requested: Requests) -> None:
        """Note in the memory of the workers that a look was made for them. Send each the new requests of
        operators to it."""
        requests = {request.worker: list(request) for request in requested.requests}
        for child in self._watched():
            child.box.note_poll(monotonic())
            message: Message = {"all_paused": requested.all_paused}
            if child.worker in requests:
                message["request"] = requests[child.worker]
            if message != child.requests:  # guard: pause-reaches-each-child
                child.requests = message
                child.link.offer(**message)

    def _free(self) -> list[Child]:
        return [
            child
            for child in self._watched()
            if child.stage is Stage.WORKING and child.box.started_now() < child.slots
        ]

    def _watched(self) -> list[Child]:
        """Return the workers for which the supervisor looks: those in its database."""
        # guard: another-database-is-not-watched
        return [child for child in self._children() if child.worker and self._heartbeat.knows(child.worker)]
