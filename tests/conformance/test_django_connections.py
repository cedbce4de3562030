"""Enqueueing and completing on Django's connections: in its atomic blocks, and in autocommit."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import django
import django.conf
import django.db
import pytest
from django.db import transaction
from sqlalchemy import Engine, make_url

import sqlq
from sqlq.database.caller import drivers
from sqlq.testing import inline
from tests.kit import needs
from tests.kit.callers import orders_and_jobs
from tests.kit.notifications import Listener

pytestmark = pytest.mark.each_database


def order(connection: Any, id: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (id) VALUES (%s)", [id])


def order_and_fail(app: sqlq.App, job: sqlq.NewJob, connection: Any, id: int) -> None:
    order(connection, id)
    app.enqueue(job, session=connection)
    raise ZeroDivisionError


def test_an_atomic_block_commits_or_rolls_back_write_and_job(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    with transaction.atomic(using=connection.alias):
        order(connection, 1)
        first = app.enqueue(send.new(1), session=connection)
        with suppress(ZeroDivisionError), transaction.atomic(using=connection.alias):
            order_and_fail(app, send.new(2).set(unique_key="k"), connection, 2)
        second, third = app.enqueue_many(
            [send.new(3).set(unique_key="k"), send.new(4).set(unique_key="l")], session=connection
        )
        assert orders_and_jobs(watched_orders) == ([], [])
    with suppress(ZeroDivisionError), transaction.atomic(using=connection.alias):
        order_and_fail(app, send.new(5), connection, 5)
    assert orders_and_jobs(watched_orders) == ([1], sorted([first.id, second.id, third.id]))
    assert connection.get_autocommit()


def test_a_job_outside_a_block_commits_at_once(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    job = app.enqueue(send.new(1), session=connection)
    assert orders_and_jobs(watched_orders)[1] == [job.id]


def test_an_error_is_djangos_and_marks_its_block(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    with transaction.atomic(using=connection.alias):
        order(connection, 1)
        with pytest.raises(sqlq.EnqueueError):
            app.enqueue(send, session=connection)
        assert not connection.needs_rollback
        # mysqlclient takes a CHECK for an error of operation
        with pytest.raises((django.db.IntegrityError, django.db.OperationalError), match="priority"):
            app.enqueue(replace(send.new(1), priority=1_000), session=connection)
        with pytest.raises(transaction.TransactionManagementError, match="An error occurred in the current"):
            app.enqueue(send.new(2), session=connection)
    assert orders_and_jobs(watched_orders) == ([], [])


def test_enqueue_takes_djangos_connection_proxy(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    from django.utils.connection import ConnectionProxy

    proxy: Any = ConnectionProxy(django.db.connections, connection.alias)
    app.use(watched_orders.url, session=proxy)
    with suppress(ZeroDivisionError), transaction.atomic(using=connection.alias):
        app.enqueue(send.new(1))
        raise ZeroDivisionError
    with transaction.atomic(using=connection.alias):
        job = app.enqueue(send.new(1))
    assert orders_and_jobs(watched_orders)[1] == [job.id]


@needs("listen")
def test_a_commit_of_djangos_notifies_workers_and_a_rollback_does_not(
    app: sqlq.App, send: Any, connection: Any
) -> None:
    heard: list[int] = []
    app.on("enqueued")(lambda events: heard.extend(event.id for event in events))
    listener = Listener(app)
    with suppress(ZeroDivisionError), transaction.atomic(using=connection.alias):
        app.enqueue(send.new(1), session=connection)
        raise ZeroDivisionError
    assert listener.hears_no_more()
    with transaction.atomic(using=connection.alias):
        job = app.enqueue(send.new(2), session=connection)
    assert listener.hears_one()
    assert app._events.flush(60)
    assert heard == [job.id]
    listener.close()


def test_a_handler_completes_in_a_transaction_of_djangos(
    app: sqlq.App, watched_orders: Engine, connection: Any
) -> None:
    @app.task(name="shop.pay", max_attempts=2, backoff="0s")
    def pay() -> None:
        own = django.db.connections[connection.alias]
        attempt = sqlq.current_job().attempt
        with sqlq.current_job().completing(own) as same:
            assert same is own
            order(own, attempt)
            if attempt == 1:
                raise ZeroDivisionError
        own.close()

    job = app.enqueue(pay.new())
    app.worker(drain=True, concurrency=1).run()
    assert (app.jobs.get(job.id).state, app.jobs.get(job.id).attempts) == ("finished", 2)
    assert orders_and_jobs(watched_orders) == ([2], [])


def test_a_job_runs_inline_when_djangos_block_commits(app: sqlq.App, send: Any, connection: Any) -> None:
    with inline(app, at="commit") as ran:
        with transaction.atomic(using=connection.alias):
            app.enqueue(send.new(1), session=connection)
            assert [job.state for job in ran.jobs] == ["available"]
        assert [job.state for job in ran.jobs] == ["finished"]
        app.enqueue(send.new(2), session=connection)
        assert [job.state for job in ran.jobs] == ["finished"] * 2


@needs("mariadb")
def test_pymysql_stands_in_for_mysqlclient(app: sqlq.App, watched_orders: Engine, database_url: str) -> None:
    where = make_url(database_url)
    database = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": where.database,
        "HOST": where.host,
        "PORT": where.port,
        "USER": where.username,
    }
    program = f"""
import django, django.conf, pymysql
from contextlib import suppress
pymysql.install_as_MySQLdb()
django.conf.settings.configure(USE_TZ=True, DATABASES={{"default": {database!r}}})
django.setup()
from django.db import connection, transaction
import sqlq
app = sqlq.App({database_url!r})
task = app.task(name="t")(print)
for number in (1, 2):
    with suppress(ZeroDivisionError), transaction.atomic():
        connection.cursor().execute("INSERT INTO orders (id) VALUES (%s)", [number])
        app.enqueue_many([task.new(), task.new().set(unique_key=str(number))], session=connection)
        1 / (number - 1)
print(type(connection.connection).__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "pymysql.connections"
    orders, jobs = orders_and_jobs(watched_orders)
    assert (orders, len(jobs)) == ([2], 2)


@needs("mariadb")
def test_mysql_is_refused_by_name(
    app: sqlq.App, send: Any, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = drivers.PyMySQL.run

    def of_mysql(self: drivers.PyMySQL, statement: str, parameters: Any) -> Any:
        return run(self, statement.replace("VERSION()", "'8.0.36'"), parameters)

    monkeypatch.setattr(drivers.PyMySQL, "run", of_mysql)
    with pytest.raises(sqlq.errors.UnsupportedDatabaseError, match=r"not on MySQL, .* to MySQL 8\.0\.36"):
        app.enqueue(send.new(1), session=connection)
