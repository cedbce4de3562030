"""Defaults, limits, and where the database is found.

A change to a default changes how running installations behave: it is a decision, recorded in docs/decisions.
"""

VERSION = "0.1.0"
DEFAULT_QUEUE = "default"
WAIT_TASK = "sqlq.wait"
"""The task of a step that waits for a signal, which no worker runs."""

MAX_ATTEMPTS = 5
MAX_RELEASES = 1_000
"""How often a job may be snoozed or released without the attempt counting; G3 bounds its claims by it."""

LEASE_MS = 30_000
HEARTBEAT_MS = 10_000
"""The longest time between two heartbeats, which are a worker's sign of life, too; short leases have three in
their length."""
HEARTBEATS_PER_LEASE = 3
LEASE_MARGIN_MS = 2_000
"""How long before the lease runs out by its own clock a worker stops trusting it."""
IDLE_TRANSACTION_MS = LEASE_MS - HEARTBEAT_MS
"""How long a transaction of sqlq's own may be idle. A host that vanishes locks its rows no longer than its
leases last."""
RESCUE_MS = 7_000
POLL_MS = 1_000
POLLER_MS = 1_250
"""How often an idle host polls. Together with its heartbeats and maintenance services that is one statement a
second."""
CONCURRENCY = 10
ANSWER_SECONDS = 30.0
"""How long one answer of PostgreSQL may take where no loop tries again: an enqueue, an operator's command."""
UNKNOWN_TASK_MS = 24 * 3_600_000
"""How long a job of an unknown task returns to the queue before it fails: a rolling deploy is over by
then."""

MAX_NAME = 255
PAYLOAD_BYTES = 1024 * 1024
RESULT_BYTES = 1024 * 1024
ERROR_BYTES = 64 * 1024
NOTES_BYTES = 16 * 1024
"""The longest history of a job, in characters, to which an attempt that did not count still adds a line."""
HEADERS_BYTES = 16 * 1024
CURSOR_BYTES = 64 * 1024
STEPS_BYTES = 8 * 1024 * 1024
"""The values of all steps of a job; each claim reads them. Servers take packets of 16 MiB."""
NOTE_CHARACTERS = 255
"""The longest note beside a job's progress; a longer one is cut."""
PRIORITIES = range(-100, 101)
LAST_ID = 2**63 - 1

INTERRUPTED = 130
"""The exit code after SIGINT, 128 + 2, as shells count it."""
