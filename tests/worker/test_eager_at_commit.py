"""`eager=True`: what is enqueued runs in this process when its transaction commits, and never when it is
rolled back, as a worker would have it.

Savepoints, callers on a loop and handlers that enqueue are those of `inline(app, at="commit")`, in
tests/faces/test_inline_at_commit.py: one class waits for the commits of both."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlq
from sqlq.app.inline import REMEMBERED
from sqlq.testing import assert_enqueued, drain, on_database
from tests.kit import execute
from tests.kit.drivers import Caller as DriverCaller
from tests.kit.drivers import Mode, modes
from tests.kit.flows import OrderShop
from tests.kit.sessions import Caller, Way, common_ways


@pytest.fixture
def eager(app: sqlq.App, database_url: str) -> Iterator[sqlq.App]:
    """An App in this mode, on a database with tables."""
    with closing(sqlq.App(database_url, eager=True)) as eager:
        yield eager


@pytest.fixture
def shop(eager: sqlq.App, engine: Engine) -> OrderShop:
    execute(engine, "CREATE TABLE orders (id integer PRIMARY KEY)")
    return OrderShop(eager, engine, max_attempts=1)


class TestEveryWay:
    @pytest.fixture
    def caller(self, shop: OrderShop, database_url: str, way: Way) -> Iterator[Caller]:
        with Caller(database_url, way) as caller:
            yield caller

    @common_ways
    def test_a_job_runs_after_the_commit_and_nothing_is_written(
        self, shop: OrderShop, caller: Caller
    ) -> None:
        caller.execute("INSERT INTO orders (id) VALUES (1)")
        first = caller.enqueue(shop.app, shop.count.new("first"))
        (second,) = caller.enqueue_many(shop.app, [shop.note.new("second")])
        assert (shop.done, first.state, first.created) == ([], "available", True)
        with pytest.raises(sqlq.WaitTimeoutError, match="when its transaction commits"):
            shop.app.result(second)
        caller.commit()
        assert shop.done == [("first", 1), "second"]
        assert shop.app.result(second) == shop.app.result(second.id) == "SECOND"
        assert shop.app.jobs.list() == []
        caller.enqueue(shop.app, shop.note.new("in the next transaction"))
        caller.commit()
        assert shop.done[2:] == ["in the next transaction"]

    @common_ways
    def test_a_rollback_runs_nothing(self, shop: OrderShop, caller: Caller) -> None:
        job = caller.enqueue(shop.app, shop.note.new("rolled back"))
        caller.rollback()
        caller.enqueue(shop.app, shop.note.new("committed"))
        caller.commit()
        assert shop.done == ["committed"]
        assert shop.app._connected.results.job_here(job.id) is None

    @common_ways
    def test_an_exception_of_a_job_is_logged_and_keeps_the_commit(
        self, shop: OrderShop, caller: Caller, caplog: pytest.LogCaptureFixture
    ) -> None:
        caller.execute("INSERT INTO orders (id) VALUES (1)")
        bad = caller.enqueue(shop.app, shop.bad.new("1"))
        caller.enqueue(shop.app, shop.count.new("2"))
        caller.commit()
        assert shop.done == ["1", ("2", 1)]
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.getMessage() == (
            "shop.bad, run eagerly when its transaction had committed, failed in attempt 1 of 1"
        )
        assert record.exc_info is not None
        assert str(record.exc_info[1]) == "no order 1"
        with pytest.raises(sqlq.JobFailedError, match="no order 1"):
            shop.app.result(bad)


class TestDrivers:
    @pytest.fixture
    def caller(self, shop: OrderShop, database_url: str, mode: Mode) -> Iterator[DriverCaller]:
        with DriverCaller(database_url, mode) as caller:
            yield caller

    @modes()
    def test_a_connection_without_commit_events_is_refused(
        self, shop: OrderShop, caller: DriverCaller
    ) -> None:
        caller.begin()
        caller.execute("INSERT INTO orders (id) VALUES (1)")
        refused = r"no commit on a connection of \w+ is reported: enqueue after the commit, "
        with pytest.raises(sqlq.errors.ConfigurationError, match=refused):
            caller.enqueue(shop.app, shop.note.new("a").set(unique_key="k"))
        caller.rollback()
        assert shop.done == []
        assert shop.app.enqueue(shop.note.new("b").set(unique_key="k")).created

    @modes(lambda name, mode: mode.begins is not None)
    def test_a_job_without_a_transaction_runs_at_once(self, shop: OrderShop, caller: DriverCaller) -> None:
        assert caller.enqueue(shop.app, shop.note.new("a")).state == "finished"
        assert shop.done == ["a"]


def test_the_apps_own_session_is_joined(shop: OrderShop, engine: Engine, session: Session) -> None:
    scope = scoped_session(sessionmaker(engine))
    shop.app.use(engine=engine, session=scope)
    scope.execute(text("INSERT INTO orders (id) VALUES (1)"))
    shop.app.enqueue(shop.count.new("joined"))
    shop.app.enqueue(shop.note.new("a transaction of its own"), commit=True)
    assert shop.done == ["a transaction of its own"]
    scope.commit()
    assert shop.done[1:] == [("joined", 1)]
    scope.remove()


def test_flows_wait_as_a_whole(shop: OrderShop, session: Session) -> None:
    flow = sqlq.Flow()
    first = flow.add(shop.note.new("first"))
    flow.add(shop.note.new("second"), after=[first])
    shop.app.enqueue(flow, session=session)
    assert shop.done == []
    session.rollback()
    answer = shop.app.enqueue(sqlq.chain(shop.note.new("a"), shop.note.new("b")), session=session)
    session.commit()
    assert shop.done == ["a", "b"]
    assert shop.app.result(answer) == "B"


class TestUniqueKeys:
    def enqueue(self, shop: OrderShop, name: str, session: Any) -> sqlq.Job[str]:
        return shop.app.enqueue(shop.note.new(name).set(unique_key="k"), session=session)

    def test_a_job_of_a_lost_session_holds_no_unique_key(self, shop: OrderShop, engine: Engine) -> None:
        if engine.dialect.name == "sqlite":
            sqlq.configure_sqlite(engine)
        left: Any = Session(engine)
        left.begin_nested()
        self.enqueue(shop, "first", left)
        gone = weakref.ref(left)
        left.connection().invalidate()
        del left
        gc.collect()
        assert gone() is None
        assert self.enqueue(shop, "second", None).created
        assert shop.done == ["second"]


def test_a_process_that_stays_keeps_no_session_and_few_jobs(shop: OrderShop, engine: Engine) -> None:
    jobs: list[int] = []

    def commit_many() -> weakref.ref[Session]:
        with Session(engine) as session:
            many = [shop.note.new("a") for _ in range(REMEMBERED // 10)]
            jobs.extend(job.id for job in shop.app.enqueue_many(many, session=session))
            session.commit()
            return weakref.ref(session)

    gone = [commit_many() for _ in range(20)]
    gc.collect()
    assert not any(each() for each in gone)
    results = shop.app._connected.results
    assert [results.job_here(jobs[0]), results.job_here(jobs[-1]) is None] == [None, False]
    assert len(shop.app._eagerly.jobs) == REMEMBERED


def test_many_threads_commit_on_connections_of_their_own(shop: OrderShop, database_url: str) -> None:
    engine = create_engine(database_url)
    failed: list[BaseException] = []

    def commit(n: int) -> None:
        try:
            for i in range(25):
                with engine.connect() as conn:
                    if engine.dialect.name == "sqlite":
                        conn.exec_driver_sql("BEGIN")
                    shop.app.enqueue(shop.note.new(f"{n} {i}"), session=conn)
                    conn.rollback() if i % 5 == 0 else conn.commit()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.dispose()
    assert failed == []
    assert sorted(shop.done) == sorted(f"{n} {i}" for n in range(8) for i in range(25) if i % 5)


def test_eager_of_a_call_comes_before_the_app(shop: OrderShop, session: Session, engine: Engine) -> None:
    shop.app.enqueue(shop.note.new("at once"), eager=True)
    assert shop.done == ["at once"]
    shop.app.enqueue(shop.note.new("written"), session=session, eager=False)
    session.commit()
    assert shop.done == ["at once"]
    assert [job.task for job in shop.app.jobs.list()] == ["shop.note"]
    with closing(sqlq.App(engine=engine)) as plain:
        note = plain.task(name="plain.note")(shop.done.append)
        plain.enqueue(note.new("by the call"), session=session, eager=True)
        assert shop.done == ["at once"]
        session.commit()
    assert shop.done == ["at once", "by the call"]


@pytest.mark.parametrize("how", ["argument", "variable", "pyproject"])
def test_argument_variable_and_pyproject_set_eager(
    shop: OrderShop,
    session: Session,
    engine: Engine,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {}
    if how == "argument":
        options["eager"] = True
        monkeypatch.setenv("SQLQ_EAGER", "0")
    elif how == "variable":
        monkeypatch.setenv("SQLQ_EAGER", "1")
        (tmp_path / "pyproject.toml").write_text("[tool.sqlq]\neager = false\n")
    else:
        (tmp_path / "pyproject.toml").write_text("[tool.sqlq]\neager = true\n")
    with closing(sqlq.App(engine=engine, **options)) as app:
        note = app.task(name="t")(shop.done.append)
        app.enqueue(note.new("a"), session=session)
        assert shop.done == []
        session.commit()
        assert shop.done == ["a"]


@pytest.mark.parametrize("wrong", ["no", "1", 1, "commit", ""])
def test_a_wrong_value_of_eager_is_refused(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"eager is {wrong!r}: it is True or False"
    with pytest.raises(sqlq.errors.ConfigurationError) as raised:
        sqlq.App(eager=wrong)
    assert said in str(raised.value)
    app = sqlq.App()
    with pytest.raises(sqlq.errors.ConfigurationError) as raised:
        app.enqueue(app.task(name="t")(lambda: None).new(), eager=wrong)
    assert said in str(raised.value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.sqlq]\neager = "perhaps"\n')
    with pytest.raises(
        sqlq.errors.ConfigurationError, match=r"eager in .*pyproject.toml is 'perhaps': it is True"
    ):
        sqlq.App()


def test_eager_jobs_are_written_on_a_test_database(shop: OrderShop, tmp_path: Path) -> None:
    with on_database(shop.app, f"sqlite:///{tmp_path / 'test.db'}"):
        shop.app.enqueue(shop.note.new("a"))
        assert_enqueued(shop.note, args=["a"])
        assert shop.done == []
        assert drain(shop.app).finished == 1


def test_a_result_needs_no_database_when_its_job_ran_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with closing(sqlq.App("postgresql+psycopg2://nobody@nowhere/shop", eager=True)) as app:
        job = app.enqueue(app.task(name="t")(lambda: 7).new())
        assert app.result(job, timeout="1s") == 7


def test_a_job_is_found_by_its_id(shop: OrderShop, session: Session) -> None:
    new = shop.note.new("a").set(queue="mail", label="of a")
    job = shop.app.enqueue(new, session=session)
    waiting = shop.app.jobs.get(job.id)
    assert (waiting.state, waiting.attempts, waiting.reserved_at) == ("available", 0, None)
    session.commit()
    found = shop.app.jobs.get(job.id)
    assert (found.id, found.state, found.result, found.args) == (job.id, "finished", "A", ["a"])
    assert (found.queue, found.task, found.label, found.attempts) == ("mail", "shop.note", "of a", 1)
    assert found.reserved_at is not None
    assert found.ended_at is not None
    assert found.created_at <= found.reserved_at <= found.ended_at
    with pytest.raises(sqlq.JobNotFoundError):
        shop.app.jobs.get(4711)
