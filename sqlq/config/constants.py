"""Defaults, limits, and where the database is found.

A change to a default changes how running installations behave: it is a decision, recorded in docs/decisions.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
DEFAULT_QUEUE: Final = "default"

MAX_ATTEMPTS: Final = 5
MAX_RELEASES: Final = 1_000
"""How often a job may be snoozed or released without the attempt counting; G3 bounds its claims by it."""

LEASE_MS: Final = 30_000
HEARTBEAT_MS: Final = 10_000
"""The longest time between two heartbeats, which are a worker's sign of life, too; short leases have three in
their length."""
HEARTBEATS_PER_LEASE: Final = 3
LEASE_MARGIN_MS: Final = 2_000
"""How long before the lease runs out by its own clock a worker stops trusting it."""
IDLE_TRANSACTION_MS: Final = LEASE_MS - HEARTBEAT_MS
"""How long a transaction of sqlq's own may be idle. A host that vanishes locks its rows no longer than its
leases last."""
RESCUE_MS: Final = 7_000
POLL_MS: Final = 1_000
POLLER_MS: Final = 1_250
"""How often an idle host polls. Together with its heartbeats and maintenance services that is one statement a
second."""
CONCURRENCY: Final = 10
ANSWER_SECONDS: Final = 30.0
"""How long one answer of PostgreSQL may take where no loop tries again: an enqueue, an operator's command."""
UNKNOWN_TASK_MS: Final = 24 * 3_600_000
"""How long a job of an unknown task returns to the queue before it fails: a rolling deploy is over by
then."""

MAX_NAME: Final = 255
PAYLOAD_BYTES: Final = 1024 * 1024
RESULT_BYTES: Final = 1024 * 1024
ERROR_BYTES: Final = 64 * 1024
NOTES_BYTES: Final = 16 * 1024
"""The longest history of a job, in characters, to which an attempt that did not count still adds a line."""
HEADERS_BYTES: Final = 16 * 1024
CURSOR_BYTES: Final = 64 * 1024
NOTE_CHARACTERS: Final = 255
"""The longest note beside a job's progress; a longer one is cut."""
PRIORITIES: Final = range(-100, 101)
LAST_ID: Final = 2**63 - 1

INTERRUPTED: Final = 130
"""The exit code after SIGINT, 128 + 2, as shells count it."""
