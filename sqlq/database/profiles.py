"""The profiles of connections: their timeouts and other options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlq.config.constants import ANSWER_SECONDS


@dataclass(frozen=True, slots=True)
class Use:
    """A profile of connections: their timeouts and other options."""

    answer_seconds: float
    max_answer_seconds: float
    connect_seconds: int
    pre_ping: bool = False
    """Whether to check a pooled connection before each use. Loops do without, since they retry anyway."""
    plan_once: bool = False
    """Whether prepared statements are planned once, and by indexes alone."""
    read_ms: int | None = None
    """The timeout of a statement that only reads."""


ANY = Use(ANSWER_SECONDS, ANSWER_SECONDS, connect_seconds=10, pre_ping=True)
LOOPS = Use(4.0, 64.0, connect_seconds=3)
"""For a worker's loops, which try again. With the waits between tries they go on within five seconds after a
network that swallowed packets works again."""
CLAIMS = replace(LOOPS, plan_once=True)
LOOKS = Use(5.0, 5.0, connect_seconds=3, pre_ping=True, read_ms=2_000)
"""For pages that people look at."""
LISTENING = Use(5.0, 5.0, connect_seconds=3, plan_once=True)
