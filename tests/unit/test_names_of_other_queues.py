"""Names and values of other job queues: each mistake is answered with what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sqlq
from sqlq.errors import ArgumentsError, ConfigurationError, EnqueueError, UnknownTaskError
from tests.kit import for_each

app = sqlq.App("sqlite:///nowhere.db")


@app.task(name="shop.send_receipt")
def send_receipt(order_id: int) -> None: ...


@app.task(name="shop.send_note")
def send_note(order_id: int) -> None: ...


JOB: Any = sqlq.Job(1, "mail", "shop.send_receipt", sqlq.State.AVAILABLE, created=True)
TASK: Any = send_receipt
APP: Any = app


@for_each(
    ("look", "said"),
    [
        (lambda: TASK.s, r"^the task shop.send_receipt has no 's': write task.new\(…\)$"),
        (
            lambda: TASK.delay,
            r"^the task shop.send_receipt has no 'delay': write app.enqueue\(task.new\(…\)\)$",
        ),
        (lambda: APP.send_task, r"^App has no 'send_task': write app.enqueue\(app.named\(name\).new\(…\)\)$"),
        (lambda: JOB.wait, r"^Job has no 'wait': write app.wait_all\(\[job\]\)$"),
        (lambda: TASK.perform_async, r"has no 'perform_async': write app.enqueue\(task.new\(…\)\)$"),
        (lambda: TASK.call_local, r"has no 'call_local': write task\(…\), which runs the handler here$"),
        (lambda: TASK.starmap, r"has no 'starmap': write task.map\(items\)$"),
        (lambda: APP.enqueue_in, r"^App has no 'enqueue_in': write app.enqueue\(task.new\(…\).set\(delay="),
        (lambda: APP.cancel, r"^App has no 'cancel': write app.jobs.cancel\(\[job\]\)$"),
        (lambda: APP.retry, r"^App has no 'retry': write app.jobs.retry\(\[job\]\)"),
        (lambda: APP.work, r"^App has no 'work': write app.worker\(\).run\(\), or .* sqlq work$"),
        (lambda: APP.actor, r"^App has no 'actor': write @app.task$"),
        (lambda: JOB.get_status, r"^Job has no 'get_status': write job.state"),
        (lambda: JOB.get, r"^Job has no 'get': write app.result\(job"),
        (lambda: JOB.result, r"^Job has no 'result': write app.result\(job"),
        (lambda: JOB.status, r"^Job has no 'status': write job.state"),
        (lambda: JOB.nothing, "has no attribute 'nothing'"),
    ],
)
def test_an_attribute_of_another_queue_gets_the_name_in_sqlq(look: Callable[[], Any], said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        look()
    assert not hasattr(JOB, "wait")


@for_each(
    ("call", "error", "said"),
    [
        (lambda: TASK.map(5), ArgumentsError, "map takes a list of arguments, one for each job, not 5"),
        (lambda: TASK.map("abc"), ArgumentsError, "one for each job, not 'abc'"),
        (lambda: TASK.new(1).set(eta=3), EnqueueError, "eta is available_at here"),
        (lambda: APP.enqueue(TASK, 1, 2), EnqueueError, r"^enqueue takes .* as in task.new\(1, 2\)"),
        (lambda: APP.enqueue(TASK.new(1), delay="1s"), EnqueueError, r'as in .*\.set\(delay="1m"\)'),
        (lambda: APP.enqueue_many([TASK.new(1)], delay="1s"), EnqueueError, "^enqueue_many takes no arg"),
        (lambda: APP.aenqueue(TASK, 1, 2), EnqueueError, "^aenqueue takes no arguments or options"),
        (lambda: APP.task(cron="0 3 * * *"), ConfigurationError, "; cron is schedule here; it has name"),
        (
            lambda: APP.task(unique_key="a"),
            ConfigurationError,
            r"no option unique_key; a single job has unique_key, as in task.new\(…\).set\(unique_key=…\)",
        ),
        (lambda: TASK.new(1).set(max_attempts=None), EnqueueError, "^max_attempts is None: it must be"),
        (lambda: TASK.new(object()), ArgumentsError, "^shop.send_receipt: order_id is <object"),
        (
            lambda: TASK.new(1).set(queue=" mail"),
            EnqueueError,
            "queue is ' mail': leave out blanks at its ends",
        ),
        (lambda: TASK.new(1).set(queue="a\nb"), EnqueueError, "line breaks and control characters"),
        (lambda: APP.jobs.list(limit="5"), ConfigurationError, "limit is '5': it must be a whole number"),
        (lambda: APP.jobs.list(queue=5), ConfigurationError, "queue is 5: it must be text"),
        (lambda: APP.flows.list(limit=0), ConfigurationError, "limit is 0: it must be a whole number"),
        (lambda: APP.tasks.find("send_receipt"), UnknownTaskError, "did you mean shop.send_receipt[?]"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_one_sentence(
    call: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()


def test_an_app_shows_its_tasks_and_database_without_its_password() -> None:
    shown = repr(sqlq.App("postgresql+psycopg://ann:secret@host/shop"))
    assert shown == "<sqlq.App 0 tasks, postgresql+psycopg://ann:***@host/shop>"
