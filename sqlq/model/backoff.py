"""Backoff: how long a job waits after a failed attempt before the next one.

sqlq's own backoffs are data as well as callables, so that a job's row can name one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

from sqlq.config.durations import MAX_MS, Duration, milliseconds, readable
from sqlq.errors import ConfigurationError

Backoff = Callable[[int], Duration]
"""Takes the number of attempts made (1 after the first), and returns how long to wait before the next."""

Shape = Literal["exponential", "linear", "fibonacci", "list"]
BackoffOption = Backoff | Duration | Sequence[Duration]


@dataclass(frozen=True, slots=True)
class Curve:
    """The wait after each attempt: of a list one for each attempt, else grown from the first."""

    shape: Shape
    waits_ms: tuple[int, ...]
    cap_ms: int = MAX_MS
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"jitter is {self.jitter!r}: it is a share of the wait, from 0 to 1")

    def __call__(self, attempts: int) -> Duration:
        ms = self._plain_ms(max(attempts, 1)) * random.uniform(1 - self.jitter, 1 + self.jitter)
        return timedelta(milliseconds=round(min(ms, MAX_MS)))

    def _plain_ms(self, attempts: int) -> int:
        first = self.waits_ms[0]
        match self.shape:
            case "list":
                return self.waits_ms[min(attempts, len(self.waits_ms)) - 1]
            case "linear":
                return min(self.cap_ms, first * attempts)
            case "exponential":
                # the power is bounded before it is used: the millionth power of two has 300,000 digits
                return min(self.cap_ms, first << min(attempts - 1, 62))
            case "fibonacci":
                a, b = 1, 1
                for _ in range(min(attempts, 90) - 1):
                    a, b = b, a + b
                return min(self.cap_ms, first * a)

    def __str__(self) -> str:
        waits = ", ".join(readable(ms) for ms in self.waits_ms)
        if self.shape != "list":
            waits = f"{self.shape} from {waits} up to {readable(self.cap_ms)}"
        return waits + (f", varied by {self.jitter:.0%}" if self.jitter else "")


def exponential(first: Duration = "1s", cap: Duration = "1h", jitter: float = 0.2) -> Backoff:
    """Wait twice as long after each attempt; the default of every task.

    - `first`: the wait after the first attempt.
    - `cap`: the longest wait.
    - `jitter`: the share by which each wait varies, so that jobs do not return together.
    """
    return Curve("exponential", (milliseconds(first, "first"),), milliseconds(cap, "cap"), jitter)


def fixed(delay: Duration, jitter: float = 0.0) -> Backoff:
    """Wait `delay` every time."""
    return Curve("list", (milliseconds(delay, "delay"),), jitter=jitter)


def linear(step: Duration, cap: Duration = "1h", jitter: float = 0.2) -> Backoff:
    """Wait longer by one step after each attempt.

    - `step`: the wait after the first attempt.
    - `cap`: the longest wait.
    - `jitter`: the share by which each wait varies.
    """
    return Curve("linear", (milliseconds(step, "step"),), milliseconds(cap, "cap"), jitter)


def fibonacci(step: Duration = "1s", cap: Duration = "1h", jitter: float = 0.2) -> Backoff:
    """Wait 1, 1, 2, 3, 5, 8 … steps.

    - `step`: the wait after the first attempt.
    - `cap`: the longest wait.
    - `jitter`: the share by which each wait varies.
    """
    return Curve("fibonacci", (milliseconds(step, "step"),), milliseconds(cap, "cap"), jitter)


def backoff_from(option: BackoffOption | None) -> Backoff:
    """Return the backoff that an option stands for. None is the default, a duration a fixed wait. A list has
    one wait per attempt (the last one repeats), and a callable is taken as it is. Raises
    `ConfigurationError` for anything else."""
    if option is None:
        return exponential()
    if callable(option):
        return option
    if isinstance(option, str) or not isinstance(option, Sequence):
        return Curve("list", (milliseconds(option, "backoff"),))
    waits = tuple(milliseconds(d, f"backoff[{i}]") for i, d in enumerate(option))
    if not waits:
        raise ConfigurationError('backoff is an empty list: give at least one wait, as in ["10s", "5m"]')
    return Curve("list", waits)


def stored(option: Any, name: str) -> str:
    """Return a backoff as a job's row has it. Raises `ConfigurationError` for a function of the user's own:
    only code can hold it."""
    backoff = backoff_from(option)
    if not isinstance(backoff, Curve):
        raise ConfigurationError(
            f"{name} is {option!r}, a function, which a job's row cannot hold: give the job a duration, "
            "a list of durations, or one of sqlq.exponential, fixed, linear and fibonacci; a task takes "
            "functions"
        )
    return json.dumps(asdict(backoff))


def read(text: str) -> Backoff:
    """Return the backoff in a job's row: one of sqlq's own, or a duration or list of them. SQL may have
    inserted those as JSON. Raises `ConfigurationError` for anything else."""
    try:
        value = json.loads(text)
        if isinstance(value, str | list):
            return backoff_from(value)
        waits_ms = tuple(map(int, value["waits_ms"]))
        cap_ms = int(value["cap_ms"])
        if value["shape"] in get_args(Shape) and min(*waits_ms, cap_ms) >= 0:
            return Curve(value["shape"], waits_ms, cap_ms, float(value["jitter"]))
        raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise ConfigurationError(
            f'the backoff {text[:100]!r} in its row cannot be read: it is JSON such as "10s" or ["10s", "5m"]'
        ) from None
