"""Bad input gets one clear sentence before any write, and the caller's transaction goes on as if nothing had
been."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlq
from sqlq import EnqueueError
from sqlq.errors import ArgumentsError, ConfigurationError
from tests.kit import for_each, needs
from tests.kit.postgresql import async_database_url

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def unnamed() -> None: ...


async def asynchronous() -> None: ...


unnamed.__module__ = "__main__"


class Unknown:
    """A connection that sqlq does not know."""

    def cursor(self) -> None: ...


class Bad:
    """Mistakes of a caller, given an App with a task and an open session."""

    def __init__(self, app: Any, task: Any, session: Any) -> None:
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


MISTAKES: dict[type[Exception], list[tuple[Callable[[Bad], Any], str]]] = {
    ArgumentsError: [
        (lambda bad: bad.task.new(), "missing a required argument: 'order_id'"),
        (lambda bad: bad.task.new(1, 2, 3), "too many positional arguments"),
        (lambda bad: bad.task.new(1, nota=1), "unexpected keyword argument 'nota'"),
        (lambda bad: bad.task.new(None), "order_id is None, .* session.flush"),
        (lambda bad: bad.with_argument({"a": [float("nan")]}), r"shop.send: note\['a'\]\[0\] is nan"),
        (lambda bad: bad.with_argument(float("-inf")), "note is -inf, which JSON does not have"),
        (lambda bad: bad.with_argument([b"x"]), r"note\[0\] is b'x' of type bytes"),
        (lambda bad: bad.with_argument({1}), r"note is \{1\} of type set"),
        (lambda bad: bad.with_argument("a\0b"), "note holds a NUL"),
        (lambda bad: bad.with_argument("\ud800"), "note holds a NUL or a lone surrogate"),
        (lambda bad: bad.with_argument(CYCLE), "contains itself"),
        (lambda bad: bad.with_argument({1: 2}), "note has the key 1, but JSON's keys are text"),
        (lambda bad: bad.with_argument("x" * 2_000_000), "the arguments take 2,000,0.. bytes as JSON"),
        (lambda bad: bad.in_a_batch(bad.task.new(1, object())), "of type object"),
    ],
    EnqueueError: [
        (lambda bad: bad.with_options(available_at=datetime(2030, 1, 1)), "has no time zone"),  # noqa: DTZ001
        (lambda bad: bad.with_options(delay="5 minutes"), "delay is '5 minutes': write it as in"),
        (lambda bad: bad.with_options(timeout=5), "timeout is 5: give a timedelta"),
        (lambda bad: bad.with_options(priority=101), "priority is 101: it must be a whole number"),
        (lambda bad: bad.with_options(que="mail"), "set takes no que: it takes queue"),
        (lambda bad: bad.enqueue(bad.task), "not a Task: write app.enqueue"),
        (lambda bad: bad.enqueue(bad.task(1)), "not a NoneType: calling a task runs it here and now"),
        (
            lambda bad: bad.enqueue(asynchronous()),
            "not a coroutine: calling a task runs it here and now; write app.enqueue",
        ),
        (lambda bad: bad.enqueue([bad.task.new(1)]), "not a list: write app.enqueue"),
        (lambda bad: bad.enqueue("shop.send"), "not a str: write"),
        (lambda bad: bad.in_a_batch(bad.task), "not a Task"),
        (
            lambda bad: bad.app.enqueue_many(bad.task.new(1), session=bad.session),
            r"enqueue_many takes a list of what task.new\(…\) returns, not a NewJob",
        ),
        (
            lambda bad: bad.app.enqueue_many(bad.task, session=bad.session),
            "not a Task: write app.enqueue_many",
        ),
        (
            lambda bad: bad.with_options(unique_until="start"),
            'unique_until="start" is about a unique key: set unique_key together with it',
        ),
        (
            lambda bad: bad.on_the_drivers_cursor(),
            r"session is a sqlite3.Cursor: pass a Session or Connection of SQLAlchemy, or a connection of a",
        ),
        (
            lambda bad: bad.enqueue(bad.task.new(1), Unknown()),
            r"session is a .*Unknown: pass a Session or .* on any other run what app.statement",
        ),
        (lambda bad: bad.enqueue(bad.task.new(1), bad.session.get_bind()), "session is .*Engine.*: pass"),
        (lambda bad: bad.enqueue(bad.task.new(1), sessionmaker()), "session is .*sessionmaker.*: pass"),
        (lambda bad: bad.enqueue(bad.task.new(1), "sqlite:///shop.db"), "session is .*str.*: pass a Session"),
        (lambda bad: bad.enqueue(bad.task.new(1), AsyncSession()), "as in await app.aenqueue"),
    ],
    ConfigurationError: [
        (lambda bad: bad.app.task(que="mail"), "@app.task has no option que"),
        (lambda bad: bad.app.task(unnamed), "unnamed of __main__ cannot be imported"),
        (lambda bad: bad.app.task(lambda: None), "<lambda> of .* cannot"),
        (lambda bad: bad.app.task(name="shop.send")(unnamed), "two tasks are named 'shop.send'"),
        (lambda bad: bad.app.task(bad.task), "^shop.send is a task already: @app.task takes the function"),
        (lambda bad: bad.app.task(queue="mail")(bad.task), "^shop.send is a task already"),
    ],
    AttributeError: [
        (
            lambda bad: bad.task.delay(1),
            r"the task shop.send has no 'delay': write app.enqueue\(task.new\(…\)\)",
        )
    ],
}


@for_each(("kind", "go_wrong", "message"), [(kind, *row) for kind, rows in MISTAKES.items() for row in rows])
def test_a_mistake_leaves_the_transaction_usable(
    database_url: str, engine: Engine, kind: type[Exception], go_wrong: Callable[[Bad], Any], message: str
) -> None:
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
