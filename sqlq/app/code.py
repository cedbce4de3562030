"""All that the code of an App declares, and the options it was made with, wherever its database is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from sqlq.app.options import Defaults, retention_ms
from sqlq.config.durations import Duration
from sqlq.config.urls import DirectCalls
from sqlq.enqueue.prepare import Additions, Stamps
from sqlq.errors import ConfigurationError
from sqlq.events import Events
from sqlq.model.checks import checked_name, checked_word
from sqlq.model.job import Kept
from sqlq.model.limit import DeclaredLimits, Limit
from sqlq.model.middleware import Scope
from sqlq.model.schedule import Declarations
from sqlq.model.task import Registry


class Code:
    """The tasks, limits, schedules, middleware and listeners of an App, and its defaults."""

    def __init__(
        self,
        app: Any,
        *,
        retention: Duration | Kept | None,
        defaults: Mapping[str, Any] | None,
        queues: Mapping[str, Mapping[str, Any]] | None,
        carry: Sequence[ContextVar[Any]],
        service: str | None,
        direct_calls: DirectCalls,
    ) -> None:
        self.retention_ms = retention_ms(retention)
        self.defaults = Defaults(defaults, queues)
        self.direct_calls = checked_word(direct_calls, "direct_calls", DirectCalls, ConfigurationError)
        self.stamps = Stamps(carry)
        self.tasks = Registry(app, always=[scope] if (scope := self.stamps.scope()) else ())
        self.limits = DeclaredLimits()
        self.fair: Limit | None = None
        """The limit of tasks that have none of their own."""
        self.additions = Additions(self.tasks, self.limits, self.stamps)
        self.schedules = Declarations(
            None if service is None else checked_name(service, "service", ConfigurationError)
        )
        self.lifespan: Scope | None = None
        """The middleware of each process that runs handlers."""
        self.events = Events()

    def queue_names(self) -> frozenset[str]:
        """Return the queues that its tasks and its options name."""
        return self.defaults.queues | {task.queue for task in self.tasks.values()}
