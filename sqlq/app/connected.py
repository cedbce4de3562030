"""All parts of an App that depend on where its database is."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlq.app.code import Code
from sqlq.database.database import Address, Database
from sqlq.enqueue.enqueue import Enqueuer
from sqlq.results.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlq.admin.flows import Flows
    from sqlq.admin.jobs import Jobs
    from sqlq.admin.limits import Limits
    from sqlq.admin.queues import Queues
    from sqlq.admin.schedules import Schedules
    from sqlq.admin.workers import Workers


class Connected:
    """The parts of an App for one address. `App.use` replaces it as a whole. Each part is made when it is
    first used."""

    def __init__(self, address: Address, code: Code, here: Callable[[], Any]) -> None:
        """`here` returns the enqueuer of the jobs that run in this process; None without one."""
        self.address = address
        self._code = code
        self._here = here

    @cached_property
    def database(self) -> Database:
        """sqlq's own connections to the database."""
        return self.address.open()

    @cached_property
    def enqueuer(self) -> Enqueuer:
        """Writes jobs to the database."""
        return Enqueuer(self.database, self._code.events)

    @cached_property
    def results(self) -> Results:
        """Results and states of jobs."""
        return Results(self.database, self._code.tasks, self._here)

    @cached_property
    def jobs(self) -> Jobs:
        """See `App.jobs`."""
        from sqlq.admin.jobs import Jobs

        code = self._code
        return Jobs(self.database, code.tasks, code.events, code.stamps, self.results)

    @cached_property
    def queues(self) -> Queues:
        """See `App.queues`."""
        from sqlq.admin.queues import Queues

        return Queues(self.database, self._code.queue_names)

    @cached_property
    def workers(self) -> Workers:
        """See `App.workers`."""
        from sqlq.admin.workers import Workers

        return Workers(self.database)

    @cached_property
    def flows(self) -> Flows:
        """See `App.flows`."""
        from sqlq.admin.flows import Flows

        return Flows(self.database)

    @cached_property
    def limits(self) -> Limits:
        """See `App.limits`."""
        from sqlq.admin.limits import Limits

        return Limits(self.database, self._code.limits)

    @cached_property
    def schedules(self) -> Schedules:
        """See `App.schedules`."""
        from sqlq.admin.schedules import Schedules

        return Schedules(self.database, self.enqueuer, self._code.additions.template)

    def close(self) -> None:
        """Close the parts that were used."""
        for name in ("results", "enqueuer", "database"):
            if name in self.__dict__:
                getattr(self, name).close()
