"""`app.limits`: to look at limits, and to set what a key allows until that is cleared."""

from __future__ import annotations

import builtins
from functools import partial

from sqlq.admin.facet import Facet, audited
from sqlq.config.command_hint import command
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.model.checks import Rows
from sqlq.model.limit import DeclaredLimits, Limit, LimitStatus, rule_of
from sqlq.store.limits import admit


class Limits(Facet):
    """The limits in a database: `app.limits`."""

    def __init__(self, database: Database, declared: DeclaredLimits) -> None:
        super().__init__(database)
        self._declared = declared

    def list(self, prefix: str | None = None, *, limit: Rows = 100) -> builtins.list[LimitStatus]:
        """Return the keys of limits, all or those that begin with `prefix`, in order, with what each allows
        and holds."""
        return self._query(admit.listing, prefix or "", limit)

    @audited("limits set")
    def set(self, key: str, *, running: int | None = None, rate: str | None = None) -> LimitStatus:
        """Set what a key allows, in place of what tasks declare, until `clear`. Raises `ConfigurationError`
        for a value out of range, and for a key whose jobs run in order.

        >>> app.limits.set("stripe", running=2)  # doctest: +SKIP
        """
        self._declared.check_key(key)
        self._database.require_tables()
        status = self._database.run(partial(admit.pin, key=key, rule=rule_of(Limit(key, running, rate))))
        assert status is not None
        return status

    @audited("limits clear")
    def clear(self, key: str) -> LimitStatus:
        """Have tasks define again what a key allows. Raises `ConfigurationError` for a key that is not
        known."""
        self._declared.check_key(key)
        status = self._query(admit.status, key) and self._database.run(
            partial(admit.unpin, key=key, rule=self._declared.declared(key))
        )
        if status is None:
            raise ConfigurationError(
                f"there is no limit of the key {key!r}: {command('limits', self._database.engine.url)} shows "
                "those there are"
            )
        return status
