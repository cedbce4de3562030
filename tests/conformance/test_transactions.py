"""The contract of each way to enqueue: a job is in the database exactly if its caller commits (G1)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import asyncpg
import django.db
import psycopg
import psycopg2
import pymysql
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq import Job, State
from tests.kit import execute
from tests.kit.callers import Caller, common_sessions, common_ways, every_way

pytestmark = pytest.mark.each_database


@every_way
def test_write_and_job_are_visible_after_the_commit(app: sqlq.App, send: Any, buyer: Caller) -> None:
    for number, first in enumerate(("order", "job")):
        orders, jobs = buyer.committed()
        buyer.begin()
        if first == "order":
            buyer.order(number)
        job = buyer.enqueue(app, send.new(1))
        assert job == Job(job.id, "default", "shop.send", State.AVAILABLE, created=True)
        if first == "job":
            buyer.order(number)
        assert buyer.committed() == (orders, jobs)
        buyer.commit()
        assert buyer.committed() == ([*orders, number], [*jobs, job.id])


@every_way
def test_a_rollback_undoes_write_and_job(app: sqlq.App, send: Any, buyer: Caller) -> None:
    for first in ("order", "job", "jobs alone"):
        buyer.begin()
        if first == "order":
            buyer.order(1)
        buyer.enqueue(app, send.new(1))
        buyer.enqueue_many(app, [send.new(2), send.new(3).set(unique_key="k")])
        if first == "job":
            buyer.order(2)
        buyer.rollback()
        assert buyer.committed() == ([], [])
    buyer.begin()
    assert buyer.enqueue(app, send.new(3).set(unique_key="k")).created
    buyer.commit()
    assert len(buyer.committed()[1]) == 1


@common_ways
def test_an_error_or_a_close_undoes_write_and_job(app: sqlq.App, send: Any, buyer: Caller) -> None:
    for end in (buyer.rollback, buyer.close):
        buyer.begin()
        buyer.order(1)
        buyer.enqueue(app, send.new(1))
        if end == buyer.rollback:
            with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
                buyer.order(1)
        end()
        assert buyer.committed() == ([], [])


@every_way
def test_savepoints_keep_or_undo_their_own_jobs(app: sqlq.App, send: Any, buyer: Caller) -> None:
    for end in (buyer.rollback, buyer.commit):
        buyer.begin()
        buyer.order(10)
        with buyer.savepoint():
            buyer.order(1)
            first = buyer.enqueue(app, send.new(1))
        with buyer.savepoint() as undo:
            buyer.order(2)
            buyer.enqueue_many(app, [send.new(2), *(send.new(2).set(unique_key=key) for key in "ab")])
            undo()
        with buyer.savepoint():
            with buyer.savepoint() as undo:
                buyer.enqueue(app, send.new(3).set(unique_key="a"))
                undo()
            last = buyer.enqueue(app, send.new(4).set(unique_key="a"))
        assert last.created
        end()
        kept = ([1, 10], [first.id, last.id]) if end == buyer.commit else ([], [])
        assert buyer.committed() == kept


@common_sessions
def test_a_rollback_undoes_a_savepoint_that_came_first(app: sqlq.App, send: Any, buyer: Caller) -> None:
    with buyer.savepoint():
        buyer.enqueue(app, send.new(1))
    buyer.rollback()
    assert buyer.committed() == ([], [])


@every_way
def test_jobs_arrive_as_without_a_session(app: sqlq.App, send: Any, watch: Engine, caller: Caller) -> None:
    moment = datetime(2030, 1, 31, 8, tzinfo=UTC)
    new = [
        send.new(1).set(start_within="90s"),
        send.new(2, text="ä\"'%s %% :x ? $1 €😀"),
        send.new(3).set(priority=-9, timeout="1m", max_attempts=7, queue="other"),
        send.new(4).set(delay="1h"),
        send.new(5).set(available_at=moment),
        send.new(6).set(unique_key="ключ", unique_until="start"),
        send.new(7).set(unique_key="seven"),
        send.new(8).set(unique_key="ключ"),
    ]
    names = ("task", "queue", "priority", "timeout_ms", "max_attempts", "unique_key", "unique_until")

    def arrived(jobs: list[Job], more: list[Job]) -> list[Any]:
        """Return the answers and the rows, and take these away."""
        assert [(job.id, job.created) for job in more] == [(job.id, False) for job in jobs[5:]]
        answers: list[Any] = [(job.queue, job.task, job.state, job.created) for job in jobs]
        for row in app.jobs.list():
            due = row.available_at or row.created_at
            wait = due if due == moment else due - row.created_at
            start = row.start_by and row.start_by - due
            answers.append((str(row.payload), wait, start, *(getattr(row, name) for name in names)))
        execute(watch, "DELETE FROM jobs")
        return sorted(answers, key=str)

    expected = arrived(app.enqueue_many(new), app.enqueue_many(new[5:]))
    caller.begin()
    together = caller.enqueue_many(app, new), caller.enqueue_many(app, new[5:])
    caller.commit()
    assert arrived(*together) == expected
    caller.begin()
    one_by_one = [caller.enqueue(app, each) for each in new], caller.enqueue_many(app, new[5:])
    caller.commit()
    assert arrived(*one_by_one) == expected


@common_ways
def test_results_are_in_the_order_given(app: sqlq.App, send: Any, watch: Engine, caller: Caller) -> None:
    keys = [None if i % 3 else f"k{i % 7}" for i in range(2_500)]
    new = [send.new(i).set(unique_key=key, priority=i % 5) for i, key in enumerate(keys)]
    caller.begin()
    jobs = caller.enqueue_many(app, new)
    caller.commit()
    with watch.connect() as conn:
        stored = {row.id: row.payload for row in conn.execute(text("SELECT id, payload FROM jobs"))}
    assert {job.id for job in jobs} == set(stored)
    assert [job.created for job in jobs] == [i % 3 != 0 or i < 21 for i in range(2_500)]
    assert all(json.loads(stored[job.id]) == {"args": [i]} for i, job in enumerate(jobs) if job.created)
    plain = [job.id for i, job in enumerate(jobs) if i % 3]
    assert plain == sorted(plain)


@common_ways
def test_jobs_that_differ_in_arguments_only(app: sqlq.App, send: Any, watch: Engine, caller: Caller) -> None:
    arguments = ["", "ä\"'%s :x €😀", "\x1f\x1e\n", "[1,  2]", "NULL", "{a,b}", *map(str, range(1_500))]
    caller.begin()
    jobs = caller.enqueue_many(app, [send.new(each).set(priority=3, timeout="1m") for each in arguments])
    later = caller.enqueue_many(app, [send.new(each).set(delay="1h") for each in arguments[:10]])
    # whatever stands in a payload that was written by hand, it stays one job's
    by_hand = [replace(send.new(), payload=payload) for payload in ('{"args": [1]}', "\x1f", "no JSON")]
    odd = caller.enqueue_many(app, by_hand)
    caller.commit()
    query = text("SELECT id, queue, priority, timeout_ms, payload FROM jobs ORDER BY id")
    with watch.connect() as conn:
        rows = conn.execute(query).all()
    assert [row.id for row in rows] == [job.id for job in (*jobs, *later, *odd)]
    assert [json.loads(row.payload)["args"] for row in rows[:-3]] == [[a] for a in arguments + arguments[:10]]
    assert [row.payload for row in rows[-3:]] == [job.payload for job in by_hand]
    assert {row[1:4] for row in rows[: len(jobs)]} == {("default", 3, 60_000)}
    assert ({job.state for job in jobs}, {job.state for job in later}) == ({"available"}, {"scheduled"})


@common_ways
def test_missing_tables_leave_the_transaction_usable(app: sqlq.App, send: Any, buyer: Caller) -> None:
    execute(buyer.watch, "ALTER TABLE sqlq_version RENAME TO elsewhere")
    buyer.begin()
    buyer.order(1)
    says = "does not hold sqlq's tables yet: create them with `sqlq migrate -d "
    for enqueue in (buyer.enqueue, buyer.enqueue, sqlq.App.enqueue):
        with pytest.raises(sqlq.errors.SchemaVersionError, match=says):
            enqueue(app, send.new())
    buyer.order(2)
    buyer.commit()
    assert buyer.committed() == ([1, 2], [])
    execute(buyer.watch, "ALTER TABLE elsewhere RENAME TO sqlq_version")
    buyer.begin()
    assert buyer.enqueue(app, send.new(1)).created
    buyer.commit()


@every_way
def test_a_refused_row_raises_the_callers_kind_of_error(app: sqlq.App, send: Any, buyer: Caller) -> None:
    kinds: list[Any] = [psycopg.IntegrityError, psycopg2.IntegrityError, sqlite3.IntegrityError, DBAPIError]
    kinds += [asyncpg.PostgresError, pymysql.OperationalError, django.db.DatabaseError]
    if importlib.util.find_spec("MySQLdb"):
        kinds.append(importlib.import_module("MySQLdb").OperationalError)
    buyer.begin()
    buyer.order(1)
    with buyer.savepoint() as undo:
        with pytest.raises(tuple(kinds), match="priority"):
            buyer.enqueue(app, replace(send.new(1), priority=1_000))
        undo()
    job = buyer.enqueue(app, send.new(2))
    buyer.commit()
    assert buyer.committed() == ([1], [job.id])
