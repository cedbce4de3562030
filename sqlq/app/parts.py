"""The parts of an App for operators."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sqlq.app.connected import Connected
from sqlq.app.declare import Code

if TYPE_CHECKING:
    from sqlq.admin.audit import Audit
    from sqlq.admin.flows import Flows
    from sqlq.admin.jobs import Jobs
    from sqlq.admin.limits import Limits
    from sqlq.admin.queues import Queues
    from sqlq.admin.schedules import Schedules
    from sqlq.admin.workers import Workers


class Parts:
    """The parts of an App that look into its database and change what is there."""

    _code: Code
    _connected: Connected

    @property
    def jobs(self) -> Jobs:
        """The jobs in the database: to get, list, cancel, reschedule, retry, replay, delete and prune."""
        from sqlq.admin.jobs import Jobs

        code, connected = self._code, self._connected
        return connected.part(Jobs, code.tasks, code.events, connected.results)

    @property
    def queues(self) -> Queues:
        """The queues in the database: to see how full they are, to pause and resume them."""
        from sqlq.admin.queues import Queues

        return self._connected.part(Queues, self._code.queue_names)

    @property
    def workers(self) -> Workers:
        """The workers on the database, on whatever host: to list, pause, resume, stop and restart them."""
        from sqlq.admin.workers import Workers

        return self._connected.part(Workers)

    @property
    def flows(self) -> Flows:
        """The flows in the database: to get, list, cancel, retry and skip steps of them."""
        from sqlq.admin.flows import Flows

        return self._connected.part(Flows)

    @property
    def limits(self) -> Limits:
        """The limits in the database: to list, set and clear them."""
        from sqlq.admin.limits import Limits

        return self._connected.part(Limits, self._code.limits)

    @property
    def schedules(self) -> Schedules:
        """The schedules in the database: to list, add, pause, resume, run and remove them, at run time."""
        from sqlq.admin.schedules import Schedules

        connected = self._connected
        return connected.part(Schedules, connected.enqueuer, self._code.additions.template)

    @property
    def audit(self) -> Audit:
        """The record of what operators did: to list and to prune."""
        from sqlq.admin.audit import Audit

        return self._connected.part(Audit)

    def acting_as(self, actor: str) -> AbstractContextManager[None]:
        """Record each action on the parts of the App in a block as one of this person.

        A row of `app.audit` has its time, its name, its target and the number of rows. The block counts for
        its thread or asyncio task. Outside such blocks the library records nothing. Raises
        `ConfigurationError` for no name.

        >>> with app.acting_as("ada"):  # doctest: +SKIP
        ...     app.jobs.cancel(task="shop.send_receipt")
        """
        from sqlq.admin.facet import acting_as

        return acting_as(actor)
