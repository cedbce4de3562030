"""The JSON API, which only reads: the objects that the command line prints with --json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from werkzeug import Response

from sqlq.admin.jobs import LOOKED_AT
from sqlq.admin.verb import whole
from sqlq.config.json_text import AsJson, document
from sqlq.model.checks import checked_whole
from sqlq.web.pages import Page, failures_of, filter_of, look, search_of, storage_of
from sqlq.web.view import View

MOST = 1_000
_HIDDEN = ("payload", "result", "headers", "cursor", "on_success", "on_failure")


def problem(said: str, status: int) -> Response:
    return _json({"error": said}, status)


def _json(value: Any, status: int = 200) -> Response:
    return Response(document(value), status, mimetype="application/json")


def _object(view: View, found: AsJson, **how: bool) -> dict[str, Any]:
    """Return an object as this user may see it."""
    value = found.as_json(**how)
    for each in (value, *value.get("steps", ())):
        each |= {name: view.shown(each[name]) for name in _HIDDEN if name in each}
    return value


def jobs(view: View) -> Response:
    arguments = view.request.args
    limit = whole(arguments.get("limit") or "100", "limit")
    limit = checked_whole(limit, "limit", range(1, MOST + 1), "; go on with before=ID")
    before = whole(arguments.get("before"), "before")
    search = search_of(view, filter_of(arguments))
    found = view.reading.app.jobs.list(**search, before=before, limit=limit, within=LOOKED_AT, whole=False)
    answer = _json([_object(view, each, whole=False) for each in found])
    if not found.complete:
        answer.headers["Sqlq-Complete"] = "no"
    return answer


def failures(view: View) -> Response:
    groups, complete = failures_of(view)
    return _json({"errors": [_object(view, each) for each in groups], "capped": not complete})


def _one(read: Callable[[View], AsJson]) -> Page:
    return lambda view: _json(_object(view, read(view)))


def _list(name: str) -> Page:
    return lambda view: _json([_object(view, each) for each in look(view, name)])


PAGES: Mapping[str, Page] = {
    "/api/v1/queues": _list("queues"),
    "/api/v1/jobs": jobs,
    "/api/v1/jobs/<int:id>": _one(lambda view: view.reading.app.jobs.get(view.values["id"])),
    "/api/v1/failures": failures,
    "/api/v1/workers": _list("workers"),
    "/api/v1/flows": _list("flows"),
    "/api/v1/flows/<int:id>": _one(lambda view: view.reading.app.flows.get(view.values["id"])),
    "/api/v1/schedules": _list("schedules"),
    "/api/v1/limits": _list("limits"),
    "/api/v1/audit": _list("audit"),
    "/api/v1/database": _one(storage_of),
}
"""The answers by their paths."""
