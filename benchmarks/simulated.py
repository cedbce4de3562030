"""Idle hosts without their processes.

Each host is a connection that sends the queries of a host's poller. Its worker claims, settles and looks
again as a real one does, with a handler that does nothing.

    python -m benchmarks.simulated URL HOSTS
    python -m benchmarks.simulated URL CONNECTIONS held

The command prints `ready` when all of them look, and ends with its standard input. Connections that are held
are those of idle workers, which send nothing: their hosts look, and renew, for them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
import time
import uuid
from itertools import count

import psycopg

import sqlq
from benchmarks import work
from sqlq.config.constants import HEARTBEAT_MS, LEASE_MS
from sqlq.database.database import Database
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.jobs import settle
from sqlq.store.workers import look, workers
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.ipc.parent import NoParent
from sqlq.worker.options import WorkerOptions
from sqlq.worker.wait.poller import LastLook, Poller
from sqlq.worker.wait.wake import FIRST_LOOK_SECONDS, LOOK_AFTER_HINT_SECONDS

SLOTS = 10
AT_A_TIME = threading.Semaphore(8)
"""Eight hosts work at a time, since they share two pools of connections."""
FILES = 6
"""How many descriptors a host needs."""


class Host:
    """A poller, and one worker, whose loop runs in the poller's thread."""

    def __init__(self, database: Database, number: int) -> None:
        self.id = str(uuid.uuid4())
        self.looked = threading.Event()
        self._database = database
        options = WorkerOptions(None, SLOTS, LEASE_MS)
        self._claimer = Claimer(database, self.id, options)
        with database.begin() as conn:
            workers.register(
                conn,
                id=self.id,
                host=f"simulated-{number}",
                pid=os.getpid(),
                version="0",
                queues=None,
                concurrency=SLOTS,
            )
        self.lookout = Poller(
            *(database, options, self._go),
            last_look=LastLook(NoParent()),
            on_look=lambda look, at: self.looked.set(),
            workers=tuple,
        )
        self.lookout.start()

    def _go(self) -> None:
        pauses = [FIRST_LOOK_SECONDS, 3 * FIRST_LOOK_SECONDS] if self._work() else []
        for pause in pauses:
            time.sleep(pause)
            self._work()
        time.sleep(LOOK_AFTER_HINT_SECONDS)
        if any(ms <= 0 for ms in look.due_in(self._database, look.KnownQueues()).values()):
            self._work()

    def _work(self) -> bool:
        """Claim, execute and settle what there is; return whether there was anything."""
        with AT_A_TIME:
            return self._work_on()

    def _work_on(self) -> bool:
        worked = False
        while claimed := self._claimer.claim(SLOTS):
            worked = True
            for job in claimed:
                work.done(*json.loads(job.payload)["args"])
            done = [Settlement(job.id, job.lease_token, job.attempts, Finished(None)) for job in claimed]
            with self._database.single_statements() as conn:
                settle.settle(conn, done)
            if len(claimed) < SLOTS:
                break
        return worked


def main(url: str, number: int) -> None:
    """Be so many idle hosts until the standard input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1_000 + FILES * number), most))
    database = sqlq.App(url).database.for_loops
    hosts: list[Host] = []
    threading.Thread(target=_live, args=(database, hosts, number), daemon=True).start()
    for i in range(number):
        hosts.append(Host(database, i))
        hosts[-1].looked.wait()  # a thousand that connect at the same time wait for longer than any would
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)  # a clean end of a thousand connections takes too long


def _live(database: Database, hosts: list[Host], number: int) -> None:
    for i in count():
        time.sleep(HEARTBEAT_MS / 1000 / number)
        if i % number < len(hosts):
            with database.single_statements() as conn:
                workers.stand_in(conn, [hosts[i % number].id], lease_ms=LEASE_MS)


async def hold(url: str, number: int) -> None:
    """Hold so many connections until the standard input ends."""
    plain = url.replace("+psycopg", "")
    held = [
        await psycopg.AsyncConnection.connect(plain, autocommit=True, prepare_threshold=None)
        for _ in range(number)
    ]
    for connection in held:
        await connection.execute("SELECT 1")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[3:] == ["held"]:
        asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
    main(sys.argv[1], int(sys.argv[2]))
