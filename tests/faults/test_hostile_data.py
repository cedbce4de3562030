"""Data that nobody means to send: accepted data arrives equal, the rest is refused or ends as a failed job.

A hundred jobs behind it run within five seconds.
"""

import functools
import json
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from decimal import Decimal
from enum import StrEnum
from typing import Any

import psycopg
import pymysql
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

import sqlq
from tests.faults import guard
from tests.faults.account import record
from tests.kit import NOW, drain, needs, rescue, span

pytestmark = pytest.mark.each_database

BEHIND = 100
SECONDS = 30.0
SEED = 20_261_124


@pytest.fixture(autouse=True)
def guarded(engine: Engine) -> None:
    guard.install(engine)


# -- arguments -----------------------------------------------------------------------------------------------


class Colour(StrEnum):
    RED = "red"


ACCEPTED: list[Any] = [
    *("", "\u2028\u2029\x7f\x01\x1f\t\r\n\"\\/'", "é ß 漢字 \U0001f600 \U0010ffff \ufeff \ufffe \u202e"),
    "e\u0301",  # not normalised to é
    *("'; DROP TABLE jobs; --", "%s %(name)s {0} :name $1 ?", "NaN", "x" * 500_000),
    *(0, -0.0, 2**63, -(2**200), 10**3998, 1e308, 5e-324, 0.1 + 0.2, True, None, [], {}),
    {"": {"": [[], {}, None]}},
    {"args": [1], "kwargs": {"a": 2}},
    {"__proto__": 1, "id": 2, "self": 3},
    [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]],
    list(range(10_000)),
]

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def nested(depth: int) -> Any:
    one: Any = 1
    return functools.reduce(lambda value, _: [value], range(depth), one)


def echoed(app: sqlq.App, values: list[Any]) -> list[Any]:
    """Send values through a worker, and return what its handler got, in order."""
    got: dict[int, Any] = {}
    name = f"echo{time.monotonic_ns()}"

    @app.task(name=name)
    def echo(n: int, value: Any, *, again: Any) -> None:
        got[n] = (value, again)

    app.enqueue_many([echo.new(n, value, again=value) for n, value in enumerate(values)])
    assert app.worker(drain=True).run().finished == len(values)
    assert all(first == second for first, second in got.values())
    return [got[n][0] for n in range(len(values))]


def exactly(value: Any) -> str:
    """Text that is equal for values equal in type as well: 1, 1.0 and True are three, and so are 0.0 and
    -0.0."""
    return f"{type(value).__name__}:{value!r}"


def test_accepted_arguments_arrive_equal(app: sqlq.App) -> None:
    assert [exactly(value) for value in echoed(app, ACCEPTED)] == [exactly(value) for value in ACCEPTED]


def test_any_json_arrives_equal(app: sqlq.App) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    leaves = st.none() | st.booleans() | st.integers() | text
    values = st.recursive(
        leaves | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=12,
    )

    @seed(SEED)
    @settings(max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(values, min_size=60, max_size=80))
    def sent(batch: list[Any]) -> None:
        assert [exactly(value) for value in echoed(app, batch)] == [exactly(value) for value in batch]

    sent()


# -- exceptions ----------------------------------------------------------------------------------------------


class Unspeakable(BaseException):
    """Neither shown nor compared."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class SpeechlessError(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307 - this is the point


class LiarError(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class EndlessError(Exception):
    def __str__(self) -> str:
        return str(self)


def chained_in_a_circle() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    raise one


def recursing() -> None:
    recursing()


def deep_chain() -> None:
    error = ValueError("root")
    for n in range(300):
        following = ValueError(n)
        following.__cause__, error = error, following
    raise error


def of_a_strange_name() -> None:
    raise type("E\ud800\0" + "x" * 100_000, (Exception,), {})("strange")


def raising(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


FAILING: dict[str, Callable[[], Any]] = {
    "BaseException": raising(BaseException("base")),
    "unspeakable": raising(Unspeakable()),
    "speechless": raising(SpeechlessError()),
    "liar": raising(LiarError()),
    "endless": raising(EndlessError()),
    "group": raising(BaseExceptionGroup("several", [ValueError(1), KeyboardInterrupt(), Unspeakable()])),
    "circle": chained_in_a_circle,
    "recursion": recursing,
    "deep chain": deep_chain,
    "strange name": of_a_strange_name,
    "memory": raising(MemoryError()),
    "no memory": lambda: bytearray(2**62),
    "arguments": raising(ValueError(*("x" * 100_000 for _ in range(20)))),
    "unicode": raising(UnicodeDecodeError("utf-8", b"\xff" * 1_000_000, 0, 1, "bad")),
    "os": raising(OSError(2, "\udcff\0")),
    "sqlq's own": raising(sqlq.LeaseLostError("not really")),
    "arguments error": raising(sqlq.errors.ArgumentsError("by the handler")),
    "stop": raising(StopIteration("7")),
    "syntax": lambda: compile("\0(", "\ud800", "exec"),
}


def test_no_exception_stops_the_jobs_behind_it(app: sqlq.App, engine: Engine) -> None:
    names = {
        name: app.enqueue(app.task(name=name, max_attempts=2, backoff="0s")(body).new().set(priority=9)).id
        for name, body in FAILING.items()
    }
    behind_runs_within_five_seconds(app)
    drain(app)
    for name, id in names.items():
        job = app.jobs.get(id)
        assert (job.state, job.reason, job.attempts, len(job.errors)) == ("failed", "error", 2, 1), name
        assert job.exception, name
    guard.check(engine)


# -- results -------------------------------------------------------------------------------------------------


class Hostile(dict[str, Any]):
    def __iter__(self) -> Iterator[Any]:
        raise SystemExit(3)

    items = keys = __len__ = __iter__  # type: ignore[assignment]


class HostileInt(int):
    def __repr__(self) -> str:
        return "1; DROP TABLE jobs"


RESULTS: list[Any] = [*ACCEPTED[:-1], (1, 2), {1: "one"}, Colour.RED]
DROPPED: list[Any] = [
    *(CYCLE, nested(100_000), {(1, 2): 3}, b"x", math.inf, Decimal(1), iter([])),
    *(Unspeakable(), LiarError()),
]


def test_results_arrive_equal_or_are_null(app: sqlq.App) -> None:
    def returned(value: Any) -> int:
        return app.enqueue(app.task(name=f"t{time.monotonic_ns()}")(lambda: value).new()).id

    kept, dropped = [returned(value) for value in RESULTS], [returned(value) for value in DROPPED]
    behind_runs_within_five_seconds(app)
    drain(app)
    expected = [json.loads(json.dumps(value)) for value in RESULTS]
    assert [exactly(app.jobs.get(id).result) for id in kept] == [exactly(value) for value in expected]
    assert {(app.jobs.get(id).state, app.jobs.get(id).result) for id in dropped} == {("finished", None)}


@pytest.mark.parametrize("value", [Hostile(a=1), HostileInt(1)], ids=["dict", "int"])
def test_a_hostile_result_harms_its_own_job_only(app: sqlq.App, value: Any) -> None:
    job = app.enqueue(app.task(name="fights", max_attempts=1)(lambda: value).new().set(priority=9))
    behind_runs_within_five_seconds(app)
    drain(app)
    assert app.jobs.get(job.id).state in ("finished", "failed")


# -- rows inserted by hand -----------------------------------------------------------------------------------


def row(**columns: str) -> str:
    """Return the columns and values of an INSERT: those given, and of a job at the head of the queue."""
    columns = {"task": "'t'", "priority": "100", **columns}
    return f"({', '.join(columns)}) VALUES ({', '.join(columns.values())})"


def expired(**columns: str) -> str:
    return row(**columns, reserved_at="{past}", reserved_by="'x'", lease_expires_at="{past}")


LARGEST, LARGEST_TOKEN = "1000000000", "4000000000000000000"
"""The largest numbers that the tables take."""
ROWS = {
    "payload that is not JSON": row(payload="'{'"),
    "payload of a number too long to read": row(payload=f"""'{{"args": [{"9" * 5000}]}}'"""),
    "payload nested 520 levels": row(payload=f"""'{{"args": {"[" * 520}{"]" * 520}}}'"""),
    "headers nested 520 levels": row(headers=f"""'{{"a": {"[" * 520}{"]" * 520}}}'"""),
    "payload with a constant JSON does not have": row(payload="""'{"args": [NaN]}'"""),
    "payload with an escaped surrogate": row(payload="""'{"args": ["\\ud800"]}'"""),
    "task without a name": row(task="''"),
    "task nobody knows": row(task="'no.such\n\ttask %s {}'"),
    "queue without a name": row(queue="''"),
    "attempts above the maximum": row(attempts="7", max_attempts="5"),
    "attempts at the largest there may be": row(task="'fails'", attempts=LARGEST, max_attempts=LARGEST),
    "token at the largest there may be": row(lease_token=LARGEST_TOKEN),
    "releases at the largest there may be": row(task="'snooze'", releases=LARGEST),
    "token and losses at the largest possible, expired": expired(lease_token=LARGEST_TOKEN, losses=LARGEST),
    "errors that are no array": row(task="'fails'", errors="'xx'"),
    "headers that are no JSON": row(headers="'{'"),
    "a backoff without end": row(
        task="'fails'", backoff="""'{"shape": "list", "waits_ms": [1e999], "cap_ms": 1, "jitter": 0}'"""
    ),
}
KEPT_OUT = {
    **{
        f"{column} of 5 MB": row(**{column: f"""'"{"x" * 5_000_000}"'"""})
        for column in ("payload", "headers", "on_success", "on_failure", "backoff")
    },
    "attempts at the limit": row(attempts="{largest}", max_attempts="{largest}"),
    "token at the limit": row(lease_token="9223372036854775807"),
    "releases at the limit": row(task="'snooze'", releases="{largest}"),
    "token at the limit, expired": expired(lease_token="9223372036854775807"),
    "losses at the limit, expired": expired(losses="{largest}"),
    "errors that are empty, expired": expired(errors="''"),
    "a lease for ever": row(reserved_at="{past}", reserved_by="'x'", lease_expires_at="{never}"),
    "unknown since for ever": row(task="'no.such'", unknown_since="{never}"),
    "a timeout before the start": row(timeout_ms="-5"),
    "a timeout of an aeon": row(timeout_ms="9223372036854775807"),
}
"""Rows that the tables refuse: accepted, they would stop the claim, the rescue or the enqueue of every other
row."""
NEGATIVE, LARGEST_ID = {"a negative id": row(id="-1")}, {"the largest id": row(id="9223372036854775807")}
"""Where the largest id was once given by hand, SQLite gives no more; PostgreSQL counts on by itself. MariaDB
counts on from the largest id given by hand, and takes no CHECK of a column that it counts."""
SQLITE_ROWS = {
    "payload of bytes": row(payload="X'ff00'"),
    "payload that is not UTF-8": row(payload="CAST(X'7b22ff227d' AS TEXT)"),
    "arguments that are not UTF-8": row(payload="CAST(X'7b2261726773223a5b22ff225d7d' AS TEXT)"),
    "task that is not UTF-8": row(task="CAST(X'ff' AS TEXT)"),
    "queue that is not UTF-8": row(queue="CAST(X'ff' AS TEXT)"),
    "key that is not UTF-8": row(unique_key="CAST(X'ff' AS TEXT)"),
    "task of bytes": row(task="X'ff'"),
    "queue of bytes": row(queue="X'ff'"),
    "task with a NUL": row(task="'a' || char(0) || 'b'"),
    "task with a name of 3 MB": row(task="printf('%.*c', 3000000, 'x')"),
}
SQLITE_KEPT_OUT = {
    "timeout in words": row(timeout_ms="'soon'"),
    "attempts in words": row(attempts="'many'"),
    "priority in halves": row(priority="0.5"),
    "a date in words": row(available_at="'2020-01-01'"),
}
ACCEPTED_AND_KEPT_OUT = {
    "postgresql": (ROWS | NEGATIVE | LARGEST_ID, KEPT_OUT),
    "sqlite": (ROWS | SQLITE_ROWS, KEPT_OUT | NEGATIVE | LARGEST_ID | SQLITE_KEPT_OUT),
    "mariadb": (ROWS | NEGATIVE, KEPT_OUT),
}
NEVER = {
    "postgresql": "'infinity'",
    "sqlite": "9000000000000000000",
    "mariadb": "'9999-12-31 23:59:59.999999'",
}


def insert_by_hand(engine: Engine, row: str) -> bool:
    """Write a row as psql or the sqlite3 shell would; return False if the database refuses it."""
    kind = engine.dialect.name
    words = {
        "{past}": f"{NOW[kind]} - {span(engine, 60)}",
        "{never}": NEVER[kind],
        "{largest}": "9223372036854775807" if kind == "sqlite" else "2147483647",
    }
    for word, value in words.items():
        row = row.replace(word, value)
    with engine.connect() as conn, closing(conn.connection.cursor()) as cursor:
        cursor.execute("INSERT INTO guard_off VALUES (1)")
        try:
            cursor.execute(f"INSERT INTO jobs {row}")
        except (psycopg.errors.CheckViolation, sqlite3.IntegrityError, pymysql.Error):
            return False
        cursor.execute("DELETE FROM guard_off")
        conn.connection.commit()
    return True


def test_broken_rows_at_the_head_do_not_block_the_queue(app: sqlq.App, engine: Engine) -> None:
    accepted, kept_out = ACCEPTED_AND_KEPT_OUT[engine.dialect.name]
    assert meet(app, engine, accepted | kept_out) == accepted.keys()


WORKERS = [("queues", "'{'"), ("queues", "'5'"), ("queues", "'[[1]]'"), ("seen_at", "{never}")]
WORKERS += [("pid", "2147483647")]
SQLITE_WORKERS = [("queues", "CAST(X'ff' AS TEXT)"), ("pid", "'many'"), ("concurrency", "0.5")]
SQLITE_WORKERS += [("host", "X'ff'"), ("version", "X'ff'"), ("id", "X'ff'")]


def test_broken_rows_of_workers_and_queues_hide_no_others(app: sqlq.App, engine: Engine) -> None:
    sqlite = engine.dialect.name == "sqlite"
    never = NEVER[engine.dialect.name]
    for number, (column, value) in enumerate(WORKERS + (SQLITE_WORKERS if sqlite else [])):
        values = {"id": f"'{number}'", "host": "'h'", "pid": "1", "version": "'1'", "concurrency": "1"}
        values |= {column: value.replace("{never}", never)}
        into, row = ", ".join(values), ", ".join(values.values())
        try_to(engine, f"INSERT INTO sqlq_workers ({into}) VALUES ({row})")
    try_to(engine, f"INSERT INTO sqlq_queues VALUES ('never', {never})")
    assert app.queues.list() == []
    serves = [worker.queues for worker in app.workers.list()]
    assert (serves.count(()), serves.count(None)) == (4 if sqlite else 3, 1)
    assert [worker.id for worker in app.workers.list()][:3] == ["0", "1", "2"]


def try_to(engine: Engine, statement: str) -> None:
    with suppress(DBAPIError), engine.begin() as conn:
        conn.exec_driver_sql(statement)


def meet(app: sqlq.App, engine: Engine, rows: dict[str, str]) -> set[str]:
    """Put rows at the head of the queue, demand that the jobs behind them run, and return the names of those
    not refused."""

    @app.task(name="snooze")
    def snooze() -> None:
        raise sqlq.Snooze("1h")

    app.task(name="fails", max_attempts=2, backoff="0s")(lambda: 1 / 0)
    app.task(name="t")(lambda *args: None)
    accepted = {name for name, row in rows.items() if insert_by_hand(engine, row)}
    seconds = behind_runs_within_five_seconds(app)
    record("G10: broken rows at the head of the queue", cases=len(rows), behind_seconds=round(seconds, 2))
    others = [job for job in app.jobs.list(limit=1_000) if job.task != "behind"]
    assert len(others) == len(accepted), "each can still be looked at"
    app.queues.list()  # it can be read
    beginnings = ("payload that is not", "payload of bytes", "arguments that")
    unreadable = [name for name in accepted if name.startswith(beginnings)]
    refused = [job for job in app.jobs.list(state="failed") if job.reason == "bad_payload"]
    assert len(refused) >= len(unreadable)
    return accepted


@needs("cheap")
def test_a_step_with_bytes_does_not_block_other_steps(app: sqlq.App, engine: Engine) -> None:
    first = app.task(name="first")(lambda: 1)
    then = app.task(name="then", max_attempts=1)(lambda given: given)
    app.enqueue(sqlq.chain(first.new(), then))
    assert insert_by_hand(
        engine,
        "(flow_id, task, priority, payload) VALUES ((SELECT max(id) FROM sqlq_flows), 'then', 100, "
        """CAST('{"results": [[0, 0]]}' AS BLOB))""",
    )
    drain(app)
    ends = {(str(job.state), job.reason) for job in app.jobs.list(task="then", limit=10)}
    assert ends == {("finished", None), ("failed", "bad_payload")}


def behind_runs_within_five_seconds(app: sqlq.App) -> float:
    """Enqueue a hundred jobs behind what there is, and let a worker run them all; return how long it took."""
    ran: Counter[int] = Counter()
    all_ran = threading.Event()

    @app.task(name="behind")
    def behind(n: int) -> None:
        ran[n] += 1
        if len(ran) == BEHIND:
            all_ran.set()

    app.enqueue_many([behind.new(n) for n in range(BEHIND)])
    begin = time.monotonic()
    with app.worker(concurrency=1, lease="1s"):  # one slot: nothing passes by what is in front
        assert all_ran.wait(SECONDS), f"{len(ran)} of {BEHIND} ran within {SECONDS:g} s"
        seconds = time.monotonic() - begin
    rescue(app)  # it meets the rows, too
    return seconds
