"""The profiles of connections: their timeouts and other options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlq.config.constants import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    LISTEN_ANSWER_SECONDS,
    LOOK_ANSWER_SECONDS,
    LOOK_MS,
    LOOP_ANSWER_SECONDS,
    LOOP_CONNECT_SECONDS,
    LOOP_MAX_ANSWER_SECONDS,
)


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


ANY = Use(ANSWER_SECONDS, ANSWER_SECONDS, CONNECT_SECONDS, pre_ping=True)
LOOPS = Use(LOOP_ANSWER_SECONDS, LOOP_MAX_ANSWER_SECONDS, LOOP_CONNECT_SECONDS)
CLAIMS = replace(LOOPS, plan_once=True)
LOOKS = Use(LOOK_ANSWER_SECONDS, LOOK_ANSWER_SECONDS, LOOP_CONNECT_SECONDS, pre_ping=True, read_ms=LOOK_MS)
LISTENING = Use(LISTEN_ANSWER_SECONDS, LISTEN_ANSWER_SECONDS, LOOP_CONNECT_SECONDS, plan_once=True)
