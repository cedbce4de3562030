"""The dashboard as one WSGI application: its users, its pages, and the headers of each answer."""

from __future__ import annotations

import importlib
import inspect
import logging
import secrets
from collections.abc import Collection, Iterable
from importlib import resources
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.facet import command_line
from sqlq.admin.verbs import VERBS
from sqlq.app.app import App
from sqlq.config.command_hint import command
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
from werkzeug.routing import BuildError, Map, MapAdapter, RequestRedirect, Rule  # noqa: E402

from sqlq.web import actions, api, pages  # noqa: E402
from sqlq.web.render import templates  # noqa: E402

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
FORM_COOKIE, SAID_COOKIE = "sqlq_form", "sqlq_said"
ASSETS = {"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}


_NOBODY = User("nobody")
"""The user of pages that need none."""


class View:
    """One request: its user, and the means to answer it."""

    user = _NOBODY

    def __init__(self, site: Site, request: Request, urls: MapAdapter) -> None:
        self.site = site
        self.request = request
        self.urls = urls
        self.values: dict[str, Any] = {}
        """The variable parts of the path, as the id of a job."""
        self.form_token = request.cookies.get(FORM_COOKIE) or secrets.token_urlsafe(24)

    @property
    def reading(self) -> Reading:
        return self.site.reading

    def url(self, endpoint: str, **values: Any) -> str:
        """Return the path of a page, under the prefix of this request."""
        given = {key: each for key, each in values.items() if each not in (None, "")}
        try:
            return self.urls.build(endpoint, given)
        except BuildError:  # SQL may have written an empty name, and no path has one
            return self.urls.build("overview")

    @property
    def here(self) -> str:
        """The address of this page, for a form to return to."""
        request = self.request
        query = request.query_string.decode("ascii", "ignore")
        path = f"{request.root_path}{request.path}"
        return self.came_from if request.method == "POST" else f"{path}?{query}" if query else path

    def may(self, verb: str) -> bool:
        return self.user.may(VERBS[verb].role)

    def fits(self, verb: str, state: str | None) -> bool:
        """Whether a verb is for jobs of this state, or of some state."""
        return state is None or state in VERBS[verb].states

    def line(self, verb: str, name: Any, options: dict[str, Any]) -> str:
        """Return the command that does the same as a button."""
        return self.command(command_line(verb, *([name] if name else []), **options))

    def command(self, words: str, needs_app: bool = False) -> str:
        return command(words, self.site.app.url, needs_app=needs_app)

    @property
    def hides(self) -> bool:
        """Whether arguments and results are hidden from this user."""
        return self.site.hides and not self.user.may("operator")

    def shown(self, value: Any) -> Any:
        """Return a decoded value as this user may see it."""
        if self.hides:
            return "(hidden from viewers)"
        return self.site.redact(value)

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        said = self.request.cookies.get(SAID_COOKIE)
        values = {
            **values,
            "view": self,
            "user": None if self.user is _NOBODY else self.user,
            "said": said,
            "endpoint": template.removesuffix(".html"),
        }
        response = Response(templates().get_template(template).render(values), status, mimetype="text/html")
        if said is not None:
            self.set_cookie(response, SAID_COOKIE, "", max_age=0)
        if FORM_COOKIE not in self.request.cookies:
            self.set_cookie(response, FORM_COOKIE, self.form_token)
        return response

    def back(self, said: str) -> Response:
        """Return to the page from which a form was sent, with a sentence."""
        response = Response(status=303, headers={"Location": self.came_from})
        self.set_cookie(response, SAID_COOKIE, said[:1000], max_age=60)
        return response

    @property
    def came_from(self) -> str:
        """The path of the page that the form names, if it is one of ours."""
        root = self.url("overview")
        path = str(self.request.form.get("back", ""))
        ours = path.startswith(root) and not path.startswith("//") and "\\" not in path
        return path if ours and path.isprintable() else root  # guard: nobody-is-sent-elsewhere

    def set_cookie(self, response: Response, name: str, value: str, max_age: int | None = None) -> None:
        response.set_cookie(
            name,
            value,
            max_age=max_age,
            path=self.url("overview"),
            secure=self.request.is_secure,
            httponly=True,
            samesite="Strict",
        )


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
        self.app = app
        self.hides = hide_from_viewers
        self.redact = Redaction(redact)
        self.reading = Reading(app, read_url)
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
        view = View(self, request, urls)
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
