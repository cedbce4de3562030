"""Bad input gets one clear sentence before any write, and the caller's transaction goes on as if nothing had
been."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from typing import Any, cast

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlq
from sqlq import EnqueueError
from sqlq.errors import ArgumentsError, ConfigurationError
from tests.kit import for_each, needs
from tests.kit.postgresql import async_database_url
from tests.kit.sessions import Caller, async_session_of

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def unnamed() -> None: ...


unnamed.__module__ = "__main__"


class Unknown:
    """A connection that sqlq does not know."""

    def cursor(self) -> None: ...


class Bad:
    """Mistakes of a caller, given an App with a task and an open session."""

    def __init__(self, app: sqlq.App, task: sqlq.Task[..., Any], session: Any) -> None:
        self.app, self.task, self.session = app, task, session

    def enqueue(self, job: Any, session: Any = None) -> None:
        self.app.enqueue(job, session=session or self.session)

    def with_argument(self, value: Any) -> None:
        self.enqueue(self.task.new(1, note=value))

    def with_options(self, **options: Any) -> None:
        self.enqueue(self.task.new(1).set(**options))

    def on_the_drivers_cursor(self) -> None:
        with closing(sqlite3.connect(":memory:")) as connection:
            self.enqueue(self.task.new(1), connection.cursor())

    def in_a_batch(self, job: Any) -> None:
        """The jobs before a bad one are not written either."""
        self.app.enqueue_many(
            [self.task.new(1), self.task.new(2).set(unique_key="k"), job], session=self.session
        )


BAD: dict[str, tuple[Callable[[Bad], Any], type[Exception], str]] = {
    "no argument": (lambda bad: bad.task.new(), ArgumentsError, "missing a required argument: 'order_id'"),
    "too many arguments": (
        lambda bad: bad.task.new(1, 2, 3),
        ArgumentsError,
        "too many positional arguments",
    ),
    "an unknown argument": (
        lambda bad: bad.task.new(1, nota=1),
        ArgumentsError,
        "unexpected keyword argument 'nota'",
    ),
    "None for an id": (lambda bad: bad.task.new(None), ArgumentsError, "order_id is None, .* session.flush"),
    "NaN": (
        lambda bad: bad.with_argument({"a": [float("nan")]}),
        ArgumentsError,
        r"shop.send: note\['a'\]\[0\] is nan",
    ),
    "infinity": (
        lambda bad: bad.with_argument(float("-inf")),
        ArgumentsError,
        "note is -inf, which JSON does not have",
    ),
    "bytes": (lambda bad: bad.with_argument([b"x"]), ArgumentsError, r"note\[0\] is b'x' of type bytes"),
    "a set": (lambda bad: bad.with_argument({1}), ArgumentsError, r"note is \{1\} of type set"),
    "NUL": (lambda bad: bad.with_argument("a\0b"), ArgumentsError, "note holds a NUL"),
    "a lone surrogate": (
        lambda bad: bad.with_argument("\ud800"),
        ArgumentsError,
        "note holds a NUL or a lone surrogate",
    ),
    "a cycle": (lambda bad: bad.with_argument(CYCLE), ArgumentsError, "contains itself"),
    "a key that is no text": (
        lambda bad: bad.with_argument({1: 2}),
        ArgumentsError,
        "note has the key 1, but JSON's keys are text",
    ),
    "too large": (
        lambda bad: bad.with_argument("x" * 2_000_000),
        ArgumentsError,
        "the arguments take 2,000,0.. bytes as JSON",
    ),
    "a naive moment": (
        lambda bad: bad.with_options(available_at=datetime(2030, 1, 1)),  # noqa: DTZ001 - naive on purpose
        EnqueueError,
        "has no time zone",
    ),
    "a bad delay": (
        lambda bad: bad.with_options(delay="5 minutes"),
        EnqueueError,
        "delay is '5 minutes': write it as in",
    ),
    "a bad timeout": (
        lambda bad: bad.with_options(timeout=5),
        EnqueueError,
        "timeout is 5: give a timedelta",
    ),
    "a priority out of range": (
        lambda bad: bad.with_options(priority=101),
        EnqueueError,
        "priority is 101: it must be a whole number",
    ),
    "an unknown option": (
        lambda bad: bad.with_options(que="mail"),
        EnqueueError,
        "set takes no que: it takes queue",
    ),
    "an unknown option of a task": (
        lambda bad: cast(Any, bad.app).task(que="mail"),
        ConfigurationError,
        "@app.task has no option que",
    ),
    "a function from __main__": (
        lambda bad: bad.app.task(unnamed),
        ConfigurationError,
        "unnamed of __main__ cannot be imported",
    ),
    "a lambda": (
        lambda bad: bad.app.task(lambda: None),
        ConfigurationError,
        "<lambda> of .* cannot",
    ),
    "a duplicate name": (
        lambda bad: bad.app.task(name="shop.send")(unnamed),
        ConfigurationError,
        "two tasks are named 'shop.send'",
    ),
    "the task itself": (lambda bad: bad.enqueue(bad.task), EnqueueError, "not a Task: write app.enqueue"),
    "the task's result": (
        lambda bad: bad.enqueue(bad.task(1)),
        EnqueueError,
        "not a NoneType: calling a task runs it here and now",
    ),
    "a list": (lambda bad: bad.enqueue([bad.task.new(1)]), EnqueueError, "not a list: write app.enqueue"),
    "a name": (lambda bad: bad.enqueue("shop.send"), EnqueueError, "not a str: write"),
    "one bad job of a batch": (lambda bad: bad.in_a_batch(bad.task), EnqueueError, "not a Task"),
    "a bad job at the end of a batch": (
        lambda bad: bad.in_a_batch(bad.task.new(1, object())),
        ArgumentsError,
        "of type object",
    ),
    "one job for many": (
        lambda bad: bad.app.enqueue_many(bad.task.new(1), session=bad.session),  # type: ignore[arg-type]
        EnqueueError,
        r"enqueue_many takes a list of what task.new\(…\) returns, not a NewJob",
    ),
    "a task for many": (
        lambda bad: bad.app.enqueue_many(bad.task, session=bad.session),  # type: ignore[arg-type]
        EnqueueError,
        "not a Task: write app.enqueue_many",
    ),
    "until the start of nothing": (
        lambda bad: bad.with_options(unique_until="start"),
        EnqueueError,
        'unique_until="start" is about a unique key: set unique_key together with it',
    ),
    "a task of a task": (
        lambda bad: bad.app.task(bad.task),
        ConfigurationError,
        "^shop.send is a task already: @app.task takes the function",
    ),
    "a task of a task, with options": (
        lambda bad: bad.app.task(queue="mail")(bad.task),
        ConfigurationError,
        "^shop.send is a task already",
    ),
    "another queue's way": (
        lambda bad: cast(Any, bad.task).delay(1),
        AttributeError,
        r"the task shop.send has no 'delay': write app.enqueue\(task.new\(…\)\)",
    ),
    "a cursor of sqlite3": (
        lambda bad: bad.on_the_drivers_cursor(),
        EnqueueError,
        r"session is a sqlite3.Cursor: pass a Session or Connection of SQLAlchemy, or a connection of a",
    ),
    "a connection of another library": (
        lambda bad: bad.enqueue(bad.task.new(1), Unknown()),
        EnqueueError,
        r"session is a .*Unknown: pass a Session or .* on any other run what app.statement",
    ),
    "an engine": (
        lambda bad: bad.enqueue(bad.task.new(1), bad.session.get_bind()),
        EnqueueError,
        "session is .*Engine.*: pass",
    ),
    "a sessionmaker": (
        lambda bad: bad.enqueue(bad.task.new(1), sessionmaker()),
        EnqueueError,
        "session is .*sessionmaker.*: pass",
    ),
    "a URL": (
        lambda bad: bad.enqueue(bad.task.new(1), "sqlite:///shop.db"),
        EnqueueError,
        "session is .*str.*: pass a Session",
    ),
    "an asynchronous session": (
        lambda bad: bad.enqueue(bad.task.new(1), AsyncSession()),
        EnqueueError,
        "as in await app.aenqueue",
    ),
}


@for_each("mistake", BAD)
def test_a_mistake_leaves_the_transaction_usable(database_url: str, engine: Engine, mistake: str) -> None:
    go_wrong, kind, message = BAD[mistake]
    app = sqlq.App(database_url)

    @app.task(name="shop.send")
    def send(order_id: int, note: Any = None) -> None: ...

    with Session(engine) as session:
        first = app.enqueue(send.new(1), session=session)
        with pytest.raises(kind, match=message) as refusal:
            go_wrong(Bad(app, send, session))
        sentence = str(refusal.value)
        assert "\n" not in sentence
        assert len(sentence) < 500
        last = app.enqueue(send.new(2), session=session)
        session.commit()
        assert list(session.scalars(text("SELECT id FROM jobs ORDER BY id"))) == [first.id, last.id]
        session.execute(text("DELETE FROM jobs"))
        session.commit()
    assert list(app.tasks) == ["shop.send"]
    app.close()


def test_an_asynchronous_mistake_leaves_the_transaction_usable(app: sqlq.App, database_url: str) -> None:
    @app.task(name="shop.send")
    async def send(order_id: int) -> None: ...

    with Caller(database_url, async_session_of(database_url)) as caller:
        first = caller.enqueue(app, send.new(1))
        with pytest.raises(
            EnqueueError, match=r"not a coroutine: calling a task runs it here and now; write app.enqueue"
        ):
            caller.enqueue(app, send(1))  # type: ignore[arg-type]  # what is refused here
        with pytest.raises(EnqueueError, match="not a Task"):
            caller.enqueue_many(app, [send.new(1), send])  # type: ignore[list-item]
        last = caller.enqueue(app, send.new(2))
        caller.commit()
        assert list(caller.execute("SELECT id FROM jobs ORDER BY id").scalars()) == [first.id, last.id]


def test_a_synchronous_session_is_refused_where_an_asynchronous_one_belongs(
    app: sqlq.App, database_url: str, engine: Engine
) -> None:
    import asyncio

    task = app.task(name="shop.send")(functools.partial(print))
    for session in (Session(engine), engine, create_async_engine(async_database_url(database_url))):
        with pytest.raises(
            EnqueueError,
            match=r"an awaited call takes an AsyncSession, an AsyncConnection or .*, not an? .*(Session|Eng)",
        ):
            asyncio.run(app.aenqueue(task.new(), session=session))  # type: ignore[arg-type]


def test_a_session_on_an_unsupported_database_is_refused(app: sqlq.App) -> None:
    engine = create_engine("sqlite://")
    engine.dialect.name = "mysql"
    task = app.task(name="shop.send")(print)
    with (
        engine.connect() as conn,
        pytest.raises(sqlq.errors.UnsupportedDatabaseError, match="this session is connected to mysql"),
    ):
        app.enqueue(task.new(), session=conn)
    engine.dispose()


@needs("mariadb")
def test_mariadb_by_the_name_of_mysql_is_refused_in_a_sentence(app: sqlq.App, database_url: str) -> None:
    engine = create_engine(make_url(database_url).set(drivername="mysql+pymysql"))
    task = app.task(name="shop.send")(print)
    says = r"mysql: for MariaDB write mariadb\+pymysql://"
    with Session(engine) as session, pytest.raises(sqlq.errors.UnsupportedDatabaseError, match=says):
        app.enqueue(task.new(), session=session)
    with pytest.raises(sqlq.errors.UnsupportedDatabaseError, match=says):
        sqlq.App(engine=engine).enqueue(task.new())
    engine.dispose()
