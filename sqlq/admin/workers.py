"""`app.workers`: to look at the workers of all hosts, and to pause, resume, stop or restart them."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row

from sqlq.admin.facet import Facet, audited
from sqlq.admin.verb import worker_name
from sqlq.config.command_hint import command
from sqlq.config.json_text import AsJson
from sqlq.errors import ConfigurationError
from sqlq.store.workers import notify
from sqlq.store.workers import workers as worker_rows
from sqlq.store.workers.workers import ALIVE_MS, WORKING, ReservedJob


@dataclass(frozen=True, slots=True)
class WorkerStatus(AsJson):
    """A worker and its jobs; `queues` None means that it serves all. It counts as `alive` up to 90 s after
    its last heartbeat, which came `silent_seconds` ago by the database's clock. `state` is "starting",
    "idle", "busy", "paused" or "stopping", or "silent" if it is not alive. It is "stuck" where its supervisor
    has noted that it gives no sign of life. `state_at` is the time of that state, where it is known.

    At its last heartbeat its host's clock was `clock_ahead_seconds` ahead of the database's. Its supervisor
    cannot start another process because of `start_error`."""

    COLUMNS = (
        *("worker", "state", "queues=served", "slots=concurrency", "jobs=number"),
        *("heartbeat=seen_at", "version"),
    )
    id: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...] | None
    concurrency: int
    started_at: datetime
    seen_at: datetime
    silent_seconds: float
    alive: bool
    jobs: builtins.list[ReservedJob]
    name: str | None = None
    state: str = "idle"
    state_at: datetime | None = None
    clock_ahead_seconds: float | None = None
    start_error: str | None = None

    @property
    def worker(self) -> str:
        return worker_name(self)

    @property
    def served(self) -> str:
        return "all" if self.queues is None else ", ".join(self.queues)

    @property
    def number(self) -> int:
        return len(self.jobs)

    def as_json(self) -> dict[str, Any]:
        names = ("id", "task", "queue", "reserved_at")
        jobs = [(job.id, job.task, job.queue, job.since) for job in self.jobs]
        return {**asdict(self), "jobs": [dict(zip(names, job, strict=True)) for job in jobs]}


_COLUMNS = (
    *("id", "host", "pid", "version", "concurrency", "started_at", "seen_at", "name", "state_at"),
    "start_error",
)
"""The fields of a worker that its row has as they are."""


class WorkerRequest(NamedTuple):
    """A worker process that got a request."""

    id: str
    host: str
    pid: int
    name: str | None


class Workers(Facet):
    """The workers on a database: `app.workers`. Each obeys within 2 seconds; running jobs may finish.

    A worker is named by `--name`, host, host:pid or id, as `sqlq workers` shows it. All processes of a `sqlq
    work` get the request together. Raises `ConfigurationError` where no alive worker has the name."""

    def list(self, *, silent: bool = False) -> builtins.list[WorkerStatus]:
        """Return the workers that are alive and the jobs of each, the longest running first.

        With `silent` also those that have been silent for up to a day and did not sign off: they died, or are
        cut off."""
        with self._read() as conn:
            entered, reserved = worker_rows.entered(conn), worker_rows.reserved(conn)
            now = worker_rows.moment(conn)
        workers = []
        for row in entered:
            silence = max(0.0, (now - row.seen_at).total_seconds())
            alive = silence * 1000 <= ALIVE_MS
            if not alive and not silent:
                continue
            jobs = [job for job in reserved if job.owner == row.id]
            state = row.state if row.state != WORKING else "busy" if jobs else "idle"
            status = WorkerStatus(
                **{name: getattr(row, name) for name in _COLUMNS},
                queues=worker_rows.queues_of(row.queues),
                silent_seconds=silence,
                alive=alive,
                jobs=jobs,
                state=state if alive else "silent",
                clock_ahead_seconds=row.clock_at and (row.clock_at - row.seen_at).total_seconds(),
            )
            workers.append(status)
        return workers

    @audited("workers pause")
    def pause(self, *names: str, all: bool = False) -> builtins.list[WorkerRequest]:
        """Have these workers, or `all` of them, claim nothing until they are resumed. Running jobs go on.

        >>> app.workers.pause("mail-1")  # doctest: +SKIP
        """
        return self._request("pause", names, all)

    @audited("workers resume")
    def resume(self, *names: str, all: bool = False) -> builtins.list[WorkerRequest]:
        """Have these workers, or `all` of them, claim again."""
        return self._request("resume", names, all)

    @audited("workers stop")
    def stop(self, *names: str, all: bool = False) -> builtins.list[WorkerRequest]:
        """Have these workers, or `all` of them, end when their running jobs have ended, however long that
        takes. Their `sqlq work` exits with 0, and only a service manager starts it again."""
        return self._request("stop", names, all)

    @audited("workers restart")
    def restart(self, *names: str, all: bool = False) -> builtins.list[WorkerRequest]:
        """Have the processes of these workers, or of `all`, replaced by new ones, which import the App anew.
        When a new one works, an old one ends after its running jobs; if none can start, the old ones go on. A
        worker in another program ends."""
        return self._request("restart", names, all)

    def _request(self, word: str, names: Sequence[str], all: bool) -> builtins.list[WorkerRequest]:
        if bool(names) == all:
            raise ConfigurationError(f"say which workers to {word}: by name, or all of them, and not both")

        def request(conn: Connection) -> builtins.list[WorkerRequest]:
            alive = worker_rows.alive(conn)
            rows = alive if all else self._named(alive, names)
            ids = worker_rows.request(conn, [row.id for row in rows], word)
            if ids:
                notify.wake_others(conn)
            return [WorkerRequest(row.id, row.host, row.pid, row.name) for row in rows if row.id in ids]

        self._database.require_tables()
        return self._database.run(request)

    def _named(self, alive: Sequence[Row[Any]], names: Sequence[str]) -> builtins.list[Row[Any]]:
        """Return the workers of these names, and what belongs to the same `sqlq work`."""
        for name in names:
            if not any(_is_called(row, name) for row in alive):
                lists = command("workers", self._database.engine.url)
                raise ConfigurationError(
                    f"no worker that is alive is called {name!r}: {lists} shows those there are; nobody was "
                    "asked anything"
                )
        rows = [row for row in alive if any(_is_called(row, name) for name in names)]
        groups = {(row.host, row.supervisor_pid) for row in rows if row.supervisor_pid is not None}
        return [row for row in alive if row in rows or (row.host, row.supervisor_pid) in groups]


def _is_called(row: Row[Any], name: str) -> bool:
    return name in (row.name, row.host, row.id, f"{row.host}:{row.pid}", f"{row.host}:{row.supervisor_pid}")
