"""`sqlq work --reload`: while code is being written, worker processes start anew with each change of it."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlq.errors import ConfigurationError

log = logging.getLogger("sqlq.worker")

PASSED_OVER = ("__pycache__", "node_modules", "site-packages")
"""Directories with code of others, beside those whose names begin with a dot."""
BEGIN_SECONDS = 30.0
STEP_MS = 100
"""The watch waits until so long nothing more has changed."""
SHOWN = 3


def start(roots: Sequence[Path], changed: Callable[[], None]) -> None:
    """Call `changed`, in a thread, each time that code in or below these directories has changed.

    Returns when they are watched, so that nothing is missed from then on. Raises `ConfigurationError` where
    they cannot be.
    """
    watch = _Watch(roots, changed)
    threading.Thread(target=watch.run, name="sqlq-reload", daemon=True).start()
    if not watch.begun.wait(BEGIN_SECONDS) or watch.failed is not None:
        named = ", ".join(map(str, roots))
        why = watch.failed or f"that takes longer than {BEGIN_SECONDS:g} s"
        raise ConfigurationError(
            f"--reload cannot watch {named}: {why}; name a directory with less below it, as in "
            "--reload-dir shop"
        )


class _Watch:
    def __init__(self, roots: Sequence[Path], changed: Callable[[], None]) -> None:
        try:
            import watchfiles
        except ImportError:
            raise ConfigurationError("--reload needs watchfiles: pip install 'sqlq[reload]'") from None
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        self._watch = watchfiles.watch
        self._roots = roots
        self._changed = changed
        self.begun = threading.Event()
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            for changes in self._watch(
                *self._roots,
                watch_filter=lambda change, path: is_code(Path(path), self._roots),
                step=STEP_MS,
                stop_event=self,
                raise_interrupt=False,
                ignore_permission_denied=True,
            ):
                files = sorted(Path(path) for _, path in changes)
                for file in files:
                    forget_compiled(file)
                log.info("%s: the worker processes start anew", _told(files, self._roots))
                self._changed()
        except Exception as error:
            self.failed = error
            log.debug("the code is not watched any more", exc_info=True)
        finally:
            self.begun.set()

    def is_set(self) -> bool:
        """Let the watch go on. It calls this in each round, the first time when it has begun."""
        self.begun.set()
        return False


def is_code(file: Path, roots: Sequence[Path]) -> bool:
    """Whether a change of this file means other code: one of Python, and not among what is installed or
    hidden."""
    if file.suffix != ".py":
        return False
    below = [file.relative_to(root).parts for root in roots if file.is_relative_to(root)]
    return any(not any(part.startswith(".") or part in PASSED_OVER for part in parts) for parts in below)


def forget_compiled(file: Path) -> None:
    """Remove what Python has kept of a module. It knows a change by size and time, in whole seconds, and two
    changes within one second may have the same of both."""
    try:
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)  # guard: no-stale-code
    except (OSError, NotImplementedError):
        pass  # nothing is kept here, or it is not ours to remove


def _told(files: Sequence[Path], roots: Sequence[Path]) -> str:
    near = [
        next((str(file.relative_to(root)) for root in roots if file.is_relative_to(root)), str(file))
        for file in files
    ]
    more = f" and {len(near) - SHOWN} more" if len(near) > SHOWN else ""
    return f"{', '.join(near[:SHOWN])}{more} changed"
