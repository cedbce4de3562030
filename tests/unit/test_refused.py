"""Mistakes of callers and operators that need no database: the call, and the sentence that refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial, reduce
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy import create_engine

import sqlq
from sqlq import Limit, Retry, Schedule, Serial, Snooze, exponential
from sqlq.config.durations import milliseconds
from sqlq.errors import ArgumentsError, ConfigurationError, EnqueueError, SqlqError
from sqlq.model.backoff import backoff_from, stored
from sqlq.model.job import NewJob
from sqlq.model.schedule import read
from sqlq.model.task import make_task
from sqlq.payload.codec import decode, encode
from sqlq.payload.encryption import new_key
from sqlq.worker.options import WorkerOptions, checked_bytes

URL: Any = "sqlite:///never-connected-to.db"
SHOP: Any = sqlq.App(URL)
TASK: Any = SHOP.task(name="shop.send_receipt")(lambda order_id: None)
APP: Any = sqlq.App
RETRY: Any = Retry
SNOOZE: Any = Snooze
"""Without their types, since what is wrong is tried."""
KEY, BERLIN = new_key(), "Europe/Berlin"
JOB: Any = NewJob(task="shop.send_receipt", payload="{}", queue="mail", max_attempts=5)
MADE: Any = sqlq.Job(1, "mail", "shop.send_receipt", sqlq.State.AVAILABLE, created=True)
SOON, NAIVE = datetime(2030, 1, 1, tzinfo=UTC), datetime(2040, 1, 1)  # noqa: DTZ001
TENANTS: Any = [ContextVar("tenant"), ContextVar("tenant")]


def send(order_id: int, *, copy: bool = False) -> None: ...


def generate() -> Iterator[int]:
    yield 1


async def middle(running: Any) -> None: ...


async def generate_async() -> AsyncIterator[int]:
    yield 1


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


DOUBLED: Any = reduce(lambda inner, _: [inner] * 2, range(60), cast("Any", []))
"""Small here, and huge as JSON."""

MIDDLEWARE = [
    (7, "middleware is 7: it is a function that takes one argument, the running job"),
    (nullcontext(), "it is a function that.*each time it is called"),
    (middle, "middle: it is a function that takes one argument"),
    (generate, r"generate\(\) -> .* cannot be called: middleware takes one argument, the running job"),
    (int, "middleware is builtins.int: it is a function that"),
]

Refused = tuple[Callable[[Any], object], type[Exception], str, tuple[tuple[Any, str], ...]]


def table(
    call: Callable[[Any], object],
    *rows: tuple[Any, str],
    error: type[Exception] = ConfigurationError,
    pattern: str = "{}",
) -> Refused:
    return call, error, pattern, rows


REFUSED: dict[str, Refused] = {
    "a text that is no duration": table(
        lambda value: milliseconds(value, "delay"),
        *(
            (value, r'^delay is .*: (give a timedelta or text such as|write it as in) "30s"')
            for value in ("", "5", "m", "5 minutes", "-5m", "1e3s", ".5s", 5, True, None, b"5m", ["5m"])
        ),
    ),
    "a duration out of range": table(
        lambda value: milliseconds(value, "delay"),
        *(
            (value, "^delay is .*: it must lie between zero and a hundred years$")
            for value in ("36601d", "9" * 400 + "d", timedelta(microseconds=-1), timedelta.max)
        ),
    ),
    "defaults of an App": table(
        lambda arguments: APP(URL, **arguments),
        ({"defaults": {"delay": "5m"}}, "defaults has no option 'delay'; it has queue, priority"),
        ({"defaults": {"time_limit": "5m"}}, "defaults has no option 'time_limit'; .* is timeout here"),
        ({"defaults": {"timeout": 5}}, "defaults: timeout is 5: give a timedelta"),
        ({"defaults": ["timeout"]}, r"defaults is \['timeout'\]: it maps options to values"),
        ({"defaults": {"backoff": []}}, "defaults: backoff is an empty list"),
        ({"defaults": {"headers": {"a": object()}}}, r"defaults: headers\['a'\] is <object .* is not JSON"),
        ({"queues": {"mail": {"queue": "x"}}}, r"queues\['mail'\] has no option 'queue'"),
        ({"queues": {"a,b": {}}}, "queue is 'a,b': a comma separates queues"),
        ({"queues": ["mail"]}, r"queues is \['mail'\]: it maps names of queues"),
        ({"queues": {"stack": {"order": "random"}}}, r"queues\['stack'\]: order is .random.: it is"),
        ({"service": "a,b"}, "service is 'a,b': a comma separates queues"),
        ({"defaults": {"start_within": "0s"}}, "defaults: start_within is zero"),
        ({"carry": "tenant"}, "carry is 'tenant': it is a list of context variables"),
        ({"carry": TENANTS}, r"carry is \[.*\]: it is a list of context variables with different names"),
        ({"retention": "soon"}, "retention is 'soon'"),
        pattern="^{}",
    ),
    "options of a worker": table(
        lambda options: WorkerOptions.of(**options),
        ({"poll": "10ms"}, "poll is '10ms': it must lie between 20 ms and 5 s"),
        ({"poll": 1}, "poll is 1: give a timedelta"),
        ({"ahead": "2s"}, "ahead is '2s': it must lie between 0 ms and 1 s"),
        ({"claim_batch": 0}, "claim_batch is 0: it must be a whole number from 1 to 1,000"),
        ({"claim_batch": "many"}, "claim_batch is 'many': it must be a whole number from 1 to 1,000"),
        ({"concurrency": 1_001}, "concurrency is 1001: it must be a whole number from 1 to 1,000"),
        ({"lease": "2d"}, "lease is '2d': it must lie between 1 s and 24 h"),
        ({"grace": "long"}, "grace is 'long': write it as in"),
        ({"lease": "soon"}, "lease is 'soon': .*30s"),
        ({"max_jobs": 0}, "max_jobs is 0: it must be a whole number from 1 to"),
        ({"queues": "mail"}, ".*give a list"),
        ({"queues": []}, ".*at least one queue"),
        ({"queues": [""]}, ".*not blank"),
        pattern="^{}",
    ),
    "a text that is no size": table(
        lambda value: checked_bytes(value, "max_rss"),
        *(
            (value, 'give a size such as "400MB"')
            for value in ("", "0", "400 apples", "-1MB", "MB", 0, -7, True, None, 1.5)
        ),
    ),
    "middleware of an App": table(lambda value: APP(URL).middleware(value), *MIDDLEWARE),
    "middleware of a task": table(lambda each: APP(URL).task(name="t", middleware=[each])(send), *MIDDLEWARE),
    "encryption of an App": table(
        lambda options: APP(URL, **options),
        ({"encryption": "sign"}, "encryption is set, but there is no key"),
        ({"keys": [], "plain": "refuse"}, "plain is set, but there is no key"),
        ({"keys": [KEY], "encryption": "rot13"}, 'encryption is .rot13.: it is "sign", "encrypt" or "read"'),
        ({"keys": [KEY], "plain": "maybe"}, "plain is 'maybe'"),
        ({"keys": [KEY], "plain": ["a,b"]}, "a comma separates queues"),
        ({"keys": [KEY], "encryption": "read", "plain": "refuse"}, "this App itself writes plain rows"),
    ),
    "options of a task": table(
        lambda options: APP(URL).task(**options)(send),
        ({"queue": ""}, "queue is ''"),
        ({"queue": 7}, "queue is 7"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"priority": 101}, "priority is 101"),
        ({"timeout": 30}, "timeout is 30"),
        ({"timeout": "0s"}, "timeout is zero"),
        ({"backoff": 30}, "backoff is 30"),
        ({"retry_on": "OSError"}, "retry_on holds 'OSError': it lists exception classes"),
        ({"fail_on": (OSError, 7)}, "fail_on holds 7"),
        ({"fail_on": OSError()}, "fail_on holds OSError"),
        ({"name": ""}, "the task's name is ''"),
        ({"name": "n" * 256}, "the task's name has 256 characters"),
        ({"aliases": "mail.send"}, "aliases is 'mail.send': it is a list of names"),
        ({"aliases": {"mail.send"}}, "aliases is {'mail.send'}: it is a list of names"),
        ({"aliases": ["a", ""]}, "an alias is ''"),
        ({"que": "mail"}, "@app.task has no option que; it has name, queue, max_attempts"),
        (
            {"max_retries": 3, "throws": (OSError,), "countdown": 5},
            "@app.task has no option countdown, max_retries, throws; max_retries is max_attempts here, "
            "which counts the first one; throws is fail_on here; it has name, queue",
        ),
        pattern="^{}",
    ),
    "a generator as a handler": table(
        lambda handler: make_task(handler, name="shop.generate"),
        *[(generate, ""), (generate_async, ""), (partial(generate), "")],
        pattern="^shop.generate is a generator function: calling it runs none of its body{}",
    ),
    "a payload that nobody can run": table(
        decode,
        *(
            (value, "")
            for value in (
                *("", "nonsense", "[7]", "7", "null", '{"arg": [7]}', '{"args": 7}', '{"args": {}}'),
                *('{"kwargs": [7]}', '{"args": null}', "[" * 200_000),
            )
        ),
        error=ArgumentsError,
        pattern="payload{}",
    ),
    "options of a job": table(
        lambda options: JOB.set(**options),
        ({"delay": "5m", "available_at": SOON}, "both delay and available_at are set: give one of them"),
        ({"delay": 5}, "delay is 5: give a timedelta"),
        ({"start_within": "0s"}, "start_within is zero: no job could be started or finished in it"),
        ({"start_within": 90}, "start_within is 90: give a timedelta or text"),
        ({"start_within": "-1s"}, "start_within is '-1s': write it as in"),
        ({"start_by": NAIVE}, "start_by is 2040-01-01 00:00:00, which has no time zone"),
        ({"start_by": SOON, "start_within": "1h"}, "both start_within and start_by are set: give one of"),
        ({"headers": ["a"]}, r"headers is \['a'\]: headers are a mapping of names to JSON"),
        ({"headers": {7: "a"}}, "headers has the name 7: a header is named by text"),
        ({"headers": {"": "a"}}, "headers has the name ''"),
        ({"headers": {"sqlq.carry": {}}}, "headers has the name 'sqlq.carry': names that begin with"),
        ({"headers": {"at": SOON}}, r"headers\['at'\] is .* of type datetime, which is not JSON"),
        ({"headers": {"a": {"b": float("nan")}}}, r"headers\['a'\]\['b'\] is nan"),
        ({"headers": {"a": "\0"}}, r"headers\['a'\] holds a NUL"),
        ({"headers": {"a": "x" * 16_384}}, "the headers take 16,393 bytes as JSON, more than the 16,384"),
        ({"delay": "-5m"}, "delay is '-5m': write it as in"),
        ({"delay": timedelta(seconds=-5)}, "delay is .*: it must lie between zero and a hundred years"),
        ({"available_at": NAIVE}, "available_at is 2040-01-01 00:00:00, which has no time zone"),
        ({"available_at": "tomorrow"}, "available_at is 'tomorrow': give a datetime with a time zone"),
        ({"priority": 101}, "priority is 101: it must be a whole number from -100 to 100"),
        ({"priority": -101}, "priority is -101"),
        ({"priority": 1.0}, "priority is 1.0"),
        ({"priority": True}, "priority is True"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"max_attempts": 0}, "max_attempts is 0: it must be a whole number from 1"),
        ({"max_attempts": 1_000_001}, "max_attempts is 1000001"),
        ({"max_attempts": True}, "max_attempts is True"),
        ({"timeout": "0s"}, "timeout is zero"),
        ({"timeout": 30}, "timeout is 30: give a timedelta"),
        ({"queue": ""}, "queue is '': it must be text that is not blank"),
        ({"queue": " "}, "queue is ' '"),
        ({"queue": 7}, "queue is 7"),
        ({"queue": "q" * 256}, "queue has 256 characters: at most 255"),
        ({"queue": "a\0b"}, "queue is 'a\\\\x00b': it holds a NUL"),
        ({"unique_key": ""}, "unique_key is ''"),
        ({"unique_key": "k" * 256}, "unique_key has 256 characters: .*; for a long key enqueue a hash"),
        ({"label": "x" * 300}, "label has 300 characters: at most 255 are possible$"),
        ({"unique_key": "\ud800"}, "unique_key is .*: it holds a NUL or a lone surrogate"),
        ({"unique_key": 7}, "unique_key is 7"),
        ({"unique_until": "end"}, 'unique_until is \'end\': it is "finish", "start" or "pruned"'),
        error=EnqueueError,
        pattern="^{}",
    ),
    "a limit": table(
        lambda make: make(),
        (lambda: Limit("a"), "says nothing: give running=, rate= or both"),
        (lambda: Limit("a", running=0), "running is 0: it must be a whole number from 1"),
        (lambda: Limit("a", running=True), "running is True"),
        (lambda: Limit("a", rate="often"), "rate is 'often': it is a number of starts and a period"),
        (lambda: Limit("a", rate="0/1m"), "rate is '0/1m': it is a number of starts"),
        (lambda: Limit("a", rate="5/0s"), "a period, neither zero"),
        (lambda: Limit("a", rate="5/1y"), "the period of rate '5/1y' is '1y': write it as in"),
        (lambda: Limit("a", rate=5), "rate is 5"),  # type: ignore[arg-type]
        (lambda: Limit("", running=1), "the key of a limit is '': it must be text that is not blank"),
        (lambda: Limit(7, running=1), "the key of a limit is 7"),  # type: ignore[arg-type]
        (lambda: Limit("a{", running=1), "is no template"),
        (lambda: Serial("a", on_failure="stop"), 'on_failure is \'stop\': it is "continue" or "hold"'),  # type: ignore[arg-type]
    ),
    "a backoff": table(
        backoff_from,
        (5, "backoff is 5: give a timedelta"),
        ("soon", "backoff is 'soon'"),
        ([], "backoff is an empty list"),
        (["1s", "soon"], r"backoff\[1\] is 'soon'"),
        ([5], r"backoff\[0\] is 5"),
        ({"1s"}, "backoff is {'1s'}"),
        pattern="^{}",
    ),
    "jitter": table(
        lambda jitter: exponential(jitter=jitter),
        *(
            (value, "jitter is .*: it is a share of the wait")
            for value in [-0.1, 1.1, float("nan"), float("inf")]
        ),
    ),
    "a plan": table(
        lambda options: Schedule(**options),
        ({"cron": "61 * * * *"}, "cron is '61 \\* \\* \\* \\*' \\(bad minute\\): it has five fields"),
        ({"cron": "0 3"}, "wrong number of fields"),
        ({"cron": "@reboot"}, "or one of @hourly, @daily, @midnight, @weekly"),
        ({"cron": 3}, "cron is 3: it is text"),
        ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
        ({}, "a schedule has one of cron="),
        ({"cron": "* * * * *", "every": "3s"}, "a schedule has one of cron="),
        ({"every": "999ms"}, "every is 999 ms: it must be at least 1 s"),
        ({"every": 5}, "every is 5: give a timedelta or text"),
        ({"cron": "* * * * *", "timezone": "Mars/Base"}, "timezone is 'Mars/Base', which this machine"),
        ({"cron": "* * * * *", "timezone": "../etc"}, "which this machine does not know"),
        ({"every": "1h", "timezone": BERLIN}, "only cron is read in a time zone"),
        ({"every": "1h", "repeats": 0}, "repeats is 0: it must be a whole number from 1 to 1,000,000,000"),
        ({"every": "1h", "catch_up": "some"}, 'catch_up is \'some\': it is "latest", "all" or "skip"'),
        ({"every": "1h", "overlap": "never"}, 'overlap is \'never\': it is "allow", "skip" or "queue"'),
        ({"at": NAIVE}, "has no time zone"),
    ),
    "a stored plan": table(
        read,
        *(
            (value, r"\w")
            for value in ("[]", "5", '{"cron": "x"}', '{"every": "?"}', '{"cron": "* * * * *", "moon": 1}')
        ),
    ),
    "a URL": table(
        sqlq.App,
        *(
            (value, "the database URL cannot be read: it has the form postgresql://")
            for value in ["", "shop.db", "postgresql:/h/d", "postgresql://h:port/d"]
        ),
    ),
    "a URL of an unusable database": table(
        lambda url: sqlq.App(url).database,
        ("sqlite://shop.db", "cannot be used: Invalid SQLite URL: sqlite://shop.db"),
        ("sqlite:///shop.db?timeout=soon", "cannot be used: could not convert string to float: 'soon'"),
        ("postgresql://u@/d?host=a,b&port=1", "cannot be used: number of hosts and ports don't match"),
    ),
    "a value that is no JSON": table(
        lambda value: encode((value,), {}),
        (b"x", r"args\[0\] is b.x. of type bytes, which is not JSON: annotate the parameter as bytes, or by"),
        ({1}, r"args\[0\] is \{1\} of type set, .*: annotate the parameter as set, .* pass it as it is$"),
        (datetime(2030, 1, 1, tzinfo=UTC), "annotate the parameter as datetime, or"),
        (date(2030, 1, 1), "annotate the parameter as date, or"),
        (Decimal("1.10"), "annotate the parameter as Decimal, or"),
        (UUID(int=1), "annotate the parameter as UUID, or"),
        ([UUID(int=1)], r"or by what it holds, as in list\[UUID\], and pass it as it is"),
        ({"a": [1, {7: 1}]}, r"args\[0\]\['a'\]\[1\] has the key 7, but JSON's keys are text: use '7'"),
        ({"a\0": 1}, r"args\[0\], key 'a\\x00', holds a NUL or a lone surrogate"),
        ({True: 1}, "has the key True"),
        ({None: 1}, "has the key None"),
        (10**4_000, "is an integer of more than 4,000 digits"),
        (-(10**4_000), "is an integer of more than 4,000 digits"),
        (range(3), r"type range, which is not JSON: pass an id, or build it from"),
        (Unreadable(), r"^args\[0\] is a value of type Unreadable"),
        (DOUBLED, "more than the 1,048,576 bytes allowed as JSON"),
        error=ArgumentsError,
    ),
    "a weight of a queue": table(
        lambda weight: WorkerOptions.of({"mail": weight}),
        *(
            (weight, "^queue 'mail': its weight is .*: it must be a whole number from 1 to 1,000$")
            for weight in (0, -1, 1_001, True, "3", 1.5, None)
        ),
    ),
    "direct_calls": table(
        lambda wrong: APP(direct_calls=wrong),
        *[(value, 'direct_calls is .*: it is "allow", "warn"') for value in ("no", True, None, "")],
    ),
    "a conflict of unique keys": table(
        lambda options: JOB.set(**options),
        ({"on_conflict": "replace"}, 'on_conflict="replace" is about a unique key'),
        ({"on_conflict": "drop", "unique_key": "k"}, "on_conflict is 'drop': it is"),
        ({"on_conflict": "debounce", "unique_key": "k"}, "without max_wait could put the job off for ever"),
        ({"max_wait": "5m"}, 'max_wait="5m" is about a unique key'),
        ({"max_wait": "5m", "unique_key": "k"}, "and max_wait is for that alone"),
        ({"max_wait": 5, "on_conflict": "debounce", "unique_key": "k"}, "max_wait is 5: give a timedelta"),
        error=EnqueueError,
    ),
    "a name of another queue": table(
        lambda look: look(),
        (lambda: TASK.s, r"^the task shop.send_receipt has no 's': write task.new\(…\)$"),
        (lambda: TASK.delay, r"shop.send_receipt has no 'delay': write app.enqueue\(task.new\(…\)\)$"),
        (lambda: SHOP.send_task, r"^App has no 'send_task': write app.enqueue\(app.named\(name\).new"),
        (lambda: MADE.wait, r"^Job has no 'wait': write app.wait_all\(\[job\]\)$"),
        (lambda: TASK.perform_async, r"has no 'perform_async': write app.enqueue\(task.new\(…\)\)$"),
        (lambda: TASK.call_local, r"has no 'call_local': write task\(…\), which runs the handler here$"),
        (lambda: TASK.starmap, r"has no 'starmap': write task.map\(items\)$"),
        (lambda: SHOP.enqueue_in, r"^App has no 'enqueue_in': write app.enqueue\(task.new\(…\).set\(delay="),
        (lambda: SHOP.cancel, r"^App has no 'cancel': write app.jobs.cancel\(\[job\]\)$"),
        (lambda: SHOP.retry, r"^App has no 'retry': write app.jobs.retry\(\[job\]\)"),
        (lambda: SHOP.work, r"^App has no 'work': write app.worker\(\).run\(\), or .* sqlq work$"),
        (lambda: SHOP.actor, r"^App has no 'actor': write @app.task$"),
        (lambda: MADE.get_status, r"^Job has no 'get_status': write job.state"),
        (lambda: MADE.get, r"^Job has no 'get': write app.result\(job"),
        (lambda: MADE.result, r"^Job has no 'result': write app.result\(job"),
        (lambda: MADE.status, r"^Job has no 'status': write job.state"),
        (lambda: MADE.nothing, "has no attribute 'nothing'"),
        error=AttributeError,
    ),
    "calls": table(
        lambda call: call(),
        (lambda: TASK.map(5), "map takes a list of arguments, one for each job, not 5"),
        (lambda: TASK.map("abc"), "one for each job, not 'abc'"),
        (lambda: TASK.new(1).set(eta=3), "eta is available_at here"),
        (lambda: SHOP.enqueue(TASK, 1, 2), r"^enqueue takes .* as in task.new\(1, 2\)"),
        (lambda: SHOP.enqueue(TASK.new(1), delay="1s"), r'as in .*\.set\(delay="1m"\)'),
        (lambda: SHOP.enqueue_many([TASK.new(1)], delay="1s"), "^enqueue_many takes no arg"),
        (lambda: SHOP.aenqueue(TASK, 1, 2), "^aenqueue takes no arguments or options"),
        (lambda: SHOP.task(cron="0 3 * * *"), "; cron is schedule here; it has name"),
        (
            lambda: SHOP.task(unique_key="a"),
            r"no option unique_key; a single job has unique_key, as in task.new\(…\).set\(unique_key=…\)",
        ),
        (lambda: TASK.new(1).set(max_attempts=None), "^max_attempts is None: it must be"),
        (lambda: TASK.new(object()), "^shop.send_receipt: order_id is <object"),
        (lambda: TASK.new(1).set(queue=" mail"), "queue is ' mail': leave out blanks at its ends"),
        (lambda: TASK.new(1).set(queue="a\nb"), "line breaks and control characters"),
        (lambda: SHOP.jobs.list(limit="5"), "limit is '5': it must be a whole number"),
        (lambda: SHOP.jobs.list(queue=5), "queue is 5: it must be text"),
        (lambda: SHOP.flows.list(limit=0), "limit is 0: it must be a whole number"),
        (lambda: SHOP.tasks.find("send_receipt"), "did you mean shop.send_receipt[?]"),
        (lambda: JOB.set(que="mail"), "set takes no que: it takes queue, delay, available_at,"),
        (lambda: JOB.set(countdown=3), "set takes no countdown: countdown is delay here; it takes"),
        (lambda: JOB.set(ttl=3, throws=()), "set takes no throws, ttl: ttl is start_within here; it takes"),
        (lambda: JOB.set(unique_until="pruned"), '^unique_until="pruned" is about a unique key: set'),
        (lambda: JOB.set(batch="g" * 256), "batch has 256 characters"),
        (lambda: JOB.set(on_success=max), "^on_success is .*: it is a task, as in"),
        (lambda: JOB.set(on_failure=make_task(lambda: None, name="t")), r"^on_failure is .*: too many"),
        (lambda: JOB.set(on_failure=make_task(lambda a, b: None, name="t")), r"a, b\): missing"),
        (lambda: stored(lambda attempts: "5s", "backoff"), "a function, which a job's row cannot hold"),
        (lambda: RETRY(5), r"Retry\(delay\) is 5: give a timedelta"),
        (lambda: SNOOZE(5), r"Snooze\(delay\) is 5: give a timedelta"),
        (lambda: APP(URL).before_enqueue(7), "before_enqueue is 7, which cannot be called"),
        (lambda: APP(URL).before_enqueue(lambda: None), "cannot be called here and now with one argument"),
        (lambda: APP(URL).on("failed")(7), "the listener is 7, which cannot be called"),
        (lambda: APP(URL).on(), r"on\(\) names no event: name some of .*, as in @app.on\('failed'\)"),
        (lambda: APP(URL).on("failed", "x"), r"on\(\) got 'x', which is no event: name some of enqueued,"),
        (lambda: APP(URL).on(max), r"as in @app.on\('failed'\)"),
        (lambda: APP(URL).on("failed")(generate), "generate, which cannot be called here and now"),
        (lambda: APP(URL).on("failed")(middle), "middle, which cannot be called here and now"),
        (lambda: APP(URL).on("failed")(lambda: None), r"write a plain function, as in def alarm\(events\)"),
        (lambda: APP(create_engine(URL)), "not Engine; an engine is given as engine="),
        (lambda: APP(engine=URL), "takes an Engine or AsyncEngine, not str; a URL is given as"),
        (lambda: APP(URL, engine=create_engine(URL)), "both a url and an engine"),
        (lambda: APP(URL).fair(by="tenant", window=3), "by is 'tenant', which names no argument"),
        (lambda: RETRY("1s", priority=101), "priority is 101"),
        (lambda: RETRY("1s", priority=True), "priority is True"),
        (lambda: RETRY("1s", queue="a,b"), "queue is 'a,b'"),
        (lambda: RETRY(NAIVE), "has no time zone"),
        (lambda: SNOOZE(NAIVE), "has no time zone"),
        (lambda: APP(URL).named(""), "the task's name is '': it must be text"),
        (lambda: APP(URL).task(name="t", isolate="always")(lambda: None), 'it is True, False, or "fresh"'),
        (lambda: APP(URL).result("7"), "'7' is not the id of a job: give what app.enqueue has returned"),
        (lambda: APP(URL).result([None]), "None is not the id of a job"),
        (lambda: APP(URL).result(7, timeout=5), "timeout is 5: give a timedelta"),
        (lambda: APP(URL).wait_all("jobs"), "'jobs' is no list of jobs"),
        (lambda: APP(URL).wait_all(7), r"7 is no list of jobs: write app.wait_all\(\[job\]\)"),
        (lambda: APP(URL).as_completed([None]), "None is not the id of a job"),
        (lambda: APP(URL).lifespan(middle), "middle: it is a function that takes no arguments"),
        (lambda: APP(URL).lifespan(lambda app: 7), "cannot be called: lifespan takes no arguments"),
        (lambda: APP(URL).lifespan(None), "lifespan is None: it is a function that takes no arguments"),
        (lambda: make_task(max, name="t"), r"cannot be read \(no signature .*\); wrap it in a function"),
        (
            lambda: make_task(lambda **more: None, name="t").new(**{"a\0b": 1}),
            r"the argument name .* holds a NUL or a lone surrogate",
        ),
        error=SqlqError,
    ),
}
"""By what is wrong: the call that takes it, its error, the pattern of the sentence, and the values."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_in_a_sentence(name: str) -> None:
    call, error, pattern, rows = REFUSED[name]
    for value, says in rows:
        with pytest.raises(error, match=pattern.replace("{}", says)):
            call(value)
