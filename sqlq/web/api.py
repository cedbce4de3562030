"""The JSON API, which only reads: what the command line prints with --json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from werkzeug import Response

from sqlq.errors import ConfigurationError
from sqlq.web.pages import decoded, filter_of, storage_of, whole

if TYPE_CHECKING:
    from sqlq.web.site import View

MOST = 1_000


def problem(said: str, status: int) -> Response:
    return _json({"error": said}, status)


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, ensure_ascii=True, default=_encoded)
    return Response(text, status, mimetype="application/json")


def _encoded(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _plain(value: Any) -> dict[str, Any]:
    """Return a dataclass or named tuple as an object. `asdict` would copy each value, which takes long."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value._asdict())


def jobs(view: View) -> Response:
    arguments = view.request.args
    limit = whole(arguments.get("limit"), "limit") or 100
    if limit > MOST:
        raise ConfigurationError(
            f"limit is {limit}: at most {MOST} jobs come at a time; go on with before=ID"
        )
    before = whole(arguments.get("before"), "before")
    found = view.reading.app.jobs.listing(**filter_of(view).options(), before=before, limit=limit)
    return _json({"jobs": [_job(view, each) for each in found.jobs], "complete": found.complete})


_HIDDEN = ("payload", "result", "headers", "cursor", "on_success", "on_failure")


def _job(view: View, job: Any) -> dict[str, Any]:
    hidden = {name: view.shown(getattr(job, name)) for name in _HIDDEN}
    return {**_plain(job), **hidden, "error": job.error}


def job(view: View) -> Response:
    return _json(_job(view, view.reading.app.jobs.get(view.values["id"])))


def failures(view: View) -> Response:
    groups, complete = view.reading.fresh(("failures", None, None), lambda app: app.jobs.failures(), 5.0)
    return _json({"errors": [_plain(each) for each in groups], "capped": not complete})


def flow(view: View) -> Response:
    found = asdict(view.reading.app.flows.get(view.values["id"]))
    for step in found["steps"]:
        step["result"] = view.shown(step["result"])
    return _json(found)


def schedules(view: View) -> Response:
    found = [_plain(each) for each in view.reading.fresh("schedules", lambda app: app.schedules.list())]
    for each in found:
        each |= {"payload": view.shown(decoded(each["payload"])), "plan": each["plan"] and str(each["plan"])}
    return _json({"schedules": found})


def _listing(name: str, look: Any) -> Any:
    def page(view: View) -> Response:
        return _json({name: [_plain(each) for each in view.reading.fresh(("api", name), look)]})

    return page


PAGES: Mapping[str, Callable[[View], Response]] = {
    "/api/v1/queues": _listing("queues", lambda app: app.queues.status()),
    "/api/v1/jobs": jobs,
    "/api/v1/jobs/<int:id>": job,
    "/api/v1/failures": failures,
    "/api/v1/workers": _listing("workers", lambda app: app.workers.list(silent=True)),
    "/api/v1/flows": _listing("flows", lambda app: app.flows.list(limit=100)),
    "/api/v1/flows/<int:id>": flow,
    "/api/v1/schedules": schedules,
    "/api/v1/limits": _listing("limits", lambda app: app.limits.list(limit=1000)),
    "/api/v1/audit": _listing("audit", lambda app: app.audit.list(limit=1000)),
    "/api/v1/database": lambda view: _json(asdict(storage_of(view))),
}
"""The answers by their paths."""
