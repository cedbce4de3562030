"""Collects the figures of the fault tests for the scorecard that `python -m tests.faults` prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "SQLQ_TEST_SCORECARD"
"""Names the file that records go to; without it nothing is recorded."""

ROUNDS = "SQLQ_TEST_FAILOVERS"
"""How many rounds of failovers of Patroni are run; 3 without it."""

MUST_BE_ZERO = {
    "lost": "jobs lost",
    "never_committed": "jobs run whose transaction was rolled back",
    "stale_settles_accepted": "stale settles accepted",
    "overlaps": "overlaps while the lease was renewed",
    "effects_difference": "difference of effects (writes per completed job)",
    "illegal_transitions": "illegal transitions",
    "early": "jobs started early",
    "told_wrong": "waiters who were told something else than what became of their job",
    "lock_errors": "lock errors from sqlq's own transactions",
    "follow_ups_lost": "follow-ups lost",
    "follow_ups_doubled": "follow-ups doubled",
    "ticks_lost": "ticks lost",
    "ticks_doubled": "ticks doubled",
    "slices_lost": "slices of long jobs lost",
    "slices_doubled": "slices of long jobs doubled",
    "steps_lost": "steps of flows lost",
    "steps_unblocked_twice": "steps of flows unblocked twice",
    "late_unblocks": "steps of flows unblocked later than a sweep",
    "over_the_limit": "jobs of a limit run beyond its number at once",
    "out_of_order": "serial jobs out of order",
    "damaged": "databases that failed their integrity check",
}
"""Figures that are added up, and of which the sum has to be zero."""

DISTRIBUTIONS = {
    "recovery_seconds": "recovery, s",
    "resume_seconds": "resuming after an outage, s",
    "exit_seconds": "leaving when told to, s",
    "failover_seconds": "from the first write of a new primary to the next job's start, s",
    "lone_seconds": "from a lone enqueue after a failover to the job's start, s",
}
"""Figures that are lists of samples, of which p50, p99 and the largest are shown."""


def record(guarantee: str, **figures: object) -> None:
    """Append the figures of a test as one line of JSON to the file in SQLQ_TEST_SCORECARD, if it is set.

    `guarantee` is the contract's, or words of one's own. Figures of `MUST_BE_ZERO` are whole numbers, those
    of `DISTRIBUTIONS` lists of seconds. `cases` is how many were tried. `seed` and others are shown as they
    are.
    """
    file = os.environ.get(VARIABLE)
    if file is None:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    with Path(file).open("a") as lines:
        lines.write(json.dumps({"guarantee": guarantee, "test": test, **figures}) + "\n")
