"""Sentry: `instrument(app)` makes one issue of each job that has failed for good. Needs sentry-sdk, which
comes with `pip install 'sqlq[sentry]'`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sqlq.errors import ConfigurationError
from sqlq.events import JobEvent

try:
    import sentry_sdk
    from sentry_sdk.scope import Scope, add_global_event_processor
except ImportError:
    raise ConfigurationError("sqlq.sentry needs sentry-sdk: pip install 'sqlq[sentry]'") from None

if TYPE_CHECKING:
    from sqlq.app.app import App
    from sqlq.worker.attempt.context import JobContext

REMEMBERED = 1_000
"""For at most this many failed attempts the scope is kept until their `failed` event arrives."""

_instrumented: WeakSet[App] = WeakSet()


def instrument(app: App) -> None:
    """Send Sentry an event for each job that fails for good, with the tags `sqlq.task`, `sqlq.queue`,
    `sqlq.job`, `sqlq.attempt` and `sqlq.reason`.

    Call it once, in the module that makes the App; `sentry_sdk.init` is the application's to call, before or
    after. Each attempt has a scope of its own. Its breadcrumbs and tags go with the event, and with events
    that the handler sends itself. The error's line in the log makes no second event. An attempt that another
    one follows makes none. In a process with several Apps, instrument all. Arguments of jobs are not sent.
    Raises `ConfigurationError` for a second call.

    >>> instrument(app)  # doctest: +SKIP
    """
    if app in _instrumented:
        raise ConfigurationError("sqlq.sentry.instrument was called a second time for this App: call it once")
    _leave_lines_out()
    _instrumented.add(app)
    scopes = _Scopes()
    app.around(scopes.attempt)
    app.on("failed")(scopes.failed)


@cache
def _leave_lines_out() -> None:
    """Have Sentry pass its events of log lines to `_without_lines`, once in a process."""
    add_global_event_processor(_without_lines)


def _without_lines(event: Any, hint: dict[str, Any]) -> Any:
    """Leave out Sentry's event of the log line of a job that failed for good. The event with its tags is sent
    besides."""
    record = hint.get("log_record")
    if record is None or not _instrumented or record.name != "sqlq.worker" or not hasattr(record, "job_id"):
        return event
    # guard: one-issue-for-a-failure
    return None if getattr(record, "event", None) == "failed" else event


class _Scopes:
    def __init__(self) -> None:
        self._lock = Lock()
        self._of: OrderedDict[tuple[int, int], Scope] = OrderedDict()
        """By id and number of the attempt."""

    @contextmanager
    def attempt(self, running: JobContext) -> Iterator[None]:
        with sentry_sdk.isolation_scope() as scope:
            _name(scope, running.id, running.task, running.queue, running.attempts)
            try:
                yield
            except Exception:
                self._remember((running.id, running.attempts), scope)
                raise

    def failed(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            with self._lock:
                known = self._of.pop((event.id, event.attempt), None)
            with sentry_sdk.isolation_scope() as scope:
                scope.clear_breadcrumbs()  # this thread's are of no job
                if known is not None:
                    scope.update_from_scope(known)
                _name(scope, event.id, event.task, event.queue, event.attempt)
                scope.set_tag("sqlq.reason", event.reason or "error")
                sentry_sdk.capture_exception(event.exception)

    def _remember(self, attempt: tuple[int, int], scope: Scope) -> None:
        with self._lock:
            self._of[attempt] = scope
            if len(self._of) > REMEMBERED:
                self._of.popitem(last=False)


def _name(scope: Scope, id: int, task: str, queue: str, attempt: int) -> None:
    """Put the job's names into its scope."""
    scope.set_transaction_name(task)
    tags = {"sqlq.job": str(id), "sqlq.task": task, "sqlq.queue": queue, "sqlq.attempt": str(attempt)}
    for tag, value in tags.items():
        scope.set_tag(tag, value)
