"""The dashboard as one WSGI application: its users, its pages, and the headers of each answer."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Collection, Iterable
from functools import partial
from importlib import resources
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.errors import (
    ConfigurationError,
    JobNotFoundError,
    MissingFileError,
    SchemaVersionError,
    SqlqError,
    UnsupportedDatabaseError,
)
from sqlq.web.access import SECRET_NAMES, Authorize, RefusedError, User, check_form, check_host, redacted
from sqlq.web.reading import Reading, unread


def required(name: str) -> Any:
    """Return a package of the dashboard. Raises `ConfigurationError` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the dashboard needs the package {error.name}: pip install 'sqlq-jobs[web]'"
        ) from None


required("jinja2")
required("werkzeug")

from werkzeug import Request, Response  # noqa: E402 - the sentence above comes first
from werkzeug.exceptions import HTTPException  # noqa: E402
from werkzeug.routing import Map, Rule  # noqa: E402

from sqlq.web import actions, pages  # noqa: E402
from sqlq.web.view import View  # noqa: E402

log = logging.getLogger("sqlq.web")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
STATUS = {
    JobNotFoundError: 404,
    SchemaVersionError: 503,
    UnsupportedDatabaseError: 503,
    MissingFileError: 503,
}
"""The codes of errors; those of others are 400."""
ASSETS = {"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}


class Site:
    """The dashboard of one App, as WSGI calls it."""

    def __init__(
        self,
        app: App,
        authorize: Authorize,
        *,
        hide_from_viewers: bool = False,
        redact: str = SECRET_NAMES,
        read_url: str | None = None,
        hosts: Collection[str] | None = None,
    ) -> None:
        """`hosts` are the names under which it answers; without them the host application checks that."""
        if not callable(authorize):
            raise ConfigurationError(
                "authorize says who may look and act: give a function that takes the request and returns a "
                'sqlq.web.User("ada", "operator"), or None to refuse'
            )
        self.reading = Reading(app, read_url)
        self._view = partial(
            View, app, self.reading, partial(redacted, names=re.compile(redact)), hide_from_viewers
        )
        self._authorize = authorize
        self._hosts = hosts
        paths = {
            **{name: path for name, (path, _) in pages.PAGES.items()},
            **{path: path for path in pages.API},
            "static": "/static/<name>",
        }
        rules = [Rule(path, endpoint=name, methods=["GET"]) for name, path in paths.items()]
        rules += [Rule("/act/<verb>", endpoint="act", methods=["POST"])]
        self._map = Map(rules, strict_slashes=False, merge_slashes=False)

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        request.max_content_length = request.max_form_memory_size = 1 << 20
        response = self._answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        urls = self._map.bind_to_environ(request.environ)
        view = self._view(request, urls)
        try:
            check_host(request, self._hosts)
            if not request.environ.get("PATH_INFO"):  # mounted at /sqlq, and no slash came after it
                return Response(status=308, headers={"Location": view.url("overview")})
            endpoint, view.values = urls.match()
            if endpoint == "static":
                return _asset(**view.values)
            if request.method == "POST":
                check_form(request)
            view.user = self._user(request)
            if endpoint == "act":
                return actions.act(view)
            if endpoint in pages.API:
                return pages.API[endpoint](view)
            values = pages.PAGES[endpoint][1](view)
            return view.page(endpoint, **pages.shared(view), **values)
        except HTTPException as error:
            if isinstance(error.response, Response):  # an answer of `authorize`
                return error.response
            return self._problem(view, error.description or error.name, error.code or 500)
        except RefusedError as error:
            return self._problem(view, str(error), error.status)
        except SqlqError as error:
            return self._problem(view, str(error), STATUS.get(type(error), 400))
        except SQLAlchemyError as error:
            app = self.reading.app if request.method == "GET" else self.reading.own
            reason = unread(error, app, view.kind, "the database did not answer")
            log.warning("the dashboard: %s", reason)
            return self._problem(
                view, f"{reason[0].upper()}{reason[1:]}. This page tries again by itself.", 503
            )

    def _user(self, request: Request) -> User:
        """Return the user of a request. Any answer of `authorize` but a `User` refuses it."""
        user: Any = self._authorize(request)
        if isinstance(user, User):  # guard: only-a-user-enters
            return user
        if user is not None:
            log.error(
                "authorize returned a %s, so the request is refused: return "
                "sqlq.web.User(name, role), or None for nobody; sqlq.web.asgi alone awaits an async def",
                type(user).__name__,
            )
        if inspect.iscoroutine(user):
            user.close()
        raise RefusedError(
            "you have no access to this dashboard", 401 if request.path.startswith("/api/") else 403
        )

    def _problem(self, view: View, message: str, status: int) -> Response:
        if view.request.path.startswith("/api/"):
            return pages.json_response({"error": message}, status)
        return view.page("problem", status, problem=message, code=status)


def _asset(name: str) -> Response:
    if name not in ASSETS:
        return Response("no such file", 404)
    return Response(
        resources.files("sqlq.web").joinpath("static", name).read_bytes(),
        mimetype=ASSETS[name],
        headers={"Cache-Control": "max-age=3600"},
    )
