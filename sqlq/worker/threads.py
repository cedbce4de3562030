"""Threads of one `sqlq work`, which may serve several Apps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar

serving: ContextVar[str | None] = ContextVar("sqlq_serving", default=None)
"""The name of the App that a thread serves, where there are several. Lines of the log begin with it."""


def thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Return a thread, not started yet, that serves the App of this one. It has nothing else of the caller's
    context."""
    app = serving.get()

    def run() -> None:
        serving.set(app)
        target()

    return threading.Thread(target=run, name=name, daemon=True)
