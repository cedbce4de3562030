"""`sqlq demo`: the whole flow in a few seconds, on a database thrown away afterwards.

Nothing is staged: a small shop enqueues in its own transactions, a real worker runs the jobs, and what is
shown is what the database holds.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context, shown_url
from sqlq.cli.output import Column, console, plain, show_table, span

if TYPE_CHECKING:
    from rich.console import Console
    from sqlalchemy import Engine, Table

    from sqlq.app.app import App

ORDERS = 40
TICKS = 2
CONCURRENCY = 4
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.05
ENDED = ("finished", "failed", "cancelled")


@click.command()
@click.pass_obj
def demo(context: Context) -> None:
    """See the whole flow in a few seconds.

    Enqueue in a transaction, a rollback, a delay, a retry, a failure, a chain with a group in it, a schedule,
    and the rows. Runs on an SQLite file
    that is thrown away, or with -d on any database: in queues of its own, which it empties afterwards.
    """
    out = console()
    if context.database_url is None:
        os.environ.pop("SQLQ_SCHEMA", None)  # meant for another database
        with tempfile.TemporaryDirectory(prefix="sqlq-demo-") as directory:
            _on(f"sqlite:///{Path(directory) / 'demo.db'}", out)
    else:
        _on(context.database_url, out)


def _on(url: str, out: Console) -> None:
    from sqlq.app.app import App

    app = App(url, eager=False)  # it shows the queue at work
    try:
        with _tables(app):
            _Shop(app, out).play()
    finally:
        app.close()


@contextmanager
def _tables(app: App) -> Iterator[None]:
    """Have the tables there, and leave the database as it was found: without them, if it had none."""
    from sqlq.database import migrate
    from sqlq.errors import SchemaVersionError

    schema = app.database.requested_schema
    found = migrate.check(app.database.engine, schema)
    if found.standing not in (migrate.Standing.UP_TO_DATE, migrate.Standing.MISSING):
        raise SchemaVersionError(found.message)
    if found.standing is migrate.Standing.UP_TO_DATE:
        yield
        return
    file = (
        Path(app.database.engine.url.database or "") if app.database.engine.dialect.name == "sqlite" else None
    )
    made = file is not None and not file.exists()
    app.migrate()
    try:
        yield
    finally:
        # refused when another worker or producer has begun to use them
        migrate.downgrade(app.database.engine, schema, "base")
        app.close()
        if file is not None and made:
            for path in (file, file.with_name(file.name + "-wal"), file.with_name(file.name + "-shm")):
                path.unlink(missing_ok=True)


class _Shop:
    """A shop with an order table of its own and a handful of tasks."""

    def __init__(self, app: App, out: Console) -> None:
        run = uuid.uuid4().hex[:6]
        self._app = app
        self._out = out
        self._queues = {name: f"demo.{name}.{run}" for name in ("mail", "card", "parcel")}
        self._schedule = f"demo.count_stock.{run}"
        self._flow_id: int | None = None
        self._expected = 0
        self._orders = _orders_table(f"sqlq_demo_orders_{run}")
        self._mail = self._task("send_receipt", _send_receipt, queue=self._queues["mail"])
        self._remind = self._task("remind", _remind, queue=self._queues["mail"])
        self._charge = self._task("charge_card", _charge_card, queue=self._queues["card"], backoff="1s")
        self._ship = self._task(
            "ship_abroad", _ship_abroad, queue=self._queues["card"], max_attempts=2, backoff="500ms"
        )
        parcel = self._queues["parcel"]
        self._pack = self._task("pack", _pack, queue=parcel)
        self._post = self._task("post", _post, queue=parcel)
        self._thank = self._task("thank", _thank, queue=parcel)
        self._count = self._task("count_stock", _count_stock, queue=parcel)

    def _task(self, name: str, handler: Callable[..., Any], **options: Any) -> Any:
        return self._app.task(name=f"demo.{name}", **options)(handler)

    # -- the play --------------------------------------------------------------------------------------------

    def play(self) -> None:
        self._refuse_company()
        engine = _own_engine(self._app)
        try:
            self._orders.create(engine)
            try:
                self._enqueue(engine)
                self._work()
                self._show(engine)
            finally:
                self._clear(engine)
        finally:
            engine.dispose()

    def _refuse_company(self) -> None:
        from sqlq.errors import ConfigurationError

        if any(worker.queues is None for worker in self._app.workers.list()):
            raise ConfigurationError(
                f"a worker that serves all queues is running on {shown_url(self._app.database.engine.url)}, "
                "and would take the demo's jobs without knowing their tasks: stop it, or run sqlq demo "
                "without -d"
            )

    def _enqueue(self, engine: Engine) -> None:
        from sqlalchemy import func, insert, select

        app, orders = self._app, self._orders
        self._heading(f"Enqueue on {shown_url(engine.url)}")
        began = time.monotonic()
        for id in range(1, ORDERS + 1):
            with engine.begin() as conn:
                conn.execute(insert(orders).values(id=id, customer=f"customer {id}"))
                app.enqueue(self._mail.new(id), session=conn)
        took = time.monotonic() - began
        self._say(
            f"{ORDERS} transactions, each with an order and the job to send its receipt, took {span(took)}"
        )

        with engine.connect() as conn:
            conn.execute(insert(orders).values(id=ORDERS + 1, customer="one who changed their mind"))
            app.enqueue(self._mail.new(ORDERS + 1), session=conn)
            conn.rollback()
            stored = conn.scalar(select(func.count()).select_from(orders))
        self._say(
            f"one more order and its job were rolled back: there are {stored} orders and "
            f"{sum(self._states().values())} jobs"
        )

        with engine.begin() as conn:
            later = app.enqueue(self._remind.new(1).set(delay="2s"), session=conn)
            charge = app.enqueue(self._charge.new(1), session=conn)
            ship = app.enqueue(self._ship.new(1), session=conn)
        self._say(f"job {later.id} is {later.state}: it is not to run for 2 s")
        self._say(f"job {charge.id} will fail the first time, and job {ship.id} each time")
        self._wait_for_each_other(engine)
        self._expected = sum(self._states().values()) + TICKS

    def _wait_for_each_other(self, engine: Engine) -> None:
        """Enqueue a chain with a group in it, and add a schedule."""
        from sqlq.model.flow import chain

        with engine.begin() as conn:
            steps = chain(self._pack.map(["teapot", "cup"]), self._post, self._thank)
            flow = self._app.enqueue(steps, session=conn)
            job = self._count.new()
            self._app.schedules.add(self._schedule, job, every="1s", repeats=TICKS, session=conn)
        self._flow_id = flow.id
        blocked = sum(job.state == "blocked" for job in flow.jobs)
        self._say(
            f"flow {flow.id} is a chain: a group that packs two boxes, and then post and thank; {blocked} of "
            f"its {len(flow.jobs)} jobs are blocked until those before them have finished"
        )
        self._say(f"a schedule enqueues a job at each full second, {TICKS} times")

    def _work(self) -> None:
        """Run a worker until every job has ended, and show how it gets on."""
        self._heading(f"Work, {CONCURRENCY} jobs at a time")
        worker = self._app.worker(list(self._queues.values()), concurrency=CONCURRENCY)
        log = logging.getLogger("sqlq")
        handler = _Narrator(self._say)
        failure: list[BaseException] = []

        def run() -> None:
            try:
                worker.run()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="sqlq-demo", daemon=True)
        level, propagate = log.level, log.propagate
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        began = time.monotonic()
        try:
            thread.start()
            states = self._watch(lambda: not failure and time.monotonic() - began < PATIENCE_SECONDS)
        finally:
            worker.stop()
            thread.join()
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate
        if failure:
            raise failure[0]
        ended = sum(states.get(state, 0) for state in ENDED)
        self._say(f"{ended} jobs ended within {span(time.monotonic() - began)}: {_counts(states)}")

    def _watch(self, patient: Callable[[], bool]) -> dict[str, int]:
        """Follow the jobs through their states until all have ended, or patience has."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

        pause = threading.Event()
        columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, console=self._out, disable=not self._out.is_terminal, transient=True
        ) as progress:
            bars: dict[str, TaskID] = {}
            while True:
                states = self._states()
                total = sum(states.values())
                for state in ("blocked", "available", "scheduled", "running", *ENDED):
                    if state in states and state not in bars:
                        bars[state] = progress.add_task(state, total=total)
                    if state in bars:
                        progress.update(bars[state], completed=states.get(state, 0))
                is_over = states.keys() <= set(ENDED) and total >= self._expected
                if is_over or not patient():
                    return states
                pause.wait(LOOK_SECONDS)

    def _states(self) -> dict[str, int]:
        from sqlq.store.jobs import lookup

        with self._app.database.read() as conn:
            return lookup.states(conn, self._queues.values())

    def _show(self, engine: Engine) -> None:
        from sqlq.schema import version

        with self._app.database.read() as conn:
            view = version.qualified(conn, self._app.database.requested_schema, "job_states")
        queues = ", ".join(f"'{name}'" for name in self._queues.values())
        self._heading("What plain SQL shows")
        select = "SELECT task, state, COUNT(*) AS jobs, MIN(attempts) AS least, MAX(attempts) AS most\n  FROM"
        self._query(
            engine, f"{select} {view}\n WHERE queue IN ({queues})\n GROUP BY task, state\n ORDER BY task"
        )
        select = "SELECT id, task, attempts, error\n  FROM"
        self._query(engine, f"{select} {view}\n WHERE queue = '{self._queues['card']}' AND state = 'failed'")
        flow = self._app.flows.get(self._flow_id or 0)
        results = ", ".join(str(result) for result in flow.results.values())
        self._say(f"\nflow {flow.id} is {flow.state}, and its steps returned: {results}")
        self._say("\nsqlq failed retry would run it again; here it goes with the rest of the demo")

    def _query(self, engine: Engine, sql: str) -> None:
        from sqlalchemy import text

        self._say(f"\n{sql};\n")
        with engine.connect() as conn:
            result = conn.execute(text(sql))
            rows = [[None if value is None else str(value) for value in row] for row in result]
            numbers = {
                name for i, name in enumerate(result.keys()) if all((row[i] or "").isdigit() for row in rows)
            }
            columns = [Column(name, right=name in numbers, wide=name == "error") for name in result.keys()]  # noqa: SIM118 - not a dict
        show_table(columns, rows)

    def _clear(self, engine: Engine) -> None:
        from sqlq.store.jobs import prune

        self._orders.drop(engine)
        if any(each.name == self._schedule for each in self._app.schedules.list()):
            self._app.schedules.remove(self._schedule)
        with self._app.database.begin() as conn:
            prune.erase(conn, self._queues.values())

    def _heading(self, text: str) -> None:
        self._out.print(f"\n{text}", style="bold")

    def _say(self, text: str) -> None:
        self._out.print(text, soft_wrap=True)


class _Narrator(logging.Handler):
    """Tells what the worker logs of jobs that do not just finish, and of those that needed more than one
    attempt."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        ordinary = (
            getattr(record, "event", None) == "finished"
            and getattr(record, "task", None) == "demo.send_receipt"
        )
        if hasattr(record, "event") and not ordinary:
            self._say(f"  {plain(record.getMessage())}")


def _own_engine(app: App) -> Engine:
    """An engine as an application would have it."""
    from sqlalchemy import create_engine

    from sqlq.database.sqlite.dialect import configure_sqlite

    engine = create_engine(app.database.engine.url)
    if engine.dialect.name == "sqlite":
        configure_sqlite(engine, immediate=True)
    return engine


def _orders_table(name: str) -> Table:
    from sqlalchemy import Column, Integer, MetaData, String, Table

    return Table(
        name,
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("customer", String(40), nullable=False),
    )


def _counts(states: dict[str, int]) -> str:
    return ", ".join(f"{states[state]} {state}" for state in sorted(states))


# -- the tasks -----------------------------------------------------------------------------------------------


def _send_receipt(order_id: int) -> str:
    time.sleep(0.05)  # the mail server
    return f"receipt {order_id} sent"


def _remind(order_id: int) -> None:
    pass


def _charge_card(order_id: int) -> str:
    from sqlq.worker.attempt.context import current_job

    if current_job().attempts == 1:
        raise TimeoutError("the card company did not answer")
    return "charged"


def _pack(item: str) -> str:
    return f"a box with a {item}"


def _post(boxes: list[str]) -> str:
    return f"{len(boxes)} boxes posted"


def _thank(what: str) -> str:
    return f"thanked for {what}"


def _count_stock() -> None:
    pass


def _ship_abroad(order_id: int) -> None:
    raise LookupError("no such country")
