"""sqlq.testing, as users' tests use it: inline, drain, and assertions about enqueued jobs."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.model.job_options import JobOptions
from sqlq.testing import Counts, adrain, assert_enqueued, assert_not_enqueued, drain, inline, on_database
from tests.kit import needs
from tests.kit.flows import Shop as FlowShop
from tests.kit.postgresql import async_database_url


class Shop:
    """Tasks on an App, and what they did."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.done: list[object] = []
        done = self.done

        @app.task(name="shop.note", queue="notes")
        def note(text: str, copies: int = 1) -> str:
            done.append((text, copies))
            return text.upper()

        @app.task(name="shop.anote")
        async def anote(text: str) -> str:
            await asyncio.sleep(0)
            done.append(text)
            return text

        @app.task(name="shop.bad", max_attempts=3, backoff="1h")
        def bad() -> None:
            done.append(sqlq.current_job().attempt)
            raise LookupError("no such order")

        self.note, self.anote, self.bad = note, anote, bad


@pytest.fixture
def shop(app: sqlq.App) -> Iterator[Shop]:
    with on_database(app, app.database.engine.url):  # makes it the App that assert_enqueued looks at
        yield Shop(app)


class TestInline:
    """Needs no database at all: there is no such file."""

    @pytest.fixture
    def shop(self, tmp_path: Path) -> Iterator[Shop]:
        yield Shop(sqlq.App(f"sqlite:///{tmp_path}/never.db"))
        assert not list(tmp_path.iterdir())

    def test_inline_runs_jobs_at_once_in_the_callers_thread(self, shop: Shop) -> None:
        threads = []

        @shop.app.task(name="shop.where")
        def where(values: Sequence[int]) -> None:
            threads.append(threading.current_thread())
            shop.done.append(values)

        with inline(shop.app) as ran, Session() as unbound:
            job = shop.app.enqueue(where.new((1, 2)), session=unbound)
            assert threads == [threading.current_thread()]
            shop.app.enqueue_many([shop.note.new(str(i)).set(delay="1d") for i in range(3)])
        assert (job.state, job.created, job.queue) == ("finished", True, "default")
        assert [(j.state, j.attempts) for j in ran.jobs] == [("finished", 1)] * 4
        assert shop.done == [[1, 2], ("0", 1), ("1", 1), ("2", 1)], "as JSON, in order, without the delay"
        with pytest.raises(sqlq.errors.ConfigurationError, match="there is no database file"):
            shop.app.enqueue(shop.note.new("after the block"))

    def test_exceptions_reach_the_test_at_the_first_attempt(self, shop: Shop) -> None:
        with inline(shop.app) as ran:
            with pytest.raises(LookupError, match="no such order"):
                shop.app.enqueue(shop.bad.new())
            with pytest.raises(LookupError, match="no such order"):
                asyncio.run(shop.app.aenqueue(shop.bad.new()))
        assert [job.state for job in ran.jobs] == ["failed", "failed"]
        assert shop.done == [1, 1]

    @pytest.mark.parametrize(
        ("signal", "state", "attempts"),
        [
            (sqlq.Retry("1h"), "finished", [1, 2]),
            (sqlq.Snooze("1h"), "scheduled", [1]),
            (sqlq.Cancel("sold out"), "cancelled", [1]),
        ],
    )
    def test_signals(self, shop: Shop, signal: Exception, state: str, attempts: list[int]) -> None:
        @shop.app.task(name="shop.signal", max_attempts=3)
        def raises() -> None:
            shop.done.append(sqlq.current_job().attempt)
            if sqlq.current_job().attempt == 1:
                raise signal

        with inline(shop.app):
            assert shop.app.enqueue(raises.new()).state == state
            assert shop.done == attempts
            assert asyncio.run(shop.app.aenqueue(raises.new())).state == state

    def test_handlers_enqueue_inline_too_and_a_unique_key_ends_the_circle(self, shop: Shop) -> None:
        answers = []

        @shop.app.task(name="shop.chain")
        def chain() -> None:
            shop.app.enqueue(shop.note.new("from a job"))
            answers.append(shop.app.enqueue(chain.new().set(unique_key="one")))
            assert sqlq.current_job().task == "shop.chain"

        with inline(shop.app):
            ids = [shop.app.enqueue(chain.new().set(unique_key="one")).id for _ in range(2)]
        assert shop.done == [("from a job", 1)] * 2
        assert [(job.id, job.created, job.state) for job in answers] == [(id, False, "running") for id in ids]
        with pytest.raises(sqlq.errors.ConfigurationError, match="outside a handler"):
            sqlq.current_job()


def decorated(handler: Any) -> Any:
    """Return a `def` that returns the handler's result, as an ordinary decorator does."""

    @functools.wraps(handler)
    def inner(*args: object, **kwargs: object) -> object:
        return handler(*args, **kwargs)

    return inner


class TestWhatHandlersReturn:
    """A worker and an inline block agree about it."""

    @pytest.fixture(params=["drain", "inline", "aenqueue", "commit"])
    def run(self, request: pytest.FixtureRequest, shop: Shop, engine: Engine) -> Any:
        """Runs a task in some way, and returns how its job ended and with what result."""
        app, way = shop.app, request.param

        def run(task: Any) -> tuple[str, Any]:
            if way == "drain":
                job = app.enqueue(task.new())
                drain(app)
                ended = app.jobs.get(job.id)
                return ended.state, ended.result if ended.state == "finished" else ended.message
            block = inline(app, at="commit" if way == "commit" else "enqueue")
            with suppress(TypeError), block as ran:
                if way == "inline":
                    app.enqueue(task.new())
                elif way == "aenqueue":
                    asyncio.run(app.aenqueue(task.new()))
                else:
                    with Session(engine) as session, session.begin():
                        app.enqueue(task.new(), session=session)
            (ended_inline,) = ran.jobs
            error = ended_inline.error
            return ended_inline.state, ended_inline.result if error is None else str(error)

        return run

    def test_inline_awaits_coroutines_that_a_def_handler_returns(self, shop: Shop, run: Any) -> None:
        async def send(order_id: int = 7) -> int:
            await asyncio.sleep(0)
            shop.done.append(sqlq.current_job().task)
            return order_id

        async def twice() -> Any:
            return send(8)

        app = shop.app
        assert run(app.task(name="shop.decorated")(decorated(send))) == ("finished", 7)
        assert run(app.task(name="shop.twice")(decorated(decorated(twice)))) == ("finished", 8)
        assert run(app.task(name="shop.async_twice")(twice)) == ("finished", 8)
        assert shop.done == ["shop.decorated", "shop.twice", "shop.async_twice"]

    def test_a_generator_is_no_result(self, shop: Shop, run: Any) -> None:
        def each() -> Iterator[int]:
            shop.done.append("never")
            yield 1

        async def aeach() -> AsyncIterator[int]:
            shop.done.append("never")
            yield 1

        async def returns() -> Any:
            return each()

        for number, handler in enumerate((decorated(each), decorated(aeach), decorated(returns), returns)):
            state, said = run(shop.app.task(name=f"shop.{number}", max_attempts=1)(handler))
            assert state == "failed"
            assert "generator, of whose body nothing has run" in said
        assert shop.done == []


class TestDrain:
    def test_drain_runs_available_jobs_and_those_they_enqueue(self, shop: Shop) -> None:
        @shop.app.task(name="shop.chain")
        def chain(left: int) -> None:
            if left:
                shop.app.enqueue(chain.new(left - 1))

        shop.app.enqueue_many([chain.new(3), shop.note.new("a"), shop.anote.new("b"), shop.bad.new()])
        shop.app.enqueue(shop.note.new("tomorrow").set(delay="1d"))
        assert drain(shop.app) == Counts(finished=6, retried=1)
        shop.app.enqueue_many([shop.note.new("c"), shop.anote.new("d")])
        assert drain(shop.app, ["notes"]) == Counts(finished=1)
        assert {str(x) for x in shop.done} == {"('a', 1)", "b", "1", "('c', 1)"}

    @needs("file")
    def test_an_open_transaction_on_sqlite_is_named(
        self, shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sqlq.database.sqlite.driver.BUSY_TIMEOUT_MS", 50)
        shop.app.close()
        with Session(engine) as session:
            shop.app.enqueue(shop.note.new("open"), session=session)
            with pytest.raises(sqlq.SqlqError, match="commit it or roll it back"):
                drain(shop.app)

    def test_adrain_runs_handlers_and_the_lifespan_on_the_loop_of_the_test(
        self, shop: Shop, database_url: str
    ) -> None:
        loops: list[object] = []

        @shop.app.lifespan
        async def service() -> AsyncIterator[str]:
            loops.append(asyncio.get_running_loop())
            yield "service"
            loops.append(asyncio.get_running_loop())

        async def main() -> None:
            engine = create_async_engine(async_database_url(database_url))

            @shop.app.task(name="shop.ask")
            async def ask() -> None:
                loops.append(asyncio.get_running_loop())
                async with engine.connect() as conn:  # one that the test has opened, and left in the pool
                    await conn.execute(text("SELECT 1"))
                await shop.app.aenqueue(shop.note.new("a"))

            async with engine.connect() as conn:
                await conn.execute(text("SELECT 1"))
            await shop.app.aenqueue(ask.new())
            for _ in range(2):  # the loop goes on after the first
                assert await adrain(shop.app) == Counts(finished=2), shop.app.jobs.list(state="failed")
                await shop.app.aenqueue(ask.new())
            assert await adrain(shop.app, ["notes"]) == Counts()
            await engine.dispose()
            assert {*loops} == {asyncio.get_running_loop()}
            assert len(loops) == 8, "two jobs, and three lifespans that were entered and left"

        asyncio.run(main())
        assert shop.done == [("a", 1)] * 2

    def test_a_cancelled_adrain_leaves_no_worker_behind(self, shop: Shop) -> None:
        async def main() -> None:
            started, threads = asyncio.Event(), {*threading.enumerate()}

            @shop.app.task(name="shop.wait")
            async def wait() -> None:
                started.set()
                await asyncio.Event().wait()

            job = await shop.app.aenqueue(wait.new())
            draining = asyncio.create_task(adrain(shop.app))
            await started.wait()
            draining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await draining
            assert (await shop.app.jobs.aget(job)).state == "available"
            new = {thread.name for thread in {*threading.enumerate()} - threads}
            assert not [name for name in new if name.startswith("sqlq-")]

        asyncio.run(main())


class TestAsserting:
    def test_a_call_is_found_whichever_way_its_arguments_were_passed(self, shop: Shop) -> None:
        shop.app.enqueue(shop.note.new(text="a"))
        shop.app.enqueue(shop.note.new("b", copies=2).set(priority=5, unique_key="k"))
        assert_enqueued(shop.note)
        assert_enqueued(shop.note, args=["a"])
        assert_enqueued(shop.note, args=("a", 1))
        assert_enqueued(shop.note, kwargs={"text": "a"}, queue="notes")
        found = assert_enqueued(shop.note, args=["b", ANY])
        assert (found.args, found.kwargs, found.priority, found.unique_key) == (["b"], {"copies": 2}, 5, "k")
        assert assert_enqueued("shop.note", args=["b"], kwargs={"copies": ANY}) == found
        assert_not_enqueued(shop.note, args=["c"])
        assert_not_enqueued(shop.note, args=["a"], queue="mail")
        assert_not_enqueued(shop.bad)
        drain(shop.app)
        assert_enqueued(shop.note, args=["a"])

    @pytest.mark.parametrize("where", ["row", "inline"])
    def test_a_job_is_found_by_each_of_its_options(self, shop: Shop, where: str) -> None:
        def alarm(ended: sqlq.JobOutcome) -> None: ...

        failed = shop.app.task(name="alarm")(alarm)
        noon = datetime(2098, 1, 1, 12, 0, 0, 123_456, tzinfo=timezone(timedelta(hours=2)))
        options: list[JobOptions] = [
            {"queue": "other", "priority": 5, "max_attempts": 2, "timeout": "7s", "retention": "1d"},
            {"delay": "5m", "start_within": "1h", "label": "blue", "batch": "import-42", "backoff": "3s"},
            {"available_at": noon, "start_by": noon + timedelta(hours=1), "on_failure": failed},
            {"unique_key": "k", "unique_until": "start", "headers": {"tenant": 7}, "timeout": None},
            {"limit": sqlq.Limit("stripe", running=5), "delay": "7m"},
        ]
        with inline(shop.app) if where == "inline" else nullcontext():
            for each in options:
                shop.app.enqueue(shop.note.new("a").set(headers={"by": "test"}).set(**each))
            for each in options:
                assert_enqueued(shop.note, args=["a"], count=1, **each)
                for name, value in each.items():
                    one: Any = {"unique_key": each.get("unique_key"), name: value}
                    assert_enqueued(shop.note, **one)
            wrong: list[JobOptions] = [
                {"queue": "mail"}, {"priority": 6}, {"timeout": "8s"}, {"delay": "6m"},
                {"start_within": "2h"},
                {"available_at": noon + timedelta(seconds=1)}, {"label": "red"}, {"batch": "import"},
                {"unique_key": "l"}, {"headers": {"tenant": 8}}, {"limit": "other"}, {"backoff": "4s"},
                {"delay": "5m", "label": "red"}, {"retention": "forever"}, {"on_failure": None},
            ]  # fmt: skip
            for each in wrong:
                assert_not_enqueued(shop.note, **each)
            assert_enqueued(shop.note, count=5)
            with pytest.raises(AssertionError, match=r"enqueued 1 times, and not 2: .* with delay='5m'; of"):
                assert_enqueued(shop.note, count=2, delay="5m")

    def test_a_wrong_option_or_argument_is_refused_where_there_is_no_job(self, shop: Shop) -> None:
        with pytest.raises(sqlq.EnqueueError, match="times"):
            assert_not_enqueued(shop.note, times=2)  # type: ignore[call-arg]
        with pytest.raises(sqlq.EnqueueError, match="delay"):
            assert_not_enqueued(shop.note, delay="soon")
        with pytest.raises(sqlq.errors.ConfigurationError, match="write assert_not_enqueued"):
            assert_enqueued(shop.note, count=0)
        with pytest.raises(sqlq.errors.ArgumentsError, match="too many positional"):
            assert_not_enqueued(shop.note, args=["a", 1, 2])
        with pytest.raises(sqlq.errors.ConfigurationError, match=r'at is .*: it is "enqueue" or "commit"'):
            inline(shop.app, at="flush").__enter__()  # type: ignore[arg-type]

    def test_the_assertion_message_lists_the_enqueued_jobs_and_foreign_payloads(
        self, shop: Shop, engine: Engine
    ) -> None:
        shop.app.enqueue(shop.note.new("a", copies=2))
        there = r"\n  shop.note\('a', copies=2\)"
        absent = rf"not enqueued: shop.note\('b'\); .*:{there} \(job 1, queue notes\)"
        with pytest.raises(AssertionError, match=absent):
            assert_enqueued(shop.note, args=["b"])
        nothing = r"not enqueued: shop.bad\(…\) with queue='mail'; of this task there is:\n  nothing"
        with pytest.raises(AssertionError, match=nothing):
            assert_enqueued(shop.bad, queue="mail")
        with pytest.raises(AssertionError, match=rf"enqueued, but should not be: shop.note\(…\){there}"):
            assert_not_enqueued(shop.note)
        with engine.begin() as conn:
            rows = [{"payload": each} for each in ("not json", '{"args": [1, 2, 3, 4]}')]
            conn.execute(text("DELETE FROM jobs"))
            conn.execute(text("INSERT INTO jobs (task, payload) VALUES ('shop.note', :payload)"), rows)
        assert_enqueued(shop.note)
        with pytest.raises(AssertionError, match="unreadable payload"):
            assert_enqueued(shop.note, args=[ANY])

    def test_assert_enqueued_sees_jobs_of_the_open_session(self, shop: Shop, engine: Engine) -> None:
        with Session(engine) as session:
            shop.app.enqueue(shop.note.new("a"), session=session)
            assert_enqueued(shop.note, args=["a"], session=session)
            assert_enqueued(shop.note, args=["a"], session=session.connection())
            session.rollback()
            assert_not_enqueued(shop.note, session=session)
        assert_not_enqueued(shop.note)
        assert drain(shop.app) == Counts()

    def test_the_error_names_the_fixture_without_an_app(self, app: sqlq.App, engine: Engine) -> None:
        shop = Shop(app)
        with pytest.raises(sqlq.errors.ConfigurationError, match="fixture sqlq_app"):
            assert_enqueued(shop.note)
        assert_not_enqueued(shop.note, app=app)
        with Session(engine) as session:
            assert_not_enqueued(shop.note, session=session)


class TestFlows:
    """Flows run in order and at once, with nothing written."""

    @pytest.fixture
    def shop(self, app: sqlq.App) -> FlowShop:
        return FlowShop(app)

    def test_a_flow_runs_inline_or_eagerly_in_order(self, shop: FlowShop) -> None:
        with inline(shop.app) as ran:
            shop.app.enqueue(sqlq.chain(shop.note.new(1), shop.note, shop.note.map([2, 3]), shop.total))
        assert shop.called == [1, 1, 2, 3, [2, 3]]
        assert {job.state for job in ran.jobs} == {"finished"}
        shop.app.enqueue(sqlq.chain(shop.note.new(4), shop.note), eager=True)
        assert shop.called[5:] == [4, 4]
        assert shop.app.jobs.list() == []

    def test_steps_after_a_failed_step_stay_blocked(self, shop: FlowShop) -> None:
        shop.broken.add("pay")
        flow = sqlq.Flow()
        paid = flow.add(shop.note.new("pay"))
        paid.then(shop.note.new("ship"))
        paid.catch(shop.note.new("alarm")).catch(shop.note.new("never"))
        flow.add(shop.note.new("pack"))
        with inline(shop.app) as ran, pytest.raises(ValueError, match="pay is broken"):
            shop.app.enqueue(flow)
        assert shop.called == ["pay", "alarm", "pack"]
        assert " ".join(job.state for job in ran.jobs) == "failed blocked finished cancelled finished"

    def test_a_step_that_takes_a_result_that_is_not_there_fails_alone(self, shop: FlowShop) -> None:
        lost = shop.app.task(name="lost")(lambda: {1})
        flow = sqlq.Flow()
        taking: Any = flow.add(shop.note.new(flow.add(lost.new()).result))
        taking.catch(shop.note.new("alarm"))
        flow.add(shop.note.new("pack"))
        refusal = "note takes a result that is not there: its result is not JSON"
        with inline(shop.app) as ran, pytest.raises(sqlq.NoResultError, match=refusal):
            shop.app.enqueue(flow)
        assert shop.called == ["alarm", "pack"]
        assert [str(job.state) for job in ran.jobs] == ["finished", "failed", "finished", "finished"]
        with pytest.raises(sqlq.NoResultError, match=refusal):
            shop.app.enqueue(flow, eager=True)
        assert shop.called == ["alarm", "pack"] * 2

    def test_a_flow_grows_inline(self, shop: FlowShop, engine: Engine) -> None:
        @shop.app.task(name="split")
        def split(n: int) -> None:
            job = sqlq.current_job()
            assert job.results == [n]
            with job.completing(engine):
                job.flow.add(shop.note.map(range(n)).then(shop.total))

        with inline(shop.app):
            shop.app.enqueue(sqlq.chain(shop.note.new(3), split))
        assert shop.called == [3, 0, 1, 2, [0, 1, 2]]


def test_signals_and_timeouts_run_inline_too(app: sqlq.App) -> None:
    called: list[Any] = []
    note = app.task(name="note")(called.append)

    @app.task(name="publish")
    def publish() -> None:
        job = sqlq.current_job()
        if job.waited_for is None:
            raise sqlq.WaitFor("c", timeout="1d")
        called.append((job.attempt, job.signal))

    with inline(app) as ran:
        for name in ("a", "b"):
            flow = sqlq.Flow()
            ok = flow.wait(name, timeout="3d")
            flow.add(note.new(ok.result))
            ok.catch(note.new(f"nobody sent {name}"))
            app.enqueue(flow)
        app.enqueue(publish.new())
        assert called == []
        assert (ran.signal("a", 1), app.signal("a", 2), ran.signal("c", 3)) == (True, False, True)
        assert called == [1, (1, 3)]
        ran.travel("2d")
        assert called[2:] == []
        ran.travel("1d")
        assert called[2:] == ["nobody sent b"]


def test_callbacks_run_inline_too(app: sqlq.App) -> None:
    heard: list[tuple[str, str]] = []

    @app.task(name="thank")
    async def thank(ended: sqlq.JobOutcome) -> None:
        heard.append(("thank", ended.outcome))

    @app.task(name="alarm", on_success=thank)
    def alarm(ended: sqlq.JobOutcome) -> None:
        heard.append((ended.message or "", ended.label or ""))

    @app.task(name="pay", on_success=thank, on_failure=alarm)
    def pay(how: str) -> None:
        if how != "well":
            raise sqlq.Cancel if how == "not" else LookupError("no such order")

    with inline(app) as ran:
        app.enqueue(pay.new("well"))
        app.enqueue(pay.new("not"))
        with pytest.raises(LookupError):
            app.enqueue(pay.new("badly").set(label="of May"))
    assert [job.new.task for job in ran.jobs] == ["pay", "thank", "pay", "pay", "alarm", "thank"]
    assert heard == [("thank", "finished"), ("no such order", "of May"), ("thank", "finished")]
