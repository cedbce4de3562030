"""The dashboard as one WSGI application: its users, its pages, and the headers of each answer."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Collection, Iterable
from importlib import resources
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from sqlq.app.app import App
from sqlq.database.dialects import refusal
from sqlq.errors import (
    ConfigurationError,
    JobNotFoundError,
    MissingFileError,
    SchemaVersionError,
    SqlqError,
    UnsupportedDatabaseError,
)
from sqlq.web.access import (
    SECRET_NAMES,
    Authorize,
    Redaction,
    RefusedError,
    User,
    check_host,
    check_origin,
    same,
)
from sqlq.web.reading import Reading


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
from werkzeug.routing import Map, RequestRedirect, Rule  # noqa: E402

from sqlq.web import actions, api, pages  # noqa: E402
from sqlq.web.view import FORM_COOKIE, Dashboard, View  # noqa: E402

log = logging.getLogger("sqlq.web")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
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
LARGEST_FORM = 1 << 20
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
        if any(map(inspect.iscoroutinefunction, (authorize, type(authorize).__call__))):
            raise ConfigurationError(
                "authorize is an async def, and sqlq.web.wsgi has no event loop: write it as def, or mount "
                "sqlq.web.asgi"
            )
        self.reading = Reading(app, read_url)
        self._dashboard = Dashboard(app, self.reading, Redaction(redact), hide_from_viewers)
        self._authorize = authorize
        self._has_warned = False
        self._hosts = hosts
        named = {**pages.PAGES, **{path: (path, page) for path, page in api.PAGES.items()}}
        self._handlers = {name: page for name, (_, page) in named.items()} | {"act": actions.act}
        rules = [Rule(path, endpoint=name, methods=["GET"]) for name, (path, _) in named.items()]
        rules += [Rule("/act/<verb>", endpoint="act", methods=["POST"])]
        rules += [Rule("/static/<name>", endpoint="static", methods=["GET"])]
        self._map = Map(rules, strict_slashes=False)

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        request.max_content_length = request.max_form_memory_size = LARGEST_FORM
        response = self._answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        urls = self._map.bind_to_environ(request.environ)
        view = View(self._dashboard, request, urls)
        try:
            check_host(request, self._hosts)
            if not request.environ.get("PATH_INFO"):  # mounted at /sqlq, and no slash came after it
                return Response(status=308, headers={"Location": view.url("overview")})
            endpoint, values = urls.match()
            if endpoint == "static":
                return _asset(values["name"])
            if request.method == "POST":
                check_origin(request)
                self._check_token(view)
            user = self._user(request)
            if user is None:
                status = 401 if endpoint.startswith("/api/") else 403
                raise RefusedError("you have no access to this dashboard", status)
            view.user, view.values = user, dict(values)
            return self._handlers[endpoint](view)
        except RequestRedirect:
            return Response(status=308, headers={"Location": view.url("overview")})
        except HTTPException as error:
            if isinstance(error.response, Response):  # an answer of `authorize`
                return error.response
            return self._problem(view, error.description or error.name, error.code or 500)
        except RefusedError as error:
            return self._problem(view, str(error), error.status)
        except SqlqError as error:
            return self._problem(view, str(error), STATUS.get(type(error), 400))
        except SQLAlchemyError as error:
            log.warning("the database did not answer a page of the dashboard: %s", refusal(error))
            said = f"The database did not answer: {refusal(error)}. This page tries again by itself."
            return self._problem(view, said, 503)

    def _user(self, request: Request) -> User | None:
        """Return the user of a request. Any answer of `authorize` but a `User` refuses it."""
        user: Any = self._authorize(request)
        if user is None or isinstance(user, User):  # guard: only-a-user-enters
            return user
        if not self._has_warned:
            self._has_warned = True
            log.error(
                "authorize returned a %s, so the request is refused, and each one like it: return "
                "sqlq.web.User(name, role), or None for nobody; sqlq.web.asgi alone awaits an async def",
                type(user).__name__,
            )
        if inspect.iscoroutine(user):
            user.close()
        return None

    def _problem(self, view: View, said: str, status: int) -> Response:
        if view.request.path.startswith("/api/"):
            return api.problem(said, status)
        return view.page("problem.html", status, problem=said, code=status)

    def _check_token(self, view: View) -> None:
        """Refuse a form that does not have the token of this browser's pages."""
        known = view.request.cookies.get(FORM_COOKIE, "")
        if not known or not same(known, view.request.form.get("token", "")):  # guard: forms-have-their-token
            raise RefusedError("the form has expired: go back, load the page anew and send it again")


def _asset(name: str) -> Response:
    if name not in ASSETS:
        return Response("no such file", 404)
    text = resources.files("sqlq.web").joinpath("static", name).read_bytes()
    return Response(text, mimetype=ASSETS[name], headers={"Cache-Control": "max-age=3600"})
