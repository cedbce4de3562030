"""The pages that look, and the JSON API, by way of the App's parts for operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from werkzeug import Response

from sqlq.admin.doctor.doctor import by_verdict, examine_queue, examine_server
from sqlq.admin.jobs import SEARCH_LIMIT
from sqlq.admin.storage import Storage, storage
from sqlq.admin.verb import whole
from sqlq.admin.why import why
from sqlq.app.app import App
from sqlq.config.json_text import document
from sqlq.errors import JobNotFoundError
from sqlq.model.checks import checked_whole
from sqlq.model.job import JobDetails, State
from sqlq.payload.codec import decoded
from sqlq.payload.encryption import Unopened
from sqlq.web.access import RefusedError
from sqlq.web.outline import BOXES, Box, outline
from sqlq.web.reading import FRESH_SECONDS, unread
from sqlq.web.view import View

Values = Mapping[str, Any]
"""The values of a template."""
JOBS_SHOWN = 50
SEARCHED = 50_000
"""A search on a page reads at most this number of the newest jobs of each table."""
NAMED = 200
"""The newest jobs whose tasks and batches are suggested to fill in a filter."""
HOURS = {"hour": (timedelta(hours=1), 30), "day": (timedelta(days=1), 24)}
"""The times that plots show, and in how many parts."""


def part(view: View, key: Any, read: Callable[[App], Any], seconds: float = FRESH_SECONDS) -> Any:
    """Return a part of a page, or the reason why it could not be read in time: the rest is still of use."""

    def attempt(app: App) -> Any:
        try:
            return read(app)
        except SQLAlchemyError as error:  # kept like an answer; guard: what-is-too-slow-is-kept
            return unread(error, app, view.kind)

    return view.reading.fresh(key, attempt, seconds)


READS: Mapping[str, Callable[..., Any]] = {
    "queues": lambda app: app.queues.list(),
    "pauses": lambda app: app.queues.pauses(),
    "alive": lambda app: app.workers.list(),
    "workers": lambda app: app.workers.list(silent=True),
    "failures": lambda app, **options: app.jobs.failures(**options),
    "flows": lambda app: app.flows.list(limit=100),
    "schedules": lambda app: app.schedules.list(),
    "limits": lambda app, prefix=None: app.limits.list(prefix, limit=1000),
    "audit": lambda app: app.audit.list(limit=1000),
}
"""The reads of pages and the JSON API, which all viewers share."""


def read(view: View, name: str, **options: Any) -> Any:
    return view.reading.fresh((name, *options.items()), lambda app: READS[name](app, **options))


def shared(view: View) -> Values:
    """Return what every page has: queues and workers for its top, the newest actions, and names to suggest.
    A part that could not be read has the reason in its place."""
    look = part(view, "summary", lambda app: (app.queues.list(), app.workers.list()), 4.0)
    recent = part(view, "recent", lambda app: app.audit.list(limit=50))
    return {"summary": look, "recent": recent, "names": partial(names, view)}


def names(view: View) -> Mapping[str, Sequence[str]]:
    """Return the names that the code of the App knows, and those of the newest jobs."""
    rows = view.reading.fresh("names", lambda app: app.jobs.list(limit=NAMED, whole=False), 30.0)
    return {
        "task": sorted({*view.app.tasks, *(row.task for row in rows)}),
        "queue": sorted({*view.app._queue_names(), *(row.queue for row in rows)}),
        "batch": sorted({row.batch_key for row in rows if row.batch_key}),
    }


def _complete(view: View, fields: dict[str, str]) -> Sequence[str]:
    """Put the only task that has this part in its name into the fields, or return the tasks that have it.
    The whole name of a task wins."""
    part, app = fields.get("task", ""), view.reading.app
    tasks = [name for name in names(view)["task"] if part.lower() in name.lower()] if part else []
    if part in tasks or not tasks or app.jobs.list(task=part, limit=1, within=SEARCHED, whole=False):
        return []
    if len(tasks) == 1:
        fields["task"] = tasks[0]
    return tasks[1:] and tasks


def overview(view: View) -> Values:
    span = "day" if view.request.args.get("span") == "day" else "hour"
    return {
        "queues": read(view, "queues"),
        "pauses": read(view, "pauses"),
        "workers": read(view, "alive"),
        "pace": part(view, ("pace", span), lambda app: app.jobs.pace(*HOURS[span])),
        "span": span,
        **_findings(view),
    }


def _findings(view: View) -> Values:
    """Return what the doctor finds, those that harm most first, and when it looked at the server. It does so
    less often: it waits for a notification, and looks at all sessions."""
    own = view.reading.own.database
    known = {"queues": read(view, "queues"), "workers": read(view, "alive")}  # which the page shows, too
    queue = part(view, "queue", lambda _: examine_queue(own, **known), 3.0)
    server = part(view, "server", lambda _: (datetime.now(UTC), examine_server(own)), 60.0)
    unseen = next((answer for answer in (queue, server) if isinstance(answer, str)), None)
    at, rows = (None, []) if unseen else (server[0], by_verdict([*queue, *server[1]]))
    return {"findings": rows, "unseen": unseen, "examined_at": at}


# -- jobs ----------------------------------------------------------------------------------------------------


FIELDS = (
    *("state", "queue", "task", "label", "text"),
    *("batch", "header", "key", "limit_key", "since", "until"),
)


def fields_of(arguments: Mapping[str, str], names: Sequence[str] = FIELDS) -> dict[str, str]:
    """Return the fields that a URL or a form has."""
    return {name: value for name in names if (value := arguments.get(name))}


def search_of(view: View, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `app.jobs.list`. Raises `RefusedError` where the search would reveal hidden
    arguments."""
    search: dict[str, Any] = {**fields}
    if "text" in fields or "header" in fields:
        if view.hides:  # guard: no-search-tells-what-is-hidden
            raise RefusedError("arguments are hidden from viewers here, so that no search may look into them")
        search["visible"] = partial(_fits, view.redact, fields)
    return search


def _fits(redact: Callable[[Any], Any], fields: Mapping[str, str], job: JobDetails) -> bool:
    """Whether a job that the database has found fits by what is shown of it."""
    name, _, value = fields.get("header", "").partition("=")
    named = [json.dumps(name, ensure_ascii=False), value] if "header" in fields else []
    text = fields.get("text", "")
    # guard: no-search-tells-what-is-redacted
    return _shown(redact, job.headers, named) and (
        text in f"{job.message or ''}\n{job.reason or ''}" or _shown(redact, job.payload, [text])
    )


def _shown(redact: Callable[[Any], Any], value: Any, parts: Sequence[str]) -> bool:
    """Whether these parts, which stand in a row's text, stand in what is shown of it, too."""
    shown = redact(value)
    if shown == value and not isinstance(value, Unopened):
        return True
    text = json.dumps(shown, ensure_ascii=False, default=str)  # as sqlq writes it
    return all(part in text for part in parts)


def jobs(view: View) -> Values:
    fields = fields_of(view.request.args)
    alike = _complete(view, fields)
    before = whole(view.request.args.get("before"), "before")
    search = search_of(view, fields) | {"before": before, "limit": JOBS_SHOWN + 1, "within": SEARCHED}
    rows = view.reading.fresh(
        ("jobs", *fields.items(), before), lambda app: app.jobs.list(**search, whole=False)
    )
    return {
        "jobs": rows[:JOBS_SHOWN],
        "more": len(rows) > JOBS_SHOWN,
        "complete": rows.complete,
        "alike": alike,
        "searched": SEARCHED,
        "chosen": fields,
        "states": list(State),
        "before": before,
    }


def job(view: View) -> Values:
    app, id = view.reading.app, view.values["id"]
    job, boxes = app.jobs.get(id), list[Box]()
    if job.flow_id is not None:
        with suppress(JobNotFoundError):
            _, boxes = _flow(view, job.flow_id, at=id, limit=8)
    alike = {"task": job.task, "error": job.fingerprint}
    return {
        "job": job,
        "why": list(why(app.database, job)),
        "groups": part(view, ("group", *alike.items()), lambda app: app.jobs.failures(**alike)[0])
        if job.fingerprint
        else [],
        "arguments": app.flows._arguments(job),
        "boxes": boxes,
        "runs": app.audit.list(action="schedules run") if job.schedule else [],
        "workers": read(view, "workers"),
        "sql": f"SELECT * FROM job_states WHERE id = {id};",  # noqa: S608 - to read; a number
        "command": view.command("show", id),
    }


def flow(view: View) -> Values:
    unfolds = view.request.args.get("steps") == "all"
    flow, boxes = _flow(view, view.values["id"], limit=500 if unfolds else BOXES)
    return {"flow": flow, "boxes": boxes, "unfolded": unfolds}


def _flow(view: View, id: int, **options: int) -> Any:
    """Return a flow, and its boxes or those around one step."""

    def look(app: App) -> Any:
        return (flow := app.flows.get(id)), outline(flow.steps, **options)

    return view.reading.fresh(("flow", id, *options.items()), look)


# -- the rest ------------------------------------------------------------------------------------------------


def failures(view: View) -> Values:
    fields = fields_of(view.request.args, ["task", "queue"])
    alike = _complete(view, fields)
    groups, complete = read(view, "failures", **fields)
    return {
        "groups": groups,
        "complete": complete,
        "deployed": max((worker.started_at for worker in read(view, "alive")), default=None),
        "chosen": fields,
        "alike": alike,
    }


def failure(view: View) -> Values:
    groups, _ = read(view, "failures", error=view.values["fingerprint"])
    if not groups:
        raise JobNotFoundError("no failed job has this error now: they were retried or deleted")
    return {"group": groups[0], "sample": view.reading.app.jobs.get(groups[0].newest)}


def schedule(view: View) -> Values:
    schedule = view.reading.app.schedules.get(view.values["name"])
    return {"schedule": schedule, "arguments": decoded(schedule.payload)}


def audit(view: View) -> Values:
    fields = fields_of(view.request.args, ["actor", "action"])
    rows = view.reading.app.audit.list(
        limit=JOBS_SHOWN + 1, before=whole(view.request.args.get("before"), "before"), **fields
    )
    return {"actions": rows[:JOBS_SHOWN], "more": len(rows) > JOBS_SHOWN, "chosen": fields}


def storage_of(view: View) -> Storage:
    """Return the state of the database. Only operators see the statements of other sessions."""
    state: Storage = view.reading.fresh("storage", lambda _: storage(view.reading.own.database))
    if view.user.may("operator"):
        return state
    # guard: statements-of-others-are-hidden
    return replace(state, readings=tuple(replace(each, query=None) for each in state.readings))


def _shows(*names: str, fields: Sequence[str] = ()) -> Callable[[View], Values]:
    def page(view: View) -> Values:
        options = fields_of(view.request.args, fields)
        return {"chosen": options, **{name: read(view, name, **options) for name in names}}

    return page


PAGES: Mapping[str, tuple[str, Callable[[View], Values]]] = {
    "overview": ("/", overview),
    "jobs": ("/jobs", jobs),
    "job": ("/jobs/<int:id>", job),
    "failures": ("/failures", failures),
    "failure": ("/failures/<fingerprint>", failure),
    "flows": ("/flows", _shows("flows")),
    "flow": ("/flows/<int:id>", flow),
    "schedules": ("/schedules", _shows("schedules")),
    "schedule": ("/schedules/<path:name>", schedule),
    "limits": ("/limits", _shows("limits", fields=["prefix"])),
    "queues": ("/queues", _shows("queues", "pauses")),
    "workers": ("/workers", _shows("workers")),
    "database": ("/database", lambda view: {"storage": storage_of(view)}),
    "audit": ("/audit", audit),
}
"""The pages by their names, which are those of their templates, too, with their paths."""


# -- the JSON API, which only reads: the objects that the command line prints with --json --------------------

LARGEST_LIST = 1_000


def json_response(value: Any, status: int = 200) -> Response:
    return Response(document(value), status, mimetype="application/json")


def _object(view: View, row: Any, **options: bool) -> dict[str, Any]:
    """Return an object as this user may see it."""
    value: dict[str, Any] = row.as_json(**options)
    hidden = {"payload", "result", "headers", "cursor", "on_success", "on_failure"}
    for each in (value, *value.get("steps", ())):
        each |= {name: view.shown(each[name]) for name in hidden & each.keys()}
    return value


def _api_jobs(view: View) -> Response:
    arguments = view.request.args
    limit = whole(arguments.get("limit") or "100", "limit")
    rows = view.reading.app.jobs.list(
        **search_of(view, fields_of(arguments)),
        before=whole(arguments.get("before"), "before"),
        limit=checked_whole(limit, "limit", range(1, LARGEST_LIST + 1), "; go on with before=ID"),
        within=SEARCH_LIMIT,
        whole=False,
    )
    response = json_response([_object(view, row, whole=False) for row in rows])
    if not rows.complete:
        response.headers["Sqlq-Complete"] = "no"
    return response


def _api_failures(view: View) -> Response:
    groups, complete = read(view, "failures")
    return json_response({"errors": [_object(view, group) for group in groups], "capped": not complete})


def _api_object(read: Callable[[View], Any]) -> Callable[[View], Response]:
    return lambda view: json_response(_object(view, read(view)))


def _api_list(name: str) -> Callable[[View], Response]:
    return lambda view: json_response([_object(view, row) for row in read(view, name)])


API: Mapping[str, Callable[[View], Response]] = {
    "/api/v1/jobs": _api_jobs,
    "/api/v1/jobs/<int:id>": _api_object(lambda view: view.reading.app.jobs.get(view.values["id"])),
    "/api/v1/failures": _api_failures,
    "/api/v1/flows/<int:id>": _api_object(lambda view: view.reading.app.flows.get(view.values["id"])),
    "/api/v1/database": _api_object(storage_of),
    **{
        f"/api/v1/{name}": _api_list(name)
        for name in ("queues", "workers", "flows", "schedules", "limits", "audit")
    },
}
"""The answers by their paths."""
