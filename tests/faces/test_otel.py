"""Traces through the queue, with OpenTelemetry's own SDK: the spans, their parents, and ids in the log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
from sqlq import otel
from sqlq.errors import ConfigurationError
from sqlq.testing import drain
from tests.kit.command import Command

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """An App that is traced into memory."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("shop")
        otel.instrument(app, tracer_provider=self.provider)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (found,) = self.spans(name)
        return found


@pytest.fixture
def traced(app: sqlq.App) -> Traced:
    return Traced(app)


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def id_of(span: ReadableSpan) -> int:
    return context_of(span).span_id


def trace_of(span: ReadableSpan) -> int:
    return context_of(span).trace_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_trace_goes_from_the_request_through_the_queue_into_the_handler(traced: Traced, kind: str) -> None:
    def plain() -> None:
        with traced.tracer.start_as_current_span("in the handler"):
            pass

    async def asynchronous() -> None:
        await asyncio.sleep(0)
        plain()

    events: list[sqlq.JobEvent] = []
    traced.app.on("finished")(events.extend)
    task = traced.app.task(name="send", queue="mail")(asynchronous if kind == "async def" else plain)
    with traced.tracer.start_as_current_span("request"):
        job = traced.app.enqueue(task.new())
    drain(traced.app)
    request, create, process, inner = map(
        traced.span, ["request", "create mail", "process mail", "in the handler"]
    )
    assert len({trace_of(span) for span in (request, create, process, inner)}) == 1
    assert parent_of(create) == id_of(request)
    assert parent_of(process) == id_of(create)
    assert parent_of(inner) == id_of(process)
    assert create.kind is SpanKind.PRODUCER
    assert process.kind is SpanKind.CONSUMER
    assert [link.context.span_id for link in process.links] == [id_of(create)]
    both = {"messaging.system": "sqlq", "messaging.destination.name": "mail", "sqlq.task": "send"}
    operation = dict.fromkeys(("messaging.operation.name", "messaging.operation.type"), "create")
    assert create.attributes == both | operation
    attempt = {"messaging.message.id": str(job.id), "sqlq.attempt": 1, "sqlq.max_attempts": 5}
    assert process.attributes == both | dict.fromkeys(operation, "process") | attempt
    assert process.status.status_code is StatusCode.UNSET
    (event,) = events
    assert (event.trace_id, event.span_id) == (f"{trace_of(process):032x}", f"{id_of(process):016x}")


def test_many_jobs_have_a_span_each(traced: Traced, engine: Engine) -> None:
    task = traced.app.task(name="t")(lambda: None)
    with Session(engine) as session, session.begin():
        traced.app.enqueue_many([task.new() for _ in range(3)], session=session)
    drain(traced.app)
    creates = {id_of(span) for span in traced.spans("create default")}
    assert len(creates) == 3
    assert {parent_of(span) for span in traced.spans("process default")} == creates


@pytest.mark.parametrize(
    "headers", [{"traceparent": PARENT, "tenant": 7}, None, {"traceparent": "00-nothing"}]
)
def test_a_row_inserted_by_sql_has_a_span(traced: Traced, headers: dict[str, Any] | None) -> None:
    traced.app.task(name="t")(lambda: None)
    with traced.app.database.begin() as conn:
        said = "NULL" if headers is None else f"'{json.dumps(headers)}'"
        conn.exec_driver_sql(f"INSERT INTO jobs (queue, task, headers) VALUES ('default', 't', {said})")
    assert drain(traced.app).finished == 1
    span = traced.span("process default")
    if headers and "tenant" in headers:
        assert is_below_the_parent(span)
    else:
        assert (span.parent, list(span.links)) == (None, [])


def is_below_the_parent(span: ReadableSpan) -> bool:
    _, trace, parent, _ = PARENT.split("-")
    ids = {f"{id:016x}" for id in (parent_of(span) or 0, *(link.context.span_id for link in span.links))}
    return f"{trace_of(span):032x}" == trace and ids == {parent}


def test_a_context_that_the_caller_has_set_is_kept(traced: Traced) -> None:
    traced.app.enqueue(traced.app.task(name="t")(lambda: None).new().set(headers={"traceparent": PARENT}))
    drain(traced.app)
    assert not traced.spans("create default")
    assert is_below_the_parent(traced.span("process default"))


def test_a_retry_is_in_the_trace(traced: Traced) -> None:
    @traced.app.task(name="t", max_attempts=3, backoff="0s")
    def fail() -> None:
        raise ValueError("no")

    traced.app.enqueue(fail.new())
    traced.app.worker(drain=True).run()
    create = traced.span("create default")
    attempts = traced.spans("process default")
    assert [(span.attributes or {})["sqlq.attempt"] for span in attempts] == [1, 2, 3]
    assert {parent_of(span) for span in attempts} == {id_of(create)}
    for span in attempts:
        assert [link.context.span_id for link in span.links] == [id_of(create)]
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "ValueError"
        assert [event.name for event in span.events] == ["exception"]


@pytest.mark.parametrize("signal", [sqlq.Snooze("1h"), sqlq.Cancel("no more"), sqlq.Retry("1h")])
def test_a_signal_of_a_handler_is_no_error_in_its_span(traced: Traced, signal: Exception) -> None:
    @traced.app.task(name="t")
    def ask() -> None:
        raise signal

    traced.app.enqueue(ask.new())
    traced.app.worker(drain=True).run()
    span = traced.span("process default")
    assert span.status.status_code is StatusCode.UNSET
    assert (span.attributes or {})["sqlq.signal"] == type(signal).__name__


def test_the_span_of_one_attempt_is_not_that_of_the_next_job(traced: Traced) -> None:
    seen: list[Any] = []
    task = traced.app.task(name="t")(lambda: None)
    plain = traced.app.task(name="plain", middleware=None)(lambda: seen.append(trace.get_current_span()))
    for job in (task.new(), plain.new()) * 3:
        traced.app.enqueue(job)
    traced.app.worker(drain=True, concurrency=1).run()
    assert len(seen) == 3
    assert not any(span.get_span_context().is_valid for span in seen)


def test_a_second_instrument_is_refused_and_no_headers_are_written_without_a_provider(app: sqlq.App) -> None:
    otel.instrument(app)
    with pytest.raises(ConfigurationError, match="second time"):
        otel.instrument(app)
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    assert drain(app).finished == 1
    assert not app.jobs.get(job.id).headers


TRACED_SHOP = """
import logging
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from sqlq import otel

provider = TracerProvider()
exporter = ConsoleSpanExporter(
    out=open("spans", "a"),
    formatter=lambda span: f"{span.context.trace_id:032x} {span.context.span_id:016x} {span.name}\\n",
)
provider.add_span_processor(BatchSpanProcessor(exporter))
otel.instrument(app, tracer_provider=provider)

@app.task(queue="mail")
def log_a_line() -> None:
    logging.getLogger("shop").warning("in the handler")

@app.task(queue="mail", isolate=True)
def log_alone() -> None:
    logging.getLogger("shop").warning("in the handler")
"""


def test_log_lines_have_the_trace_id(sqlq_: Command, app: sqlq.App) -> None:
    with (sqlq_.directory / "shop.py").open("a") as shop:
        shop.write(TRACED_SHOP)
    ids = [sqlq_.enqueue(f"shop.{task}") for task in ("log_a_line", "log_alone")]
    (sqlq_.directory / "spans").unlink()  # those of the commands
    worked = sqlq_.work("--log-format", "json")
    lines = [json.loads(line) for line in worked.err.splitlines()]
    spans = {tuple(line.split(" ", 2)) for line in (sqlq_.directory / "spans").read_text().splitlines()}
    for id in ids:
        own = [line for line in lines if line.get("job_id") == id]
        assert [line["message"] for line in own if line["logger"] == "shop"] == ["in the handler"]
        assert [line["event"] for line in own if "event" in line] == ["finished"]
        (named,) = {(line["trace_id"], line["span_id"]) for line in own}
        assert (*named, "process mail") in spans
        traceparent = str(app.jobs.get(id).headers["traceparent"])
        assert traceparent.split("-")[1] == named[0]


def test_a_missing_package_is_reported_in_one_sentence(bare: Command) -> None:
    (bare.directory / "opentelemetry.py").write_text("raise ImportError('not here')")
    done = bare.python("-c", "import sqlq.otel")
    assert done.code == 1
    assert "pip install 'sqlq-jobs[otel]'" in done.err.splitlines()[-1]
