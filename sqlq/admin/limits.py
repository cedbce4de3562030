"""`app.limits`: to look at limits, and to set what a key allows until that is cleared."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from datetime import datetime
from functools import partial

from sqlalchemy import Connection

from sqlq.admin.facet import Facet, audited, for_asyncio
from sqlq.config.command_hint import command
from sqlq.config.durations import Duration
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.model.checks import Rows
from sqlq.model.limit import DeclaredLimits, Limit, LimitStatus, rule_of
from sqlq.model.retry import wait_of
from sqlq.store.limits import admit
from sqlq.store.limits.grant import Wake


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
        return self._change(
            key, partial(admit.reset, key=key, column="pinned_at", rule=self._declared.declared(key))
        )

    @audited("limits close")
    def close(self, key: str, *, until: datetime | Duration) -> LimitStatus:
        """Start no job of a key until a time, or for a duration such as "10m", on any worker. The
        later one of two ends counts; `open` ends it at once.

        Running jobs go on, and what a worker has claimed starts within a second, or waits, too. Raises
        `ConfigurationError` for a key that neither a job nor the App has.

        >>> app.limits.close("stripe", until="30s")  # doctest: +SKIP
        """
        delay_ms, at = wait_of(until, "until")
        end = Wake(key, delay_ms=delay_ms, moment=at)
        return self._change(key, partial(admit.shut, end=end, rule=self._declared.declared(key)))

    aclose = for_asyncio(close)

    @audited("limits open")
    def open(self, key: str) -> LimitStatus:
        """Let jobs of a closed key start again, at its ordinary rate. Raises `ConfigurationError` as `close`
        does."""
        return self._change(key, partial(admit.reset, key=key, column="closed_until"))

    aopen = for_asyncio(open)  # noqa: A003 - the method is meant, and operators say open for it

    def _change(self, key: str, change: Callable[[Connection], LimitStatus | None]) -> LimitStatus:
        self._declared.check_key(key)
        is_known = self._declared.declared(key) is not None or self._query(admit.status, key) is not None
        status = self._database.run(change) if is_known else None
        if status is None:
            raise ConfigurationError(
                f"there is no limit of the key {key!r}: {command('limits', self._database.engine.url)} shows "
                "those there are"
            )
        return status
