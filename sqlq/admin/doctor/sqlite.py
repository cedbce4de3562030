"""`sqlq doctor` on the file of an SQLite database: where it lies, how it is written, whether it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sqlq.admin.doctor.finding import Answer, PlaceChecks, check, ok, to_do
from sqlq.database.sqlite import health as healths

LARGE_LOG_BYTES = 256 * 1024 * 1024
CHECKED_BYTES = 32 * 1024 * 1024
"""Up to this size a file is checked each time; larger ones with --deep, since that reads all of it."""
DAMAGED = "stop all workers, and restore a backup, or save what can be with sqlite3's .recover"
NETWORK_FILESYSTEMS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
    *("smb3", "smbfs", "vboxsf", "virtiofs"),
    *("fuse.ceph", "fuse.ceph-fuse", "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.gvfsd-fuse"),
    *("fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
)


class FileChecks(PlaceChecks):
    """Checks of the file of one database."""

    def in_general(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        return self.file, self.journal, self.synchronous, self.integrity

    def file(self) -> Iterator[Answer]:
        file = self._ask(healths.database_file)
        if file is None:
            yield check("could not look: SQLite names no file")
            return
        if self._database.dialect.may_only_be_read(self._database.engine.url):
            said = f"{file} may only be read: jobs can be looked at here, and neither enqueued nor claimed"
            yield check(said, "make the file and its directory writable, if that is not meant")
            return
        try:
            kind = filesystem(file, Path("/proc/mounts").read_text())
        except OSError:  # not Linux
            yield ok(f"{file}; what filesystem that is on cannot be told here")
            return
        if kind in NETWORK_FILESYSTEMS:
            yield to_do(
                f"{file} is on a {kind} filesystem: its locks cannot be relied on, so that jobs can be lost "
                "or run twice",
                "move it to a local disk, or use PostgreSQL",
            )
        else:
            yield ok(f"{file} is on a local filesystem ({kind or 'unknown'})")

    def journal(self) -> Iterator[Answer]:
        mode, file = str(self._ask(healths.pragma, "journal_mode")), self._ask(healths.database_file)
        if mode != "wal" and self._database.dialect.may_only_be_read(self._database.engine.url):
            yield ok(f"journal_mode is {mode}, in a file that may only be read")
            return
        if mode != "wal":
            yield to_do(
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
            yield check(said, "end long reads, then PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            yield ok(f"journal_mode is WAL, the log has {size >> 10:,} KiB")

    def synchronous(self) -> Iterator[Answer]:
        level = int(self._ask(healths.pragma, "synchronous"))
        name = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}.get(level, str(level))
        remedy = "set PRAGMA synchronous = FULL on connections that enqueue"
        if level == 0:
            yield to_do("OFF: a loss of power can damage the database", remedy)
        elif level == 1:
            yield check("NORMAL: a loss of power can lose the jobs acknowledged last", remedy)
        else:
            yield ok(f"{name} on sqlq's own connections")

    def integrity(self) -> Iterator[Answer]:
        file = self._ask(healths.database_file)
        size = file.stat().st_size if file and file.exists() else 0
        if size > CHECKED_BYTES and not self._deep:
            yield ok(f"not checked: the file has {size >> 20:,} MiB; --deep reads all of it")
        elif complaints := self._ask(healths.quick_check):
            yield to_do(f"the file is damaged: {complaints[0]}", DAMAGED)
        else:
            yield ok("quick_check finds the file in order")


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
