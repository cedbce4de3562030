"""Traces: `instrument(app)` joins OpenTelemetry's traces through the queue. Needs opentelemetry-api, which
comes with `pip install 'sqlq-jobs[otel]'`. The application chooses the SDK and exporter.

Spans follow the semantic conventions for messaging. A span `create mail` is for the enqueue of a job in the
queue mail, a span `process mail` for each attempt. The context travels in the job's headers: `traceparent`,
`tracestate`, `baggage`, as the application's propagators write them. A row that SQL has inserted may have a
`traceparent` among its headers, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

from sqlq.app.app import App
from sqlq.config.constants import VERSION
from sqlq.errors import ConfigurationError
from sqlq.model.job import NewJob
from sqlq.model.retry import Signal
from sqlq.worker.attempt.context import JobContext

try:
    from opentelemetry import trace
    from opentelemetry.propagate import extract, inject
    from opentelemetry.trace import Link, SpanKind, StatusCode, TracerProvider
except ImportError:
    raise ConfigurationError("sqlq.otel needs opentelemetry-api: pip install 'sqlq-jobs[otel]'") from None


PARENT = "traceparent"

_instrumented: WeakSet[App] = WeakSet()


def instrument(app: App, *, tracer_provider: TracerProvider | None = None) -> None:
    """Make a span of each job that this App enqueues and of each attempt of its tasks.

    Call it once, in the module that makes the App, before or after the tracer provider is set. Without
    `tracer_provider` the global one counts. Each attempt continues the trace in which its job was enqueued,
    and has a `Link` to the span that created the job. Without a context in the job's headers an attempt
    begins a trace. An exception is recorded, and makes the span one of an error; `Snooze`, `Cancel` and
    `Retry` do not. Log lines of the attempt carry `trace_id` and `span_id`. Raises `ConfigurationError` for a
    second call.

    >>> instrument(app)  # doctest: +SKIP
    """
    if app in _instrumented:
        raise ConfigurationError("sqlq.otel.instrument was called a second time for this App: call it once")
    _instrumented.add(app)
    tracer = trace.get_tracer("sqlq", VERSION, tracer_provider)
    app.before_enqueue(partial(_creation, tracer))
    app.middleware(partial(_processing, tracer))


def _creation(tracer: trace.Tracer, job: NewJob) -> Mapping[str, Any] | None:
    """Return the headers that carry the context of the span that creates a job."""
    if PARENT in job.headers:  # the context that the caller has chosen
        return None
    span = tracer.start_span(
        f"create {job.queue}", kind=SpanKind.PRODUCER, attributes=_attributes("create", job)
    )
    carrier: dict[str, str] = {}
    inject(carrier, trace.set_span_in_context(span))
    span.end()
    return carrier


def _processing(tracer: trace.Tracer, running: JobContext) -> Iterator[None]:
    """Run an attempt within its span."""
    texts = {name: value for name, value in running.headers.items() if isinstance(value, str)}
    context = extract(texts)
    creation = trace.get_current_span(context).get_span_context()
    with tracer.start_as_current_span(
        f"process {running.queue}",
        context,
        kind=SpanKind.CONSUMER,
        attributes=_attributes("process", running)
        | {
            "messaging.message.id": str(running.id),
            "sqlq.attempt": running.attempt,
            "sqlq.max_attempts": running.max_attempts,
        },
        links=[Link(creation)] if creation.is_valid else [],
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        own = span.get_span_context()
        if own.is_valid:
            running.trace_id = trace.format_trace_id(own.trace_id)
            running.span_id = trace.format_span_id(own.span_id)
        try:
            yield
        except Signal as signal:
            span.set_attribute("sqlq.signal", type(signal).__name__)
            raise
        except BaseException as error:
            span.record_exception(error)
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(StatusCode.ERROR, str(error)[:300])
            raise


def _attributes(operation: str, job: NewJob | JobContext) -> dict[str, Any]:
    return {
        "messaging.system": "sqlq",
        "messaging.destination.name": job.queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "sqlq.task": job.task,
    }
