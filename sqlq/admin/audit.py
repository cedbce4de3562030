"""`app.audit`: to see what operators did."""

from __future__ import annotations

import builtins
from functools import partial

from sqlq.admin.facet import Facet, for_asyncio
from sqlq.config.durations import Duration, milliseconds
from sqlq.model.checks import Rows
from sqlq.store import audit
from sqlq.store.audit import Action

__all__ = ["Action", "Audit"]


class Audit(Facet):
    """The actions of operators on a database, by the command line or by `app.acting_as`: `app.audit`."""

    def list(
        self,
        *,
        limit: Rows = 100,
        before: int | None = None,
        actor: str | None = None,
        action: str | None = None,
    ) -> builtins.list[Action]:
        """Return the newest actions, at most `limit`. `before` is the id of the oldest one seen, for the next
        page. `actor` and `action` choose, as in action="queues pause"."""
        return [*self._query(audit.listing, limit=limit, before=before, actor=actor, action=action)]

    alist = for_asyncio(list)

    def prune(self, older_than: Duration) -> int:
        """Delete the actions that began longer ago than that, as in "90d"; return how many. On PostgreSQL
        this takes the owner of the tables: no operator takes traces away."""
        work = partial(audit.prune, older_than_ms=milliseconds(older_than, "older_than"))
        self._database.require_tables()
        return self._to_the_end(work, audit.BATCH)
