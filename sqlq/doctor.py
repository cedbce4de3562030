"""`sqlq doctor`: looks at the database and the queue in it, and says of each thing whether it is well and what to do.

Every check is asked on its own: what a role may not see, or a server does not answer in time, is said to be so, and the
others go on. Nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sqlq.admin import Admin, QueueStatus
from sqlq.clock import readable
from sqlq.errors import SqlqError
from sqlq.schema import version
from sqlq.settings import HEARTBEAT_MS, POLL_MS, RESCUE_MS, UNKNOWN_TASK_MS, VERSION, masked
from sqlq.store import cluster, health
from sqlq.store.database import Database

OLD_TRANSACTION_S = 300.0
"""From this age on an open transaction is worth a look: vacuum can remove no row that died since it began."""
VERY_OLD_TRANSACTION_S = 3_600.0
FREE_CONNECTIONS = 10
DEAD_ROWS = 50_000
LISTEN_SECONDS = 2.0
LARGE_LOG_BYTES = 256 * 1024 * 1024
CHECKED_BYTES = 256 * 1024 * 1024
"""Up to this size a file is checked each time; larger ones with --deep, since that reads all of it."""
STUCK_MS = 2 * RESCUE_MS
CANCEL_MS = 6 * HEARTBEAT_MS
LONG_WAIT_S = 300.0
DAMAGED = "stop all workers, and restore a backup, or save what can be with sqlite3's .recover"
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "ncpfs", "beegfs", "gpfs", "9p", "virtiofs", "vboxsf"}
    | {f"fuse.{name}" for name in ("sshfs", "glusterfs", "ceph", "ceph-fuse", "s3fs", "gcsfuse", "rclone", "gvfsd-fuse", "davfs")}
)


class Verdict(StrEnum):
    """OK: as it should be. LOOK: works, but somebody should know. MEND: something does not work, or will not for long."""

    OK = "ok"
    LOOK = "look"
    MEND = "mend"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    check: str
    verdict: Verdict
    said: str
    remedy: str | None = None


def ok(check: str, said: str) -> Finding:
    return Finding(check, Verdict.OK, said)


def look(check: str, said: str, remedy: str | None = None) -> Finding:
    return Finding(check, Verdict.LOOK, said, remedy)


def mend(check: str, said: str, remedy: str | None) -> Finding:
    return Finding(check, Verdict.MEND, said, remedy)


class Doctor:
    """Examines one database."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        self._database = database
        self._deep = deep
        self._admin = Admin(database)

    def examine(self) -> list[Finding]:
        """Return what was found, in the order in which it matters. Raises whatever keeps from connecting at all."""
        found = [self._connection()]
        if self._database.engine.dialect.name == "postgresql":
            found += self._each(self._primary, self._durability, self._connections, self._autovacuum, self._transactions, self._prepared)
            found += self._each(self._slots, self._listen)
        else:
            found += self._each(self._file, self._journal, self._synchronous, self._integrity)
        found += self._each(self._migrations)
        if found[-1].verdict is not Verdict.OK:
            return found
        if self._database.engine.dialect.name == "postgresql":
            found += self._each(self._dead_rows)
        found += self._each(self._indexes, self._workers, self._queues, self._paused, self._leases, self._cancels, self._tasks)
        return found + self._each(self._failed)

    def _each(self, *checks: Callable[[], Iterator[Finding]]) -> list[Finding]:
        found: list[Finding] = []
        for check in checks:
            try:
                found += list(check())
            except (DBAPIError, SqlqError) as error:
                found.append(_unanswered(check.__name__.strip("_").replace("_", " "), error))
        return found

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._database.read() as conn:
            health.limit_time(conn)
            yield conn

    # -- the database ------------------------------------------------------------------------------------------------

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
            where = version.database(conn, schema)
        if found == version.HEAD:
            yield ok("migrations", f"the tables are at revision {found}, the one needed")
        else:
            yield mend("migrations", version.complaint(where, found), None)

    # -- PostgreSQL --------------------------------------------------------------------------------------------------

    def _primary(self) -> Iterator[Finding]:
        with self._read() as conn:
            standby, read_only = health.is_standby(conn), health.setting(conn, "default_transaction_read_only") == "on"
        if standby:
            yield mend("primary", "this server is a standby: nothing can be enqueued or claimed here", "name the primary in the URL")
        elif read_only:
            yield mend(
                "primary",
                "transactions of this role are read-only: nothing can be claimed",
                "ALTER ROLE … RESET default_transaction_read_only",
            )
        else:
            yield ok("primary", "the server takes writes")

    def _durability(self) -> Iterator[Finding]:
        with self._read() as conn:
            commit, fsync, pages = (health.setting(conn, name) for name in ("synchronous_commit", "fsync", "full_page_writes"))
        if fsync == "off":
            yield mend(
                "durability",
                "fsync is off: a crash of the machine can lose acknowledged jobs, and the whole database",
                "set fsync = on in postgresql.conf",
            )
        elif pages == "off":
            yield mend("durability", "full_page_writes is off: a crash of the machine can damage tables", "set full_page_writes = on")
        elif commit == "off":
            yield look(
                "durability",
                "synchronous_commit is off: a crash of the server can lose the jobs acknowledged in its last moments",
                "set it on for the roles that enqueue, if no job may be lost",
            )
        else:
            yield ok("durability", f"fsync is on, synchronous_commit is {commit}")

    def _connections(self) -> Iterator[Finding]:
        with self._read() as conn:
            used, limit = health.connections(conn)
        said = f"{used} of {limit} connections are in use"
        if limit - used < FREE_CONNECTIONS:
            yield look("connections", said, "raise max_connections, or put a pooler before the server; a worker needs up to five")
        else:
            yield ok("connections", said)

    def _autovacuum(self) -> Iterator[Finding]:
        with self._read() as conn:
            on = health.setting(conn, "autovacuum") == "on" and health.setting(conn, "track_counts") == "on"
            without = health.without_autovacuum(conn)
        if not on:
            yield mend(
                "autovacuum",
                "autovacuum is off (or track_counts is): dead rows stay, and claims become slower and slower",
                "set autovacuum = on and track_counts = on",
            )
        elif without:
            yield mend("autovacuum", f"autovacuum is off for {', '.join(without)}", f"ALTER TABLE {without[0]} RESET (autovacuum_enabled)")
        else:
            yield ok("autovacuum", "autovacuum is on")

    def _transactions(self) -> Iterator[Finding]:
        with self._read() as conn:
            old = health.old_transactions(conn, older_than_s=OLD_TRANSACTION_S)
            hidden = health.hidden_sessions(conn)
        for session in old:
            who = f"pid {session.pid} ({session.program or 'no application_name'}, {session.state})"
            said = f"{who} has had a transaction open for {_span(session.seconds)}: no row that died since then can be removed"
            remedy = f"end it where it was begun, or SELECT pg_terminate_backend({session.pid})"
            yield (mend if session.seconds >= VERY_OLD_TRANSACTION_S else look)("transactions", said, remedy)
        if hidden:
            said = f"could not look into {hidden} sessions of other roles"
            yield look("transactions", said, "GRANT pg_read_all_stats to the role in the URL")
        elif not old:
            yield ok("transactions", f"none has been open for more than {_span(OLD_TRANSACTION_S)}")

    def _prepared(self) -> Iterator[Finding]:
        with self._read() as conn:
            waiting = health.prepared_transactions(conn, older_than_s=OLD_TRANSACTION_S)
        for gid, seconds in waiting:
            yield mend(
                "prepared",
                f"the prepared transaction {gid!r} has waited for {_span(seconds)}: it holds locks, and dead rows with them",
                "COMMIT PREPARED or ROLLBACK PREPARED",
            )
        if not waiting:
            yield ok("prepared", "no prepared transaction was forgotten")

    def _slots(self) -> Iterator[Finding]:
        with self._read() as conn:
            idle = health.idle_slots(conn)
        for name, age in idle:
            yield look(
                "slots",
                f"nobody uses the replication slot {name}, and it keeps the dead rows of the last {age:,} transactions",
                f"start its replica, or SELECT pg_drop_replication_slot('{name}')",
            )
        if not idle:
            yield ok("slots", "no idle replication slot holds back vacuum")

    def _listen(self) -> Iterator[Finding]:
        began = time.monotonic()
        heard = health.hears(self._database, seconds=LISTEN_SECONDS)
        if heard is None:
            yield look("listen", "this driver cannot listen: workers find new jobs by polling", "use postgresql+psycopg:// in the URL")
        elif heard:
            yield ok("listen", f"a NOTIFY arrives within {readable((time.monotonic() - began) * 1000)}")
        else:
            yield look(
                "listen",
                f"a NOTIFY did not arrive within {LISTEN_SECONDS:g} s, as behind PgBouncer in transaction mode: workers find new jobs by "
                f"polling, within {readable(POLL_MS)}",
                "connect workers directly, or in session mode, if that is too slow",
            )

    def _dead_rows(self) -> Iterator[Finding]:
        with self._read() as conn:
            rows = health.dead_rows(conn)
        if rows is None:
            yield look("dead rows", "could not look: no statistics of the table jobs")
            return
        when = "" if rows.vacuumed_at is None else f", vacuumed {rows.vacuumed_at:%Y-%m-%d %H:%M %Z}"
        said = f"the table jobs has about {rows.live:,} live and {rows.dead:,} dead rows{when}"
        if rows.dead > DEAD_ROWS and rows.dead > rows.live:
            yield look("dead rows", said, "end old transactions (see above), then VACUUM jobs")
        else:
            yield ok("dead rows", said)

    # -- SQLite ------------------------------------------------------------------------------------------------------

    def _file(self) -> Iterator[Finding]:
        with self._read() as conn:
            file = health.database_file(conn)
        if file is None:
            yield look("file", "could not look: SQLite names no file")
            return
        try:
            kind = filesystem(file, Path("/proc/mounts").read_text())
        except OSError:  # not Linux
            yield ok("file", f"{file}; what filesystem that is on cannot be told here")
            return
        if kind in NETWORK_FILESYSTEMS:
            yield mend(
                "file",
                f"{file} is on a {kind} filesystem: its locks cannot be relied on, so that jobs can be lost or run twice",
                "move it to a local disk, or use PostgreSQL",
            )
        else:
            yield ok("file", f"{file} is on a local filesystem ({kind or 'unknown'})")

    def _journal(self) -> Iterator[Finding]:
        with self._read() as conn:
            mode = str(health.pragma(conn, "journal_mode"))
            file = health.database_file(conn)
        if mode != "wal":
            yield mend(
                "journal",
                f"journal_mode is {mode}, and cannot be changed to WAL: readers and the writer block each other",
                "make the file and its directory writable, on a local disk",
            )
            return
        log = file and file.with_name(file.name + "-wal")
        size = log.stat().st_size if log and log.exists() else 0
        if size > LARGE_LOG_BYTES:
            said = f"journal_mode is WAL; the log has grown to {size >> 20:,} MiB, as it does while somebody reads without an end"
            yield look("journal", said, "end long reads, then PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            yield ok("journal", f"journal_mode is WAL, the log has {size >> 10:,} KiB")

    def _synchronous(self) -> Iterator[Finding]:
        with self._read() as conn:
            level = int(health.pragma(conn, "synchronous"))
        name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(level, str(level))
        remedy = "set PRAGMA synchronous = FULL on connections that enqueue"
        if level == 0:
            yield mend("synchronous", "OFF: a loss of power can damage the database", remedy)
        elif level == 1:
            yield look("synchronous", "NORMAL: a loss of power can lose the jobs acknowledged last", remedy)
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
            yield mend("integrity", f"the file is damaged: {complaints[0]}", DAMAGED)
        else:
            yield ok("integrity", "quick_check finds the file in order")

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _indexes(self) -> Iterator[Finding]:
        with self._read() as conn:
            missing, invalid = health.indexes(conn)
        for name in invalid:
            yield mend("indexes", f"the index {name} is INVALID: it costs writes and serves no reads", f"REINDEX INDEX CONCURRENTLY {name}")
        if missing:
            remedy = "create them as sqlq migrate --sql shows"
            yield mend("indexes", f"these indexes are missing: {', '.join(missing)}; claims read whole tables", remedy)
        if not missing and not invalid:
            yield ok("indexes", "all are there and valid")

    def _workers(self) -> Iterator[Finding]:
        with self._read() as conn:
            entered = cluster.entered(conn)
        alive = self._admin.alive()
        others = sorted({worker.version for worker in alive} - {VERSION})
        silent = len(entered) - len(alive)
        said = f"{_count(len(alive), 'worker is', 'workers are')} alive" + (f", {silent} fell silent within a day" if silent > 0 else "")
        if not alive:
            waiting = sum(queue.available for queue in self._admin.status() if not queue.paused)
            remedy = "start one with sqlq --app module:attribute work"
            if waiting:
                yield mend("workers", f"no worker is alive, and {_count(waiting, 'job is', 'jobs are')} due", remedy)
            else:
                yield look("workers", "no worker is alive; nothing is due", remedy)
        elif others:
            yield look("workers", f"{said}; some run sqlq {', '.join(others)}, this is {VERSION}", "finish the deploy: see sqlq workers")
        else:
            yield ok("workers", said)

    def _queues(self) -> Iterator[Finding]:
        queues = [queue for queue in self._admin.status() if not queue.paused]
        unserved = [queue for queue in queues if queue.available and not queue.served]
        if unserved and self._admin.alive():
            names = ", ".join(f"{queue.queue} ({queue.available:,} due)" for queue in unserved)
            yield mend("queues", f"no worker serves {names}", f"start one with -q {unserved[0].queue}, or without -q for all")
        waiting = [queue for queue in queues if queue.oldest_wait_seconds is not None]
        if not waiting:
            yield ok("queues", "nothing waits to be run")
            return
        longest = max(waiting, key=_wait)
        said = f"the job that has waited longest is in queue {longest.queue}, due for {_span(_wait(longest))}"
        if longest.served and _wait(longest) > LONG_WAIT_S:
            yield look("queues", said, "start more workers, or workers with more slots; sqlq workers shows what they are at")
        elif not unserved:
            yield ok("queues", said)

    def _paused(self) -> Iterator[Finding]:
        holding = [queue for queue in self._admin.status() if queue.paused and queue.available + queue.scheduled]
        for queue in holding:
            said = f"{queue.queue} is paused, and {_count(queue.available + queue.scheduled, 'job waits', 'jobs wait')} in it"
            yield look("paused", said, f"sqlq resume {queue.queue}")
        if not holding:
            yield ok("paused", "no queue that holds waiting jobs is paused")

    def _leases(self) -> Iterator[Finding]:
        with self._read() as conn:
            stuck = health.stuck(conn, longer_than_ms=STUCK_MS)
        if stuck is None:
            yield ok("leases", "no running job is without its worker")
            return
        said = (
            f"{_count(stuck.number, 'running job has', 'running jobs have')} lost their workers, the first {_span(stuck.seconds)} ago, and "
            f"nobody has taken them over: {_ids(stuck.ids, stuck.number)}"
        )
        remedy = "look at the workers' logs: they should" if self._admin.alive() else "start a worker: any takes over what others lost"
        yield mend("leases", said, remedy)

    def _cancels(self) -> Iterator[Finding]:
        with self._read() as conn:
            ids = health.unheeded_cancels(conn, longer_than_ms=CANCEL_MS)
        if ids:
            said = f"these jobs were asked to stop more than {readable(CANCEL_MS)} ago, and have not: {_ids(ids, len(ids))}"
            yield look("cancels", said, f"sqlq cancel --force {ids[0]}")
        else:
            yield ok("cancels", "no request to cancel is unheeded")

    def _tasks(self) -> Iterator[Finding]:
        with self._read() as conn:
            tasks = health.unknown_tasks(conn)
        for unknown in tasks[:5]:
            left = max(0.0, UNKNOWN_TASK_MS / 1000 - unknown.seconds)
            yield mend(
                "tasks",
                f"no worker that met it knows the task {unknown.task}: {_count(unknown.number, 'job was', 'jobs were')} put back, first "
                f"{_span(unknown.seconds)} ago, and will fail in {_span(left)}",
                "deploy workers whose App has it, or cancel them with sqlq cancel --task",
            )
        if not tasks:
            yield ok("tasks", "workers knew the task of every job they met")

    def _failed(self) -> Iterator[Finding]:
        failed = sum(queue.failed for queue in self._admin.status())
        if failed:
            said = f"{_count(failed, 'job has', 'jobs have')} failed for good"
            yield look("failed", said, "sqlq failed list; then retry, forget, or sqlq prune --failed 30d")
        else:
            yield ok("failed", "no job has failed for good")


def _unanswered(check: str, error: Exception) -> Finding:
    said = health.refusal(error)
    if "malformed" in said:
        return mend(check, f"the file is damaged: {said}", DAMAGED)
    return look(check, f"could not look: {said}", "GRANT that to the role in the URL" if "permission denied" in said else None)


def filesystem(file: Path, mounts: str) -> str | None:
    """Return the type of the filesystem that a file is on, given the text of /proc/mounts; None where that does not tell."""
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


def _span(seconds: float) -> str:
    return readable(max(0.0, seconds) * 1000)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _ids(ids: list[int], count: int) -> str:
    return ", ".join(map(str, ids)) + ("" if count <= len(ids) else ", …")
