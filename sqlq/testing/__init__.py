"""For the tests of those who use sqlq: run jobs inline, or enqueue for real, look at what was enqueued, and
drain.

    def test_order_is_confirmed(sqlq_app):                     # a fixture that comes with sqlq
        with sqlq.testing.inline(sqlq_app):                    # jobs run where they are enqueued
            place_order(...)

    def test_order_enqueues_a_receipt(sqlq_app, session):
        order = place_order(session, ...)
        sqlq.testing.assert_enqueued(send_receipt, args=[order.id], session=session)   # before any commit
        session.commit()
        assert sqlq.testing.drain(sqlq_app).completed == 1     # a worker runs all that is available, now

Imported lazily, as in `sqlq` itself: pytest loads the plugin `sqlq.testing.fixtures` in every project where
sqlq is installed, also where no test wants it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlq.testing.asserts import Enqueued, assert_enqueued, assert_not_enqueued
    from sqlq.testing.database import create_tables, drain, on_database, tick
    from sqlq.testing.inlining import Inline, InlineJob, inline
    from sqlq.worker.settle.settle import Tally

__all__ = [
    "Enqueued",
    "Inline",
    "InlineJob",
    "Tally",
    "assert_enqueued",
    "assert_not_enqueued",
    "create_tables",
    "drain",
    "inline",
    "on_database",
    "tick",
]

_ROOMS = {
    "Enqueued": "sqlq.testing.asserts",
    "Inline": "sqlq.testing.inlining",
    "InlineJob": "sqlq.testing.inlining",
    "Tally": "sqlq.worker.settle.settle",
    "assert_enqueued": "sqlq.testing.asserts",
    "assert_not_enqueued": "sqlq.testing.asserts",
    "create_tables": "sqlq.testing.database",
    "drain": "sqlq.testing.database",
    "inline": "sqlq.testing.inlining",
    "on_database": "sqlq.testing.database",
    "tick": "sqlq.testing.database",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        globals()[name] = getattr(import_module(_ROOMS[name]), name)
        return globals()[name]
    raise AttributeError(f"module 'sqlq.testing' has no attribute {name!r}")
