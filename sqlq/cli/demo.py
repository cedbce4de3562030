"""`sqlq demo`: the whole flow in a few seconds, on a database that is deleted afterwards.

A small shop enqueues in its own transactions, and a real worker runs the jobs. The demo prints the rows that
they leave.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.output import Column, plain, show_table
from sqlq.config.durations import span
from sqlq.errors import ConfigurationError, SchemaVersionError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from sqlq.app.app import App
    from sqlq.model.task import Task

ORDERS = 40
TICKS = 2
CONCURRENCY = 4
LONGEST_SECONDS = 60.0
LOOK_SECONDS = 0.05
ENDED = {"finished", "failed", "cancelled"}


@click.command()
@click.pass_obj
def demo(context: Context) -> None:
    """See the whole flow in a few seconds.

    Enqueue in a transaction, a rollback, a delay, a retry, a failure, a chain with a group in it, a schedule,
    and the rows. Runs on an SQLite file that is deleted afterwards. With -d it runs on any database, in
    a queue of its own, and deletes the jobs in it afterwards.
    """
    if context.database_url is not None:
        _on(context.database_url)
        return
    os.environ.pop("SQLQ_SCHEMA", None)  # meant for another database
    with tempfile.TemporaryDirectory(prefix="sqlq-demo-") as directory:
        _on(f"sqlite:///{Path(directory) / 'demo.db'}")


def _on(url: str) -> None:
    from sqlq.app.app import App

    run = uuid.uuid4().hex[:6]
    # a queue of its own; not eager, for it shows the queue at work
    app = App(url, eager=False, defaults={"queue": f"demo.{run}"})
    with closing(app), _tables(app):
        _refuse_company(app)
        _Shop(app, run).play()


@contextmanager
def _tables(app: App) -> Iterator[None]:
    """Create the tables where there are none, and remove them afterwards."""
    from sqlq.database import migrate

    engine, schema = app.database.engine, app.database.requested_schema
    found = migrate.check(engine, schema)
    if found.standing is migrate.Standing.UP_TO_DATE:
        yield
        return
    if found.standing is not migrate.Standing.MISSING:
        raise SchemaVersionError(found.message)
    file = Path(engine.url.database or "") if app.database.dialect.in_a_file else None
    is_new = file is not None and not file.exists()
    app.migrate()
    try:
        yield
    finally:
        # refused when another worker or producer has begun to use them
        migrate.downgrade(engine, schema, "base")
        app.close()
        if file is not None and is_new:
            for ending in ("", "-wal", "-shm"):
                file.with_name(file.name + ending).unlink(missing_ok=True)


def _refuse_company(app: App) -> None:
    from sqlq.config.urls import shown

    if any(worker.queues is None for worker in app.workers.list()):
        raise ConfigurationError(
            f"a worker that serves all queues is running on {shown(app.database.engine.url)}, "
            "and would take the demo's jobs without knowing their tasks: stop it, or run sqlq demo without -d"
        )


class _Shop:
    """A shop with an order table of its own and a handful of tasks."""

    def __init__(self, app: App, run: str) -> None:
        from sqlalchemy import Column, Integer, MetaData, String, Table

        self._app = app
        self._queue, self._schedule = f"demo.{run}", f"demo.count_stock.{run}"
        self._engine = _own_engine(app)
        self._orders = Table(
            f"sqlq_demo_orders_{run}",
            MetaData(),
            Column("id", Integer, primary_key=True, autoincrement=False),
            Column("customer", String(40), nullable=False),
        )
        self._tasks: dict[str, Task[..., Any]] = {
            handler.__name__: app.task(name=f"demo.{handler.__name__}", **options)(handler)
            for handler, options in HANDLERS.items()
        }

    def play(self) -> None:
        self._orders.create(self._engine)
        try:
            self._enqueue()
            flow = self._enqueue_flow()
            self._work(sum(self._states().values()) + TICKS)
            self._show(flow)
        finally:
            self._clear()
            self._engine.dispose()

    def _enqueue(self) -> None:
        from sqlalchemy import func, insert, select

        from sqlq.config.urls import shown

        app, orders, tasks = self._app, self._orders, self._tasks
        _heading(f"Enqueue on {shown(self._engine.url)}")
        began = time.monotonic()
        for id in range(1, ORDERS + 1):
            with self._engine.begin() as conn:
                conn.execute(insert(orders).values(id=id, customer=f"customer {id}"))
                app.enqueue(tasks["send_receipt"].new(id), session=conn)
        took = span(time.monotonic() - began)
        click.echo(f"{ORDERS} transactions, each with an order and the job to send its receipt, took {took}")

        with self._engine.connect() as conn:
            conn.execute(insert(orders).values(id=ORDERS + 1, customer="one who changed their mind"))
            app.enqueue(tasks["send_receipt"].new(ORDERS + 1), session=conn)
            conn.rollback()
            stored = conn.scalar(select(func.count()).select_from(orders))
        jobs = sum(self._states().values())
        click.echo(f"one more order and its job were rolled back: there are {stored} orders and {jobs} jobs")

        with self._engine.begin() as conn:
            later = app.enqueue(tasks["remind"].new(1).set(delay="2s"), session=conn)
            charge = app.enqueue(tasks["charge_card"].new(1), session=conn)
            ship = app.enqueue(tasks["ship_abroad"].new(1), session=conn)
        click.echo(f"job {later.id} is {later.state}: it is not to run for 2 s")
        click.echo(f"job {charge.id} will fail the first time, and job {ship.id} each time")

    def _enqueue_flow(self) -> int:
        """Enqueue a chain with a group in it, add a schedule, and return the id of the flow."""
        from sqlq.model.flow import chain

        tasks = self._tasks
        steps = chain(tasks["pack"].map(["teapot", "cup"]), tasks["post"], tasks["thank"])
        with self._engine.begin() as conn:
            flow = self._app.enqueue(steps, session=conn)
            job = tasks["count_stock"].new()
            self._app.schedules.add(self._schedule, job, every="1s", repeats=TICKS, session=conn)
        blocked = sum(job.state == "blocked" for job in flow.jobs)
        click.echo(
            f"flow {flow.id} is a chain: a group that packs two boxes, and then post and thank; {blocked} of "
            f"its {len(flow.jobs)} jobs are blocked until those before them have finished"
        )
        click.echo(f"a schedule enqueues a job at each full second, {TICKS} times")
        return flow.id

    def _work(self, expected: int) -> None:
        """Run a worker until so many jobs have ended."""
        _heading(f"Work, {CONCURRENCY} jobs at a time")
        began = time.monotonic()
        _narrate()
        with self._app.worker([self._queue], concurrency=CONCURRENCY):
            states, until = self._states(), began + LONGEST_SECONDS
            while (states.keys() - ENDED or states.total() < expected) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
                states = self._states()
        took, ended = span(time.monotonic() - began), sum(states[state] for state in ENDED)
        counts = ", ".join(f"{states[state]} {state}" for state in sorted(states))
        click.echo(f"{ended} jobs ended within {took}: {counts}")

    def _states(self) -> Counter[str]:
        """Count the jobs of the demo by their state."""
        return Counter(job.state.value for job in self._app.jobs.list(queue=self._queue, limit=1_000))

    def _show(self, flow_id: int) -> None:
        from sqlq.schema import version

        with self._app.database.read() as conn:
            view = version.qualified(conn, self._app.database.requested_schema, "job_states")
        source = f"  FROM {view}\n WHERE queue = '{self._queue}'"
        columns = "task, state, COUNT(*) AS jobs, MIN(attempts) AS least, MAX(attempts) AS most"
        _heading("What plain SQL shows")
        self._query(f"SELECT {columns}\n{source}\n GROUP BY task, state\n ORDER BY task")
        self._query(f"SELECT id, task, attempts, error\n{source} AND state = 'failed'")
        flow = self._app.flows.get(flow_id)
        results = ", ".join(str(result) for result in flow.results.values())
        click.echo(f"\nflow {flow.id} is {flow.state}, and its steps returned: {results}")
        click.echo("\nsqlq retry would run it again; here it goes with the rest of the demo")

    def _query(self, sql: str) -> None:
        from sqlalchemy import text

        click.echo(f"\n{sql};\n")
        with self._engine.connect() as conn:
            result = conn.execute(text(sql))
            columns = [Column(name, right=name not in ("task", "state", "error")) for name in result.keys()]  # noqa: SIM118 - not a dict
            show_table(columns, [[str(value) for value in row] for row in result])

    def _clear(self) -> None:
        from sqlq.admin.queues import erase

        self._orders.drop(self._engine)
        if any(each.name == self._schedule for each in self._app.schedules.list()):
            self._app.schedules.remove(self._schedule)
        erase(self._app.database, [self._queue])


def _heading(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


class _Narrator(logging.Handler):
    """Prints the events of the worker, but for receipts that were sent."""

    def emit(self, record: logging.LogRecord) -> None:
        event, task = getattr(record, "event", None), getattr(record, "task", None)
        if event is not None and (event, task) != ("finished", "demo.send_receipt"):
            click.echo(f"  {plain(record.getMessage())}")


def _narrate() -> None:
    """Print the log of the worker, and keep it from other handlers, until this process ends."""
    log = logging.getLogger("sqlq")
    log.addHandler(_Narrator())
    log.setLevel(logging.INFO)
    log.propagate = False


def _own_engine(app: App) -> Engine:
    """Return an engine as an application has it."""
    from sqlalchemy import create_engine

    from sqlq.database.sqlite.dialect import configure_sqlite

    engine = create_engine(app.database.engine.url)
    if app.database.dialect.in_a_file:
        configure_sqlite(engine, immediate=True)
    return engine


# -- the handlers --------------------------------------------------------------------------------------------


def send_receipt(order_id: int) -> str:
    time.sleep(0.05)  # the mail server
    return f"receipt {order_id} sent"


def remind(order_id: int) -> None:
    pass


def charge_card(order_id: int) -> str:
    from sqlq.worker.attempt.context import current_job

    if current_job().attempts == 1:
        raise TimeoutError("the card company did not answer")
    return "charged"


def ship_abroad(order_id: int) -> None:
    raise LookupError("no such country")


def pack(item: str) -> str:
    return f"a box with a {item}"


def post(boxes: list[str]) -> str:
    return f"{len(boxes)} boxes posted"


def thank(what: str) -> str:
    return f"thanked for {what}"


def count_stock() -> None:
    pass


HANDLERS: dict[Callable[..., Any], dict[str, Any]] = {
    **{handler: {} for handler in (send_receipt, remind, pack, post, thank, count_stock)},
    charge_card: {"backoff": "1s"},
    ship_abroad: {"max_attempts": 2, "backoff": "500ms"},
}
"""The handlers, each with the options of its task."""
