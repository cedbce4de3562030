"""For the tests of those who use sqlq: run jobs inline, or enqueue for real, look at what was enqueued, and
drain.

    def test_order_is_confirmed(sqlq_app):                     # a fixture that comes with sqlq
        with sqlq.testing.inline(sqlq_app):                    # jobs run where they are enqueued
            place_order(...)

    def test_order_enqueues_a_receipt(sqlq_app, session):
        order = place_order(session, ...)
        sqlq.testing.assert_enqueued(send_receipt, args=[order.id], session=session)   # before any commit
        session.commit()
        assert sqlq.testing.drain(sqlq_app).finished == 1     # a worker runs all that is available, now

Imported lazily, as in `sqlq` itself: pytest loads the plugin `sqlq.testing.fixtures` in every project where
sqlq is installed, also where no test wants it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlq.app.here import InlineJob
    from sqlq.testing.asserts import Enqueued, assert_enqueued, assert_not_enqueued
    from sqlq.testing.database import adrain, create_tables, drain, on_database, tick
    from sqlq.testing.inlining import Inline, inline
    from sqlq.worker.settle.settle import Counts

__all__ = [
    "Counts",
    "Enqueued",
    "Inline",
    "InlineJob",
    "adrain",
    "assert_enqueued",
    "assert_not_enqueued",
    "create_tables",
    "drain",
    "inline",
    "on_database",
    "tick",
]

_MODULES = {
    "app.here": "InlineJob",
    "testing.asserts": "Enqueued assert_enqueued assert_not_enqueued",
    "testing.database": "adrain create_tables drain on_database tick",
    "testing.inlining": "Inline inline",
    "worker.settle.settle": "Counts",
}
"""The public names, by the module of sqlq that defines them."""
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"sqlq.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'sqlq.testing' has no attribute {name!r}")
