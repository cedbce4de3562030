"""Sentry, by its own SDK with a transport into memory: one issue for each job that failed for good."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

import sqlq
from sqlq import sentry
from sqlq.errors import ConfigurationError
from sqlq.events import JobEvent
from tests.faces.command import Command

Event = dict[str, Any]


class Memory(Transport):
    """Keeps what the SDK would send."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if (event := item.get_event()) is not None:
                self.events.append(dict(event))


_SENTRYS: list[Any] = []


@pytest.fixture
def sent() -> Iterator[list[Event]]:
    """The events that Sentry would get, with the integrations that it always has.

    One is for logging. It replaces a function of logging once in a process, and leaves it there.
    """
    transport = Memory()
    before = logging.Logger.callHandlers
    with sentry_sdk.isolation_scope():
        client = sentry_sdk.init(
            dsn="https://key@sentry.invalid/1", transport=transport, auto_enabling_integrations=False
        )
        if not _SENTRYS:
            _SENTRYS.append(logging.Logger.callHandlers)
        logging.Logger.callHandlers = _SENTRYS[0]  # type: ignore[method-assign]  # as Sentry itself puts it there
        yield transport.events
        logging.Logger.callHandlers = before  # type: ignore[method-assign]  # what Sentry took its place from
        sentry_sdk.get_global_scope().set_client(None)
        del client


def exceptions(event: Event) -> list[tuple[str, str]]:
    return [(each["type"], each["value"]) for each in event["exception"]["values"]]


def test_a_final_failure_is_one_issue(app: sqlq.App, sent: list[Event]) -> None:
    """Though three attempts failed, and the log has a line with the exception for each reporter that reads
    lines."""
    sentry.instrument(app)

    @app.task(name="shop.charge", queue="cards", max_attempts=3, backoff="0s")
    def charge(order_id: int) -> None:
        raise ValueError(f"declined {sqlq.current_job().attempts}")

    job = app.enqueue(charge.new(7))
    app.worker(drain=True).run()
    (event,) = sent
    assert exceptions(event) == [("ValueError", "declined 3")]
    assert event["tags"] == {
        "sqlq.job": str(job.id),
        "sqlq.task": "shop.charge",
        "sqlq.queue": "cards",
        "sqlq.attempt": "3",
        "sqlq.reason": "error",
    }
    assert event["transaction"] == "shop.charge"
    frames = event["exception"]["values"][0]["stacktrace"]["frames"]
    assert frames[-1]["function"] == "charge"


def test_the_log_line_makes_the_issue_without_instrument(
    app: sqlq.App, sent: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above shows something."""
    monkeypatch.setattr(sentry, "_instrumented", WeakSet())

    @app.task(name="shop.charge", max_attempts=1)
    def charge() -> None:
        raise ValueError("declined")

    app.enqueue(charge.new())
    app.worker(drain=True).run()
    (event,) = sent
    assert event["logger"] == "sqlq.worker"


def test_other_log_lines_make_issues(app: sqlq.App, sent: list[Event]) -> None:
    sentry.instrument(app)
    logging.getLogger("sqlq.worker").error("worker process 7 died")
    logging.getLogger("shop").error("in the shop")
    assert [event["logentry"]["message"] for event in sent] == ["worker process 7 died", "in the shop"]


def test_an_issue_has_tags_and_breadcrumbs_of_its_job_alone(app: sqlq.App, sent: list[Event]) -> None:
    sentry.instrument(app)

    @app.task(name="shop.charge", max_attempts=1)
    def charge(tenant: str) -> None:
        sentry_sdk.set_tag("tenant", tenant)
        sentry_sdk.add_breadcrumb(message=f"asking the bank of {tenant}")
        raise ValueError("declined")

    app.enqueue_many([charge.new("blue"), charge.new("red")])
    app.worker(drain=True, concurrency=1).run()
    assert sorted(event["tags"]["tenant"] for event in sent) == ["blue", "red"]
    app._code.events.tell(JobEvent(name="failed", id=9, task="t", queue="q", attempt=2, reason="worker_lost"))
    assert app._code.events.flush(10)
    assert not sent.pop().get("breadcrumbs", {}).get("values"), "of a job of which nothing is known"
    for event in sent:
        said = [crumb["message"] for crumb in event["breadcrumbs"]["values"] if crumb.get("message")]
        told = [message for message in said if "asking" in message]
        assert told == [f"asking the bank of {event['tags']['tenant']}"]


def test_a_message_sent_by_a_handler_names_the_job(app: sqlq.App, sent: list[Event]) -> None:
    sentry.instrument(app)

    @app.task(name="t")
    async def warn() -> None:
        sentry_sdk.capture_message("odd")

    job = app.enqueue(warn.new())
    app.worker(drain=True).run()
    (event,) = sent
    assert (event["message"], event["tags"]["sqlq.job"]) == ("odd", str(job.id))


@pytest.mark.parametrize("signal", [sqlq.Snooze("1h"), sqlq.Cancel("no more"), sqlq.Retry("1h")])
def test_a_signal_of_a_handler_makes_no_issue(app: sqlq.App, sent: list[Event], signal: Exception) -> None:
    sentry.instrument(app)

    @app.task(name="t")
    def ask() -> None:
        raise signal

    app.enqueue(ask.new())
    app.worker(drain=True).run()
    assert not sent


def test_a_job_that_lost_its_worker_is_an_issue(app: sqlq.App, sent: list[Event]) -> None:
    """No process met its exception: the error in the row stands for it."""
    sentry.instrument(app)
    lost = JobEvent(
        name="failed",
        id=7,
        task="t",
        queue="q",
        attempt=2,
        reason="worker_lost",
        exception=sqlq.errors.WorkerLostError("worker w died"),
    )
    app._code.events.tell(lost)
    assert app._code.events.flush(10)
    (event,) = sent
    assert exceptions(event) == [("WorkerLostError", "worker w died")]
    assert event["tags"]["sqlq.reason"] == "worker_lost"


def test_a_second_instrument_of_an_app_is_refused(app: sqlq.App) -> None:
    sentry.instrument(app)
    with pytest.raises(ConfigurationError, match="second time"):
        sentry.instrument(app)


SENTRY_SHOP = """
import json
import sentry_sdk
from sentry_sdk.transport import Transport
from sqlq import sentry

class ToFile(Transport):
    def capture_envelope(self, envelope):
        for item in envelope.items:
            if (event := item.get_event()) is not None:
                with open("issues", "a") as file:
                    file.write(json.dumps([event["tags"]["sqlq.job"], event["tags"]["sqlq.reason"]]) + "\\n")

sentry_sdk.init(
    dsn="https://key@sentry.invalid/1", transport=ToFile(), auto_enabling_integrations=False
)
sentry.instrument(app)

@app.task(queue="mail", isolate=True, max_attempts=1)
def fail_alone() -> None:
    raise ValueError("no")
"""


def test_a_worker_sends_its_issues_before_it_ends(sqlq_: Command, app: sqlq.App) -> None:
    with (sqlq_.directory / "shop.py").open("a") as shop:
        shop.write(SENTRY_SHOP)
    ids = [
        sqlq_.shop("enqueue", "--json", "shop.fail", "lift it").json()["id"],
        sqlq_.shop("enqueue", "--json", "shop.fail_alone").json()["id"],
    ]
    sqlq_.work()
    issues = (sqlq_.directory / "issues").read_text().splitlines()
    assert sorted(map(json.loads, issues)) == [[str(id), "error"] for id in ids]
    assert app.jobs.get(ids[0]).attempts == 2
