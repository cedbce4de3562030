"""`sqlq demo`: the whole flow in a few seconds, on a database that is deleted afterwards."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import click

from sqlq.app.app import App
from sqlq.cli.commands.status import show_queues
from sqlq.cli.context import Context
from sqlq.cli.terminal.output import plain
from sqlq.config.urls import shown
from sqlq.worker.attempt.context import current_job

ORDERS = 40
INSERT = "INSERT INTO orders VALUES (?)"


@click.command()
@click.pass_obj
def demo(context: Context) -> None:
    """See the whole flow in a few seconds.

    Orders are committed with their jobs, one is rolled back, and a worker runs the jobs: one needs a retry,
    and one fails. Then follows what sqlq status shows. It runs on an SQLite file that is deleted afterwards.
    """
    if context.database_url is not None:
        raise click.UsageError("demo runs on a database of its own: leave out --database-url")
    os.environ.pop("SQLQ_SCHEMA", None)  # meant for another database
    with (
        tempfile.TemporaryDirectory(prefix="sqlq-demo-") as directory,
        # not eager, for it shows the queue at work
        closing(App(f"sqlite:///{Path(directory) / 'demo.db'}", eager=False)) as app,
    ):
        app.migrate()
        _play(app)


def _play(app: App) -> None:
    @app.task(name="demo.send_receipt")
    def send_receipt(order_id: int) -> str:
        return f"receipt {order_id} sent"

    @app.task(name="demo.charge_card", backoff="500ms")
    def charge_card(order_id: int) -> None:
        if current_job().attempt == 1:
            raise TimeoutError("the card company did not answer")

    @app.task(name="demo.ship_abroad", max_attempts=2, backoff="500ms")
    def ship_abroad(order_id: int) -> None:
        raise LookupError("no such country")

    engine = app.database.engine
    with engine.begin() as conn:
        conn.exec_driver_sql("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    click.echo(f"Enqueue on {shown(engine.url)}")
    for id in range(1, ORDERS + 1):
        with engine.begin() as conn:
            conn.exec_driver_sql(INSERT, (id,))
            app.enqueue(send_receipt.new(id), session=conn)
    click.echo(f"  {ORDERS} transactions committed an order each, and the job to send its receipt")
    with engine.connect() as conn:
        conn.exec_driver_sql(INSERT, (ORDERS + 1,))
        app.enqueue(send_receipt.new(ORDERS + 1), session=conn)
        conn.rollback()
        stored = conn.exec_driver_sql("SELECT count(*) FROM main.orders").scalar()
    jobs = app.jobs.list(limit=1_000)
    click.echo(
        f"  one more order and its job were rolled back: {stored} orders and {len(jobs)} jobs are there"
    )
    charged, shipped = app.enqueue_many([charge_card.new(1), ship_abroad.new(1)])
    click.echo(
        f"  job {charged.id} will fail the first time, and job {shipped.id} each time\n\n"
        "Work, 4 jobs at a time"
    )
    log = logging.getLogger("sqlq")
    log.addHandler(_Narrator())
    log.setLevel(logging.INFO)
    log.propagate = False
    with app.worker(concurrency=4):
        app.wait_all([*(job.id for job in jobs), charged.id, shipped.id], "1m")
    states = Counter(job.state.value for job in app.jobs.list(limit=1_000))
    click.echo("  " + ", ".join(f"{number} {state}" for state, number in states.items()))
    click.echo("\nsqlq status shows the failed job, and sqlq retry would run it again:\n")
    show_queues(Context(_app=app), app.queues.list())


class _Narrator(logging.Handler):
    """Prints the events of the worker, but for receipts that were sent."""

    def emit(self, record: logging.LogRecord) -> None:
        event, task = getattr(record, "event", None), getattr(record, "task", None)
        if event is not None and (event, task) != ("finished", "demo.send_receipt"):
            click.echo(f"  {plain(record.getMessage())}")
