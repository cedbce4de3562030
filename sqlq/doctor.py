"""`sqlq doctor`: looks at the database and the queue in it, and says of each thing whether it is well and
what to do.

Every check is asked on its own: what a role may not see, or a server does not answer in time, is said to be
so, and the others go on. Nothing is changed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from sqlq import stalled
from sqlq.admin import Admin, QueueStatus
from sqlq.clock import readable, written
from sqlq.commandline import command
from sqlq.errors import SqlqError
from sqlq.findings import Finding, Verdict, check, counted, ok, span, to_do
from sqlq.fleet import forgotten_pauses
from sqlq.rotation import unreadable
from sqlq.schema import version
from sqlq.settings import HEARTBEAT_MS, POLL_MS, RESCUE_MS, UNKNOWN_TASK_MS, VERSION, masked
from sqlq.store import cluster, health
from sqlq.store.cluster import WorkerRow
from sqlq.store.database import Database

OLD_TRANSACTION_S = 300.0
"""From this age on an open transaction is named: vacuum can remove no row that died since it began."""
VERY_OLD_TRANSACTION_S = 3_600.0
FREE_CONNECTIONS = 10
DEAD_ROWS = 50_000
LISTEN_SECONDS = 2.0
LARGE_LOG_BYTES = 256 * 1024 * 1024
CHECKED_BYTES = 32 * 1024 * 1024
"""Up to this size a file is checked each time; larger ones with --deep, since that reads all of it."""
STUCK_MS = 2 * RESCUE_MS
CANCEL_MS = 6 * HEARTBEAT_MS
LONG_WAIT_S = 300.0
LONG_HELD_S = 15.0
"""So long a worker may hold a job without starting it: a new process of Python, under load, takes seconds."""
LONG_PAUSE_S = 3_600.0
"""A worker that has been paused for so long may have been forgotten."""
DAMAGED = "stop all workers, and restore a backup, or save what can be with sqlite3's .recover"
NETWORK_FILESYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "ncpfs",
        "beegfs",
        "gpfs",
        "9p",
        "virtiofs",
        "vboxsf",
    }
    | {
        f"fuse.{name}"
        for name in (
            "sshfs",
            "glusterfs",
            "ceph",
            "ceph-fuse",
            "s3fs",
            "gcsfuse",
            "rclone",
            "gvfsd-fuse",
            "davfs",
        )
    }
)


class Doctor:
    """Examines one database."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        self._database = database
        self._deep = deep
        self._admin = Admin(database)

    def examine(self) -> list[Finding]:
        """Return what was found, in the order in which it matters. Raises whatever keeps from connecting at
        all."""
        found = [self._connection()]
        if self._database.engine.dialect.name == "postgresql":
            found += self._each(
                self._primary,
                self._durability,
                self._connections,
                self._autovacuum,
                self._transactions,
                self._prepared,
            )
            found += self._each(self._slots, self._listen)
        else:
            found += self._each(self._file, self._journal, self._synchronous, self._integrity)
        found += self._each(self._migrations)
        if found[-1].verdict is not Verdict.OK:
            return found
        if self._database.engine.dialect.name == "postgresql":
            found += self._each(self._dead_rows)
        found += self._each(
            self._indexes,
            self._workers,
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
        return check(about, f"could not look: {said}", health.missing_grant(error, self._database.engine.url))

    @cached_property
    def _alive(self) -> list[WorkerRow]:
        return self._admin.alive()

    @cached_property
    def _held(self) -> list[QueueStatus]:
        return self._admin.status()

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._database.read() as conn:
            health.limit_time(conn)
            yield conn

    # -- the database ----------------------------------------------------------------------------------------

    def _connection(self) -> Finding:
        began = time.monotonic()
        self._database.require_version()
        with self._read() as conn:
            number = ".".join(map(str, conn.dialect.server_version_info or ()))
        took = readable((time.monotonic() - began) * 1000)
        name = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}[self._database.engine.dialect.name]
        return ok("connection", f"{masked(self._database.engine.url)}, {name} {number}, connected in {took}")

    def _migrations(self) -> Iterator[Finding]:
        with self._read() as conn:
            schema = self._database.schema
            found = version.read(conn, schema)
        if found == version.HEAD:
            yield ok("migrations", f"the tables are at revision {found}, the one needed")
        else:
            said = version.complaint(self._database.engine, schema, found)
            yield to_do("migrations", said, None)

    # -- PostgreSQL ------------------------------------------------------------------------------------------

    def _primary(self) -> Iterator[Finding]:
        with self._read() as conn:
            standby, read_only = (
                health.is_standby(conn),
                health.setting(conn, "default_transaction_read_only") == "on",
            )
        if standby:
            yield to_do(
                "primary",
                "this server is a standby: nothing can be enqueued or claimed here",
                "name the primary in the URL",
            )
        elif read_only:
            yield to_do(
                "primary",
                "transactions of this role are read-only: nothing can be claimed",
                "ALTER ROLE … RESET default_transaction_read_only",
            )
        else:
            yield ok("primary", "the server takes writes")

    def _durability(self) -> Iterator[Finding]:
        with self._read() as conn:
            commit, fsync, pages = (
                health.setting(conn, name) for name in ("synchronous_commit", "fsync", "full_page_writes")
            )
        if fsync == "off":
            yield to_do(
                "durability",
                "fsync is off: a crash of the machine can lose acknowledged jobs, and the whole database",
                "set fsync = on in postgresql.conf",
            )
        elif pages == "off":
            yield to_do(
                "durability",
                "full_page_writes is off: a crash of the machine can damage tables",
                "set full_page_writes = on",
            )
        elif commit == "off":
            yield check(
                "durability",
                "synchronous_commit is off: a crash of the server can lose the jobs acknowledged in its "
                "last moments",
                "set it on for the roles that enqueue, if no job may be lost",
            )
        else:
            yield ok("durability", f"fsync is on, synchronous_commit is {commit}")

    def _connections(self) -> Iterator[Finding]:
        with self._read() as conn:
            used, limit = health.connections(conn)
        said = f"{used} of {limit} connections are in use"
        if limit - used < FREE_CONNECTIONS:
            yield check(
                "connections",
                said,
                "raise max_connections, or put a pooler before the server; a worker needs up to five",
            )
        else:
            yield ok("connections", said)

    def _autovacuum(self) -> Iterator[Finding]:
        with self._read() as conn:
            on = health.setting(conn, "autovacuum") == "on" and health.setting(conn, "track_counts") == "on"
            without = health.without_autovacuum(conn)
        if not on:
            yield to_do(
                "autovacuum",
                "autovacuum is off (or track_counts is): dead rows stay, and claims become slower and slower",
                "set autovacuum = on and track_counts = on",
            )
        elif without:
            yield to_do(
                "autovacuum",
                f"autovacuum is off for {', '.join(without)}",
                f"ALTER TABLE {without[0]} RESET (autovacuum_enabled)",
            )
        else:
            yield ok("autovacuum", "autovacuum is on")

    def _transactions(self) -> Iterator[Finding]:
        with self._read() as conn:
            old = health.old_transactions(conn, older_than_s=OLD_TRANSACTION_S)
            hidden = health.hidden_sessions(conn)
        for session in old:
            who = f"pid {session.pid} ({session.program or 'no application_name'}, {session.state})"
            said = (
                f"{who} has had a transaction open for {span(session.seconds)}: no row that died since "
                "then can be removed"
            )
            remedy = f"end it where it was begun, or SELECT pg_terminate_backend({session.pid})"
            yield (to_do if session.seconds >= VERY_OLD_TRANSACTION_S else check)(
                "transactions", said, remedy
            )
        if hidden:
            said = f"could not look into {hidden} sessions of other roles"
            yield check("transactions", said, "GRANT pg_read_all_stats to the role in the URL")
        elif not old:
            yield ok("transactions", f"none has been open for more than {span(OLD_TRANSACTION_S)}")

    def _prepared(self) -> Iterator[Finding]:
        with self._read() as conn:
            waiting = health.prepared_transactions(conn, older_than_s=OLD_TRANSACTION_S)
        for gid, seconds in waiting:
            yield to_do(
                "prepared",
                f"the prepared transaction {gid!r} has waited for {span(seconds)}: it holds locks, and "
                "dead rows with them",
                "COMMIT PREPARED or ROLLBACK PREPARED",
            )
        if not waiting:
            yield ok("prepared", "no prepared transaction was forgotten")

    def _slots(self) -> Iterator[Finding]:
        with self._read() as conn:
            idle = health.idle_slots(conn)
        for name, age in idle:
            yield check(
                "slots",
                f"the replication slot {name} is idle, and keeps the dead rows of the last {age:,} "
                "transactions",
                f"start its replica, or SELECT pg_drop_replication_slot('{name}')",
            )
        if not idle:
            yield ok("slots", "no idle replication slot holds back vacuum")

    def _listen(self) -> Iterator[Finding]:
        began = time.monotonic()
        heard = health.hears(self._database, seconds=LISTEN_SECONDS)
        if heard is None:
            yield check(
                "listen",
                "this driver cannot listen: workers find new jobs by polling",
                "use postgresql+psycopg:// in the URL",
            )
        elif heard:
            yield ok("listen", f"a NOTIFY arrives within {readable((time.monotonic() - began) * 1000)}")
        else:
            yield check(
                "listen",
                f"a NOTIFY did not arrive within {LISTEN_SECONDS:g} s, as behind PgBouncer in transaction "
                f"mode: workers find new jobs by polling, within {readable(POLL_MS)}",
                "if that is too slow, set SQLQ_LISTEN_URL to a URL of the database itself, past the pooler",
            )

    def _dead_rows(self) -> Iterator[Finding]:
        with self._read() as conn:
            rows = health.dead_rows(conn)
        if rows is None:
            yield check("dead rows", "could not look: no statistics of the table jobs")
            return
        when = "" if rows.vacuumed_at is None else f", vacuumed {written(rows.vacuumed_at)}"
        said = f"the table jobs has about {rows.live:,} live and {rows.dead:,} dead rows{when}"
        if rows.dead > DEAD_ROWS and rows.dead > rows.live:
            yield check("dead rows", said, "end old transactions (see above), then VACUUM jobs")
        else:
            yield ok("dead rows", said)

    # -- SQLite ----------------------------------------------------------------------------------------------

    def _file(self) -> Iterator[Finding]:
        with self._read() as conn:
            file = health.database_file(conn)
        if file is None:
            yield check("file", "could not look: SQLite names no file")
            return
        if self._database.dialect.may_only_be_read(self._database.engine.url):
            said = f"{file} may only be read: jobs can be looked at here, and neither enqueued nor claimed"
            yield check("file", said, "make the file and its directory writable, if that is not meant")
            return
        try:
            kind = filesystem(file, Path("/proc/mounts").read_text())
        except OSError:  # not Linux
            yield ok("file", f"{file}; what filesystem that is on cannot be told here")
            return
        if kind in NETWORK_FILESYSTEMS:
            yield to_do(
                "file",
                f"{file} is on a {kind} filesystem: its locks cannot be relied on, so that jobs can be lost "
                "or run twice",
                "move it to a local disk, or use PostgreSQL",
            )
        else:
            yield ok("file", f"{file} is on a local filesystem ({kind or 'unknown'})")

    def _journal(self) -> Iterator[Finding]:
        with self._read() as conn:
            mode = str(health.pragma(conn, "journal_mode"))
            file = health.database_file(conn)
        if mode != "wal" and self._database.dialect.may_only_be_read(self._database.engine.url):
            yield ok("journal", f"journal_mode is {mode}, in a file that may only be read")
            return
        if mode != "wal":
            yield to_do(
                "journal",
                f"journal_mode is {mode}, and cannot be changed to WAL: readers and the writer block each "
                "other",
                "make the file and its directory writable, on a local disk",
            )
            return
        log = file and file.with_name(file.name + "-wal")
        size = log.stat().st_size if log and log.exists() else 0
        if size > LARGE_LOG_BYTES:
            said = (
                f"journal_mode is WAL; the log has grown to {size >> 20:,} MiB, as it does while "
                "a connection reads without an end"
            )
            yield check("journal", said, "end long reads, then PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            yield ok("journal", f"journal_mode is WAL, the log has {size >> 10:,} KiB")

    def _synchronous(self) -> Iterator[Finding]:
        with self._read() as conn:
            level = int(health.pragma(conn, "synchronous"))
        name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(level, str(level))
        remedy = "set PRAGMA synchronous = FULL on connections that enqueue"
        if level == 0:
            yield to_do("synchronous", "OFF: a loss of power can damage the database", remedy)
        elif level == 1:
            yield check("synchronous", "NORMAL: a loss of power can lose the jobs acknowledged last", remedy)
        else:
            yield ok("synchronous", f"{name} on sqlq's own connections")

    def _integrity(self) -> Iterator[Finding]:
        with self._read() as conn:
            file = health.database_file(conn)
            size = file.stat().st_size if file and file.exists() else 0
            if size > CHECKED_BYTES and not self._deep:
                yield ok("integrity", f"not checked: the file has {size >> 20:,} MiB; --deep reads all of it")
                return
            complaints = health.quick_check(conn)
        if complaints:
            yield to_do("integrity", f"the file is damaged: {complaints[0]}", DAMAGED)
        else:
            yield ok("integrity", "quick_check finds the file in order")

    # -- the queue -------------------------------------------------------------------------------------------

    def _indexes(self) -> Iterator[Finding]:
        with self._read() as conn:
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
        with self._read() as conn:
            entered = cluster.entered(conn)
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

    def _starts(self) -> Iterator[Finding]:
        short = [worker for worker in self._alive if worker.unstarted]
        for worker in short:
            jobs = counted(worker.unstarted, "job", "jobs")
            yield check(
                "starts",
                f"the worker on {worker.host}, pid {worker.pid}, could not start {jobs}, and gave them back",
                "see its log: threads, open files (ulimit -n), processes or memory are short there",
            )
        held = [] if not any(worker.held_jobs for worker in self._alive) else self._held_long()
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

    def _held_long(self) -> list[tuple[WorkerRow, int]]:
        """Return workers that hold jobs for long that they have not started, and how many."""
        with self._read() as conn:
            now, reserved = cluster.moment(conn), cluster.reserved(conn)
        old = {job.id for job in reserved if (now - job.since).total_seconds() > LONG_HELD_S}
        counted = [(worker, len(old & {*cluster.held_in(worker.held_jobs)})) for worker in self._alive]
        return [(worker, number) for worker, number in counted if number]

    def _limits(self) -> Iterator[Finding]:
        with self._read() as conn:
            yield from stalled.lines(conn)

    def _flows(self) -> Iterator[Finding]:
        with self._read() as conn:
            yield from stalled.flows_that_stand_still(conn)

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
                + command(f"work -q {shlex.quote(unserved[0].queue)}", needs_app=True)
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
        with self._read() as conn:
            pauses = cluster.paused(conn)
        old = [
            check("paused", said, command(mend))
            for said, mend in forgotten_pauses(pauses, self._admin.workers(), LONG_PAUSE_S)
        ]
        yield from old
        holding = [
            queue for queue in self._held if queue.queue in pauses.named and queue.available + queue.scheduled
        ]
        for queue in holding:
            waiting = _held_in([queue], ("available", "scheduled"), "job waits", "jobs wait")
            said = f"{queue.queue} is paused, and {waiting} in it"
            yield check("paused", said, command(f"resume {shlex.quote(queue.queue)}"))
        if not holding and not old:
            yield ok("paused", "no queue that holds waiting jobs is paused")

    def _leases(self) -> Iterator[Finding]:
        with self._read() as conn:
            stuck = health.stuck(conn, longer_than_ms=STUCK_MS)
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
        with self._read() as conn:
            ids = health.unheeded_cancels(conn, longer_than_ms=CANCEL_MS)
        if ids:
            said = (
                f"these jobs were asked to stop more than {readable(CANCEL_MS)} ago, and have not: "
                f"{_ids(ids, len(ids))}"
            )
            yield check("cancels", said, command(f"cancel --force {ids[0]}"))
        else:
            yield ok("cancels", "no request to cancel is unheeded")

    def _tasks(self) -> Iterator[Finding]:
        with self._read() as conn:
            tasks = health.unknown_tasks(conn)
        for unknown in tasks[:5]:
            left = max(0.0, UNKNOWN_TASK_MS / 1000 - unknown.seconds)
            yield to_do(
                "tasks",
                f"no worker that met it knows the task {unknown.task}: "
                f"{counted(unknown.number, 'job was', 'jobs were')} put back, first "
                f"{span(unknown.seconds)} ago, and will fail in {span(left)}",
                "deploy workers whose App has it, or cancel them with "
                + command(f"cancel --task {shlex.quote(unknown.task)}"),
            )
        if not tasks:
            yield ok("tasks", "workers knew the task of every job they met")

    def _schedules(self) -> Iterator[Finding]:
        with self._read() as conn:
            yield from stalled.plans(conn, is_worked_on=bool(self._alive))

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
            remedy = f"{command('failed list')}; then retry, forget, or {command('prune --failed 30d')}"
            yield check("failed", said, remedy)
        else:
            yield ok("failed", "no job has failed for good")


def filesystem(file: Path, mounts: str) -> str | None:
    """Return the type of the filesystem that a file is on, given the text of /proc/mounts; None where that
    does not tell."""
    best, kind = -1, None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].encode().decode("unicode_escape"))  # a space in a path is \040 there
        # of those mounted at one place the last is seen
        if file.resolve().is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def _wait(queue: QueueStatus) -> float:
    return queue.oldest_wait_seconds or 0.0


def _held_in(queues: Sequence[QueueStatus], names: Sequence[str], one: str, many: str) -> str:
    """Say how many jobs queues hold, with "+" where a count was not brought to an end."""
    number = sum(getattr(queue, name) for queue in queues for name in names)
    more = any(name in queue.capped for queue in queues for name in names)
    return f"{number:,}+ {many}" if more else counted(number, one, many)


def _ids(ids: list[int], count: int) -> str:
    return ", ".join(map(str, ids)) + ("" if count <= len(ids) else ", …")
