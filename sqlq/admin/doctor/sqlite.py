"""`sqlq doctor` on the file of an SQLite database: where it lies, how it is written, whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlq.admin.doctor.finding import Finding, check, ok, to_do
from sqlq.database.database import Database
from sqlq.database.sqlite import health as healths
from sqlq.store.health import health

LARGE_LOG_BYTES = 256 * 1024 * 1024
CHECKED_BYTES = 32 * 1024 * 1024
"""Up to this size a file is checked each time; larger ones with --deep, since that reads all of it."""
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


class FileCheck:
    """Examines the file of one database; each method is one question."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        self._database = database
        self._deep = deep

    def file(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            file = healths.database_file(conn)
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

    def journal(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            mode = str(healths.pragma(conn, "journal_mode"))
            file = healths.database_file(conn)
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

    def synchronous(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            level = int(healths.pragma(conn, "synchronous"))
        name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(level, str(level))
        remedy = "set PRAGMA synchronous = FULL on connections that enqueue"
        if level == 0:
            yield to_do("synchronous", "OFF: a loss of power can damage the database", remedy)
        elif level == 1:
            yield check("synchronous", "NORMAL: a loss of power can lose the jobs acknowledged last", remedy)
        else:
            yield ok("synchronous", f"{name} on sqlq's own connections")

    def integrity(self) -> Iterator[Finding]:
        with health.reading(self._database) as conn:
            file = healths.database_file(conn)
            size = file.stat().st_size if file and file.exists() else 0
            if size > CHECKED_BYTES and not self._deep:
                yield ok("integrity", f"not checked: the file has {size >> 20:,} MiB; --deep reads all of it")
                return
            complaints = healths.quick_check(conn)
        if complaints:
            yield to_do("integrity", f"the file is damaged: {complaints[0]}", DAMAGED)
        else:
            yield ok("integrity", "quick_check finds the file in order")


def filesystem(file: Path, mounts: str) -> str | None:
    """Return the type of the filesystem that a file is on, given the text of /proc/mounts; None if no entry
    of it fits."""
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
