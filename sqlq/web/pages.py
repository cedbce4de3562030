"""The pages that look. Each reads through the App's parts for operators, and renders one template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

from sqlalchemy.exc import SQLAlchemyError
from werkzeug import Response

from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding, Verdict
from sqlq.admin.storage import Storage, storage
from sqlq.admin.verb import whole
from sqlq.admin.why import why
from sqlq.app.app import App
from sqlq.config.durations import aware, milliseconds
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.job import JobDetails, State
from sqlq.payload.codec import decoded
from sqlq.payload.encryption import Unopened
from sqlq.web.access import Redaction, RefusedError
from sqlq.web.reading import too_slow
from sqlq.web.view import View

Page: TypeAlias = Callable[[View], Response]
JOBS_SHOWN = 50
SEARCHED, SEARCHED_BY_KEY = 50_000, 10_000
"""A search on a page reads at most this number of the newest jobs of each table."""
DOCTOR_SECONDS, PACE_SECONDS, STORAGE_SECONDS = 60.0, 10.0, 10.0
HOURS = {"hour": (timedelta(hours=1), 30), "day": (timedelta(days=1), 24)}
"""The times that plots show, and in how many parts."""


def part(view: View, key: Any, look: Callable[[App], Any], seconds: float = 2.0) -> Any:
    """Return a part of a page, or the reason why it could not be read in time: the rest is still of use."""

    def attempt(app: App) -> Any:
        try:
            return look(app)
        except SQLAlchemyError as error:  # kept like an answer; guard: what-is-too-slow-is-kept
            return too_slow(error)

    return view.reading.fresh(key, attempt, seconds)


LOOKS: Mapping[str, Callable[[App], Any]] = {
    "queues": lambda app: app.queues.list(),
    "pauses": lambda app: app.queues.pauses(),
    "alive": lambda app: app.workers.list(),
    "workers": lambda app: app.workers.list(silent=True),
    "flows": lambda app: app.flows.list(limit=100),
    "schedules": lambda app: app.schedules.list(),
    "limits": lambda app: app.limits.list(limit=1000),
    "audit": lambda app: app.audit.list(limit=1000),
}
"""The reads of pages and the JSON API, which all viewers share."""


def look(view: View, name: str) -> Any:
    return view.reading.fresh(name, LOOKS[name])


def _shows(*names: str) -> Page:
    """Return a page that shows what these looks have found; its template has the name of the first."""
    return lambda view: view.page(f"{names[0]}.html", **{name: look(view, name) for name in names})


def overview(view: View) -> Response:
    span = "day" if view.request.args.get("span") == "day" else "hour"
    length, parts = HOURS[span]
    return view.page(
        "overview.html",
        queues=look(view, "queues"),
        pauses=look(view, "pauses"),
        workers=look(view, "alive"),
        pace=part(view, ("pace", span), lambda app: app.jobs.pace(length, parts), PACE_SECONDS),
        span=span,
        findings=part(view, "doctor", lambda _: _findings(view.reading.own), DOCTOR_SECONDS),
    )


def _findings(app: App) -> list[Finding]:
    return [each for each in Doctor(app.database).examine() if each.verdict is not Verdict.OK]


# -- jobs ----------------------------------------------------------------------------------------------------


RARE = ("batch", "header", "key", "limit_key", "since", "until")
"""The fields that a page shows on request."""
FIELDS = ("state", "queue", "task", "label", "text", *RARE)


def filter_of(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return which jobs a page shows, as its URL or its form has it."""
    return {name: value for name in FIELDS if (value := arguments.get(name))}


def search_of(view: View, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `app.jobs.list`. Raises `ConfigurationError` for what cannot be read, and
    `RefusedError` where they would reveal hidden arguments."""
    times = {name: _moment(chosen[name], name) for name in ("since", "until") if name in chosen}
    if not chosen.keys() & {"text", "header"}:
        return {**chosen, **times}
    if view.hides:  # guard: no-search-tells-what-is-hidden
        raise RefusedError("arguments are hidden from viewers here, so that no search may look into them")
    return {**chosen, **times, "visible": partial(_fits, view.redact, chosen)}


def _fits(redact: Redaction, chosen: Mapping[str, str], job: JobDetails) -> bool:
    """Whether a job that the database has found fits by what is shown of it."""
    name, _, value = chosen.get("header", "").partition("=")
    named = [json.dumps(name, ensure_ascii=False), value] if "header" in chosen else []
    text = chosen.get("text", "")
    in_error = text in f"{job.message or ''}\n{job.reason or ''}"
    # guard: no-search-tells-what-is-redacted
    return (in_error or _shown(redact, job.payload, [text])) and _shown(redact, job.headers, named)


def _shown(redact: Redaction, value: Any, parts: Sequence[str]) -> bool:
    """Whether these parts, which stand in a row's text, stand in what is shown of it, too."""
    shown = redact(value)
    if shown == value and not isinstance(value, Unopened):
        return True
    text = json.dumps(shown, ensure_ascii=False, default=str)  # as sqlq writes it
    return all(part in text for part in parts)


def _moment(text: str, name: str) -> datetime:
    """Return a time with its zone, or how long ago in a duration."""
    with suppress(ValueError, ConfigurationError):
        return aware(datetime.fromisoformat(text), name)
    with suppress(ConfigurationError):
        return datetime.now(UTC) - timedelta(milliseconds=milliseconds(text, name))
    raise ConfigurationError(
        f"{name} is {text[:40]!r}: give an age like 2h, or a time with its zone like 2026-03-01T12:00:00Z"
    )


def jobs(view: View) -> Response:
    chosen = filter_of(view.request.args)
    before = whole(view.request.args.get("before"), "before")
    search = search_of(view, chosen)
    found = view.reading.fresh(
        ("jobs", *chosen.items(), before),
        lambda app: app.jobs.list(
            **search, before=before, limit=JOBS_SHOWN + 1, within=SEARCHED, whole=False
        ),
    )
    return view.page(
        "jobs.html",
        jobs=found[:JOBS_SHOWN],
        more=len(found) > JOBS_SHOWN,
        complete=found.complete,
        searched=SEARCHED,
        chosen=chosen,
        rare=chosen.keys() & set(RARE),
        states=list(State),
        before=before,
    )


def job(view: View) -> Response:
    id = view.values["id"]
    app = view.reading.app
    found = app.jobs.get(id)
    same_key: list[JobDetails] = []
    if found.unique_key is not None:
        same_key = app.jobs.list(
            queue=found.queue, key=found.unique_key, limit=10, within=SEARCHED_BY_KEY, whole=False
        )
    flow = None
    if found.flow_id is not None:
        with suppress(JobNotFoundError):
            flow = app.flows.get(found.flow_id)
    return view.page(
        "job.html",
        job=found,
        why=list(why(app.database, found)),
        same_key=[each for each in same_key if each.id != id],
        flow=flow,
        sql=f"SELECT * FROM job_states WHERE id = {id};",  # noqa: S608 - to read; a number
        command=view.command(f"show {id}"),
    )


# -- failures ------------------------------------------------------------------------------------------------


def failures_of(view: View, task: str | None = None, queue: str | None = None) -> Any:
    key = ("failures", task, queue)
    return view.reading.fresh(key, lambda app: app.jobs.failures(task=task, queue=queue), 5.0)


def failures(view: View) -> Response:
    task, queue = view.request.args.get("task") or None, view.request.args.get("queue") or None
    found, complete = failures_of(view, task, queue)
    deployed = max((worker.started_at for worker in look(view, "alive")), default=None)
    return view.page(
        "failures.html", groups=found, complete=complete, deployed=deployed, task=task, queue=queue
    )


def failure(view: View) -> Response:
    fingerprint = view.values["fingerprint"]
    found, complete = failures_of(view)
    group = next((each for each in found if each.fingerprint == fingerprint), None)
    if group is None:
        raise JobNotFoundError(
            "no failed job has this error now: they were retried or deleted, or it is not among the newest"
        )
    sample = view.reading.app.jobs.get(group.newest)
    return view.page("failure.html", group=group, sample=sample, complete=complete)


# -- the rest ------------------------------------------------------------------------------------------------


def schedule(view: View) -> Response:
    found = view.reading.app.schedules.get(view.values["name"])
    return view.page("schedule.html", schedule=found, arguments=decoded(found.payload))


def limits(view: View) -> Response:
    prefix = view.request.args.get("prefix") or None
    found = view.reading.fresh(("limits", prefix), lambda app: app.limits.list(prefix, limit=200))
    return view.page("limits.html", limits=found, prefix=prefix)


def audit(view: View) -> Response:
    arguments = view.request.args
    before = whole(arguments.get("before"), "before")
    actor, action = arguments.get("actor") or None, arguments.get("action") or None
    found = view.reading.app.audit.list(limit=JOBS_SHOWN + 1, before=before, actor=actor, action=action)
    shown, more = found[:JOBS_SHOWN], len(found) > JOBS_SHOWN
    return view.page("audit.html", actions=shown, more=more, actor=actor, action=action)


def storage_of(view: View) -> Storage:
    """Return the state of the database. Only operators see the statements of other sessions."""
    found: Storage = view.reading.fresh(
        "storage", lambda _: storage(view.reading.own.database), STORAGE_SECONDS
    )
    if view.user.may("operator"):
        return found
    # guard: statements-of-others-are-hidden
    return replace(found, readings=tuple(replace(each, query=None) for each in found.readings))


PAGES: Mapping[str, tuple[str, Page]] = {
    "overview": ("/", overview),
    "jobs": ("/jobs", jobs),
    "job": ("/jobs/<int:id>", job),
    "failures": ("/failures", failures),
    "failure": ("/failures/<fingerprint>", failure),
    "flows": ("/flows", _shows("flows")),
    "flow": (
        "/flows/<int:id>",
        lambda view: view.page("flow.html", flow=view.reading.app.flows.get(view.values["id"])),
    ),
    "schedules": ("/schedules", _shows("schedules")),
    "schedule": ("/schedules/<path:name>", schedule),
    "limits": ("/limits", limits),
    "queues": ("/queues", _shows("queues", "pauses")),
    "workers": ("/workers", _shows("workers")),
    "database": ("/database", lambda view: view.page("database.html", storage=storage_of(view))),
    "audit": ("/audit", audit),
}
"""The pages by their names, with their paths."""
