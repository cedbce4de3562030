"""Where a test's jobs go: another database under the user's own App, and a worker that runs what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import URL
from sqlalchemy.exc import OperationalError

from sqlq.app import App
from sqlq.errors import SqlqError
from sqlq.worker.settle import Tally

_current: list[App] = []
"""The apps whose blocks a test is in, the innermost last. No ContextVar, for a test may look from another thread."""


@contextmanager
def on_database(app: App, url: str | URL, *, schema: str | None = None) -> Iterator[App]:
    """Point an App at another database, with sqlq's tables in it, while the block runs.

    The App stays the same object, so the code under test needs to know nothing. Jobs enqueued through a session go where
    the session goes: give it an engine on the same `url`. The tables are made where they are missing, and stay.
    `assert_enqueued` looks there without being told the App. Raises what `App(url)` and `App.migrate` raise.

    >>> with sqlq.testing.on_database(shop.app, f"sqlite:///{tmp_path}/test.db") as app:  # doctest: +SKIP
    ...     app.enqueue(send_receipt.new(7))
    """
    before = app.place
    app.use(url, schema=schema)
    _current.append(app)
    try:
        app.migrate()
        yield app
    finally:
        _current.remove(app)
        app.use(before.url, engine=before.engine, schema=before.schema)


@contextmanager
def current(app: App) -> Iterator[None]:
    """Make an App the one that `assert_enqueued` looks at, while the block runs."""
    _current.append(app)
    try:
        yield
    finally:
        _current.remove(app)


def current_app() -> App | None:
    """Return the App of the innermost block or fixture."""
    return _current[-1] if _current else None


def drain(app: App, queues: Sequence[str] | None = None) -> Tally:
    """Run every job that is available, and what these enqueue in turn, and return how many attempts ended how.

    A worker in this process does it, as `sqlq work --drain` would: `def` handlers run in threads, `async def` ones on an
    event loop, a failure is retried or ends in `failed_jobs`, and nothing is raised here. Only what is due is run: not a
    job with a delay, nor the next attempt of one that failed just now. Only committed jobs are seen, so commit first; on
    SQLite an open transaction that has written would keep the worker waiting, and is refused with `SqlqError`.

    >>> assert sqlq.testing.drain(app) == sqlq.testing.Tally(completed=2)  # doctest: +SKIP
    """
    try:
        with app.database.begin():
            pass  # on SQLite this takes the write lock, or finds that somebody keeps it
    except OperationalError as error:
        if app.database.dialect.name == "sqlite" and app.database.dialect.rolled_back(error):
            raise SqlqError("drain() cannot write: a transaction of this test is still open; commit it or roll it back first") from error
        raise
    return app.worker(queues, drain=True).run()
