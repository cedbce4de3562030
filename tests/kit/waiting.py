"""How tests wait: for a condition, with a deadline. The only file of the tests that sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONGEST_WAIT = float(os.environ.get("SQLQ_TEST_LONGEST_WAIT", "inf"))
"""The most seconds of any wait. Without a guard a test mostly waits in vain, and should fail soon."""


def wait_until(condition: Callable[[], T], timeout: float = 120, what: str = "the condition") -> T:
    """Call `condition` until it returns something true, and return that.

    After `timeout` seconds the test fails and the message names `what` and the last value seen, since that is
    usually the answer. A condition that raises fails the test at once.
    """
    deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
    pause = 0.001
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s (last seen: {value!r})")
        time.sleep(pause)  # noqa: TID251 - waiting is what this file is for
        pause = min(pause * 2, 0.05)


def let_pass(seconds: float, why: str) -> None:
    """Let time pass where no event can be awaited: a fault that lasts, or a bound that is to be exceeded."""
    assert why
    time.sleep(seconds)  # noqa: TID251 - signed by `why`
