"""`sqlq doctor` on the file of an SQLite database: its place, how it is written, whether it is whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sqlq.admin.doctor.finding import DAMAGED, Answers, Case, Check, check, ok, to_do, troubles
from sqlq.database.sqlite import health
from sqlq.database.sqlite.driver import may_only_be_read

LARGE_LOG_BYTES = 256 * 1024 * 1024
CHECKED_BYTES = 32 * 1024 * 1024
"""Files up to this size are checked, since that reads all of one."""
NETWORK_FILESYSTEMS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
    *("smb3", "smbfs", "vboxsf", "virtiofs"),
    *("fuse.ceph", "fuse.ceph-fuse", "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.gvfsd-fuse"),
    *("fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
)
MEND_COMMITS = "set PRAGMA synchronous = FULL on connections that enqueue"
DURABILITY = {
    "synchronous": {
        0: to_do("OFF: a loss of power can damage the database", MEND_COMMITS),
        1: check("NORMAL: a loss of power can lose the jobs acknowledged last", MEND_COMMITS),
    }
}


def file(case: Case) -> Answers:
    file = case.query(health.database_file)
    if file is None:
        yield check("could not look: SQLite names no file")
    elif may_only_be_read(case.database.engine.url):
        message = f"{file} may only be read: jobs can be looked at here, and neither enqueued nor claimed"
        yield check(message, "make the file and its directory writable, if that is not meant")
    elif (kind := _kind(file)) in NETWORK_FILESYSTEMS:
        yield to_do(
            f"{file} is on a {kind} filesystem: its locks cannot be relied on, so that jobs can be lost or "
            "run twice",
            "move it to a local disk, or use PostgreSQL",
        )
    else:
        yield ok(f"{file} is on a local filesystem, as far as is known ({kind or 'unknown'})")


def journal(case: Case) -> Answers:
    mode, size = case.query(health.pragma, "journal_mode"), case.query(health.wal_size)
    if mode != "wal" and not may_only_be_read(case.database.engine.url):
        yield to_do(
            f"journal_mode is {mode}, and cannot be changed to WAL: readers and the writer block each other",
            "make the file and its directory writable, on a local disk",
        )
    elif size > LARGE_LOG_BYTES:
        yield check(
            f"the log has grown to {size >> 20:,} MiB, as it does while a connection reads without an end",
            "end long reads, then PRAGMA wal_checkpoint(TRUNCATE)",
        )
    else:
        yield ok(f"journal_mode is {mode}, the log has {size >> 10:,} KiB")


def integrity(case: Case) -> Answers:
    size = case.query(health.size)
    if size > CHECKED_BYTES:
        yield ok(f"not checked: the file has {size >> 20:,} MiB; PRAGMA quick_check reads all of it")
    elif complaints := case.query(health.quick_check):
        yield to_do(f"the file is damaged: {complaints[0]}", DAMAGED)


CHECKS = (
    Check("file", file),
    Check("journal", journal),
    Check(
        "synchronous",
        partial(troubles, read=health.pragma, settings=DURABILITY),
        "sqlq's commits wait for the disk",
    ),
    Check("integrity", integrity, "quick_check finds the file in order"),
)


def _kind(file: Path) -> str | None:
    try:
        return filesystem(file, Path("/proc/mounts").read_text())
    except OSError:  # not Linux
        return None


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
