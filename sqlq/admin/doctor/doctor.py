"""`sqlq doctor`: examines the database and the queue in it. Reports for each check whether all is well, and
what to do.

Each check runs on its own. If the role may not read something, or the server does not answer in time, the
check reports that, and the others go on. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor import queue as doctor_queue
from sqlq.admin.doctor.finding import Finding, Verdict, check, counted, ok, span, to_do
from sqlq.admin.doctor.postgresql import ServerCheck
from sqlq.admin.doctor.sqlite import DAMAGED, FileCheck
from sqlq.admin.keys import unreadable
from sqlq.admin.queues import Queues, QueueStatus
from sqlq.admin.workers import Workers, WorkerStatus, forgotten_pauses, since_it_said
from sqlq.config.command_hint import command, word
from sqlq.config.constants import HEARTBEAT_MS, RESCUE_MS, UNKNOWN_TASK_MS, VERSION
from sqlq.config.durations import readable
from sqlq.config.urls import masked
from sqlq.database.database import Database
from sqlq.database.postgresql import health
from sqlq.errors import SqlqError
from sqlq.schema import version
from sqlq.store.health import health as health_checks
from sqlq.store.workers import pauses as pause_rows
from sqlq.store.workers import workers
from sqlq.store.workers.workers import STUCK

STUCK_MS = 2 * RESCUE_MS
CANCEL_MS = 6 * HEARTBEAT_MS
LONG_WAIT_S = 300.0
LONG_HELD_S = 15.0
"""A worker may hold a job this long without starting it: a new Python process takes seconds under load."""
LONG_PAUSE_S = 3_600.0
"""A worker that has been paused for so long may have been forgotten."""


class Doctor:
    """Examines one database."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        self._database = database
        self._deep = deep

    def examine(self) -> list[Finding]:
        """Return what was found, in the order in which it matters. Raises whatever keeps from connecting at
        all."""
        found = [self._connection()]
        if self._database.dialect.vacuums:
            server = ServerCheck(self._database)
            found += self._each(
                server.primary,
                server.durability,
                server.connections,
                server.autovacuum,
                server.creators,
                server.transactions,
                server.prepared,
            )
            found += self._each(server.slots, server.listen)
        else:
            file = FileCheck(self._database, deep=self._deep)
            found += self._each(file.file, file.journal, file.synchronous, file.integrity)
        found += self._each(self._migrations)
        if found[-1].verdict is not Verdict.OK:
            return found
        if self._database.dialect.vacuums:
            found += self._each(ServerCheck(self._database).dead_rows)
        found += self._each(
            self._indexes,
            self._workers,
            self._stuck,
            self._starts,
            self._queues,
            self._paused,
            self._leases,
            self._cancels,
            self._tasks,
            self._schedules,
            self._limits,
            self._flows,
            self._seals,
        )
        return found + self._each(self._failed)

    def _each(self, *checks: Callable[[], Iterator[Finding]]) -> list[Finding]:
        found: list[Finding] = []
        for each in checks:
            try:
                found += list(each())
            except (SQLAlchemyError, SqlqError) as error:
                found.append(self._unanswered(each.__name__.strip("_").replace("_", " "), error))
        return found

    def _unanswered(self, about: str, error: Exception) -> Finding:
        said = health.refusal(error)
        if "malformed" in said:
            return to_do(about, f"the file is damaged: {said}", DAMAGED)
        grant = health.missing_grant(error, self._database.engine.url, "reader")
        return check(about, f"could not look: {said}", grant)

    @cached_property
    def _alive(self) -> list[WorkerStatus]:
        return Workers(self._database).list()

    @cached_property
    def _held(self) -> list[QueueStatus]:
        return Queues(self._database).status()

    # -- the database ----------------------------------------------------------------------------------------

    def _connection(self) -> Finding:
        began = time.monotonic()
        self._database.require_version()
        with health_checks.reading(self._database) as conn:
            number = ".".join(map(str, conn.dialect.server_version_info or ()))
        took = readable((time.monotonic() - began) * 1000)
        name = self._database.dialect.title
        return ok("connection", f"{masked(self._database.engine.url)}, {name} {number}, connected in {took}")

    def _migrations(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            schema = self._database.schema
            told = version.find(conn, schema)
            # older ones may lack what the next revision adds
            differs = version.difference(conn, schema) if told is not None and told.usable else None
        found = None if told is None else told.revision
        if differs is not None:
            yield to_do("migrations", differs, None)
        elif found == version.HEAD:
            yield ok("migrations", f"the tables are at revision {found}, the one needed")
        else:
            said = version.complaint(self._database.engine, schema, found)
            yield to_do("migrations", said, None)

    # -- the queue -------------------------------------------------------------------------------------------

    def _indexes(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            missing, invalid = health.indexes(conn)
        for name in invalid:
            yield to_do(
                "indexes",
                f"the index {name} is INVALID: it costs writes and serves no reads",
                f"REINDEX INDEX CONCURRENTLY {name}",
            )
        if missing:
            remedy = f"create them as {command('migrate --sql')} shows"
            yield to_do(
                "indexes",
                f"these indexes are missing: {', '.join(missing)}; claims read whole tables",
                remedy,
            )
        if not missing and not invalid:
            yield ok("indexes", "all are there and valid")

    def _workers(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            entered = workers.entered(conn)
        alive = self._alive
        others = sorted({worker.version for worker in alive} - {VERSION})
        silent = len(entered) - len(alive)
        said = f"{counted(len(alive), 'worker is', 'workers are')} alive" + (
            f", {silent} fell silent within a day" if silent > 0 else ""
        )
        if not alive:
            waiting = [queue for queue in self._held if queue.available and not queue.paused]
            remedy = f"start one with {command('work', needs_app=True)}"
            if waiting:
                due = _held_in(waiting, ("available",), "job is", "jobs are")
                yield to_do("workers", f"no worker is alive, and {due} due", remedy)
            else:
                yield check("workers", "no worker is alive; nothing is due", remedy)
        elif others:
            yield check(
                "workers",
                f"{said}; some run sqlq {', '.join(others)}, this is {VERSION}",
                f"finish the deploy: see {command('workers')}",
            )
        else:
            yield ok("workers", said)

    def _stuck(self) -> Iterator[Finding]:
        for worker in (worker for worker in self._alive if worker.state == STUCK):
            who = f"the worker on {worker.host}, pid {worker.pid}, has been stuck for "
            who += span(since_it_said(worker))
            held = ", ".join(f"job {job.id} ({job.task})" for job in worker.jobs[:5]) or "no job"
            remedy = "its supervisor kills it, after --stuck-after at the latest; see its log"
            yield check("stuck", f"{who}: it gives no sign of life, and holds {held}", remedy)

    def _starts(self) -> Iterator[Finding]:
        short = [worker for worker in self._alive if worker.unstarted]
        for worker in short:
            jobs = counted(worker.unstarted, "job", "jobs")
            yield check(
                "starts",
                f"the worker on {worker.host}, pid {worker.pid}, could not start {jobs}, and gave them back",
                "see its log: threads, open files (ulimit -n), processes or memory are short there",
            )
        held = self._held_long() if any(map(_unstarted, self._alive)) else []
        for worker, number in held:
            jobs = counted(number, "job", "jobs")
            yield check(
                "starts",
                f"the worker on {worker.host}, pid {worker.pid}, has held {jobs} for over "
                f"{span(LONG_HELD_S)} without starting them",
                f"a handler blocks its event loop, or processes start slowly: see {command('workers')}",
            )
        if not short and not held:
            yield ok("starts", "workers could start every job they claimed")

    def _held_long(self) -> list[tuple[WorkerStatus, int]]:
        """Return workers that hold jobs for long that they have not started, and how many."""
        with health_checks.reading(self._database) as conn:
            now, reserved = workers.moment(conn), workers.reserved(conn)
        old = {job.id for job in reserved if (now - job.since).total_seconds() > LONG_HELD_S}
        counted = [(worker, len(old & _unstarted(worker))) for worker in self._alive]
        return [(worker, number) for worker, number in counted if number]

    def _limits(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            yield from doctor_queue.lines(conn)

    def _flows(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            yield from doctor_queue.flows_that_stand_still(conn)

    def _queues(self) -> Iterator[Finding]:
        queues = [queue for queue in self._held if not queue.paused]
        unserved = [queue for queue in queues if queue.available and not queue.served]
        if unserved and self._alive:
            names = ", ".join(
                f"{queue.queue} ({_held_in([queue], ('available',), 'due', 'due')})" for queue in unserved
            )
            yield to_do(
                "queues",
                f"no worker serves {names}",
                "start one with "
                + command(f"work -q {word(unserved[0].queue)}", needs_app=True)
                + ", or without -q for all",
            )
        waiting = [queue for queue in queues if queue.oldest_wait_seconds is not None]
        if not waiting:
            yield ok("queues", "nothing waits to be run")
            return
        longest = max(waiting, key=_wait)
        said = f"the job that has waited longest is in queue {longest.queue}, due for {span(_wait(longest))}"
        if longest.served and _wait(longest) > LONG_WAIT_S:
            yield check(
                "queues",
                said,
                "start more workers, or workers with more slots; "
                f"{command('workers')} shows what they are at",
            )
        elif not unserved:
            yield ok("queues", said)

    def _paused(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            pauses = pause_rows.paused(conn)
        old = [
            check("paused", said, command(mend))
            for said, mend in forgotten_pauses(pauses, self._alive, LONG_PAUSE_S)
        ]
        yield from old
        holding = [
            queue for queue in self._held if queue.queue in pauses.named and queue.available + queue.scheduled
        ]
        for queue in holding:
            waiting = _held_in([queue], ("available", "scheduled"), "job waits", "jobs wait")
            said = f"{queue.queue} is paused, and {waiting} in it"
            yield check("paused", said, command(f"queues resume {word(queue.queue)}"))
        if not holding and not old:
            yield ok("paused", "no queue that holds waiting jobs is paused")

    def _leases(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            stuck = health_checks.stuck(conn, longer_than_ms=STUCK_MS)
        if stuck is None:
            yield ok("leases", "no running job is without its worker")
            return
        said = (
            f"{counted(stuck.number, 'running job has', 'running jobs have')} lost their workers, the first "
            f"{span(stuck.seconds)} ago, and "
            f"no worker has taken them over: {_ids(stuck.ids, stuck.number)}"
        )
        remedy = (
            "look at the workers' logs: they should"
            if self._alive
            else "start a worker: any takes over what others lost"
        )
        yield to_do("leases", said, remedy)

    def _cancels(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            ids = health_checks.unheeded_cancels(conn, longer_than_ms=CANCEL_MS)
        if ids:
            said = (
                f"these jobs were asked to stop more than {readable(CANCEL_MS)} ago, and have not: "
                f"{_ids(ids, len(ids))}"
            )
            yield check("cancels", said, command(f"cancel --force {ids[0]}"))
        else:
            yield ok("cancels", "no request to cancel is unheeded")

    def _tasks(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            tasks = health_checks.unknown_tasks(conn)
        for unknown in tasks[:5]:
            left = max(0.0, UNKNOWN_TASK_MS / 1000 - unknown.seconds)
            yield to_do(
                "tasks",
                f"no worker that met it knows the task {unknown.task}: "
                f"{counted(unknown.number, 'job was', 'jobs were')} put back, first "
                f"{span(unknown.seconds)} ago, and will fail in {span(left)}",
                "deploy workers whose App has it, or cancel them with "
                + command(f"cancel --task {word(unknown.task)}"),
            )
        if not tasks:
            yield ok("tasks", "workers knew the task of every job they met")

    def _schedules(self) -> Iterator[Finding]:
        with health_checks.reading(self._database) as conn:
            yield from doctor_queue.plans(conn, is_worked_on=bool(self._alive))

    def _seals(self) -> Iterator[Finding]:
        said = unreadable(self._database)
        if said is not None:
            remedy = "give it to every App: App(keys=[…]) or SQLQ_KEYS"
            yield (check if self._database.seal is None else to_do)("seals", said, remedy)
        elif self._database.seal is not None:
            yield ok("seals", "the newest rows are sealed with keys that are here, or plain")

    def _failed(self) -> Iterator[Finding]:
        failed = [queue for queue in self._held if queue.failed]
        if failed:
            said = f"{_held_in(failed, ('failed',), 'job has', 'jobs have')} failed for good"
            lists, prunes = command("jobs --state failed"), command("prune --failed 30d")
            remedy = f"{lists}; then retry or delete them, or {prunes}"
            yield check("failed", said, remedy)
        else:
            yield ok("failed", "no job has failed for good")


def _wait(queue: QueueStatus) -> float:
    return queue.oldest_wait_seconds or 0.0


def _held_in(queues: Sequence[QueueStatus], names: Sequence[str], one: str, many: str) -> str:
    """Return as text how many jobs queues hold, with "+" where a count was not brought to an end."""
    number = sum(getattr(queue, name) for queue in queues for name in names)
    more = any(name in queue.capped for queue in queues for name in names)
    return f"{number:,}+ {many}" if more else counted(number, one, many)


def _ids(ids: list[int], count: int) -> str:
    return ", ".join(map(str, ids)) + ("" if count <= len(ids) else ", …")


def _unstarted(worker: WorkerStatus) -> set[int]:
    """Return the jobs that a worker has claimed and not started."""
    return {job.id for job in worker.jobs if not job.started}
