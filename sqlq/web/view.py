"""One request for the dashboard: its user, and the means to answer it."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from werkzeug import Request, Response
from werkzeug.routing import BuildError, MapAdapter

from sqlq.admin.facet import command_line
from sqlq.admin.verb import Verb
from sqlq.admin.verbs import VERBS
from sqlq.app.app import App
from sqlq.config.command_hint import command
from sqlq.web.access import Redaction, User
from sqlq.web.reading import Reading
from sqlq.web.render import templates

FORM_COOKIE, SAID_COOKIE = "sqlq_form", "sqlq_said"


class Dashboard(NamedTuple):
    """The App of all requests, its reads, and what is hidden from whom."""

    app: App
    reading: Reading
    redact: Redaction
    hides: bool
    """Whether arguments and results are hidden from viewers."""


_NOBODY = User("nobody")
"""The user of pages that need none."""


class View:
    """One request: its user, and the means to answer it."""

    user = _NOBODY

    def __init__(self, dashboard: Dashboard, request: Request, urls: MapAdapter) -> None:
        self.app, self.reading = dashboard.app, dashboard.reading
        self.redact, self._is_hiding = dashboard.redact, dashboard.hides
        self.request = request
        self.urls = urls
        self.values: dict[str, Any] = {}
        """The variable parts of the path, as the id of a job."""
        self.form_token = request.cookies.get(FORM_COOKIE) or secrets.token_urlsafe(24)

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

    def verbs(self, group: str, state: str | None = None) -> list[Verb]:
        """Return the verbs on jobs, or below a command, that have a button for this user and this state."""
        known = (verb for verb in VERBS.values() if verb.button and verb.group == group)
        return [verb for verb in known if self.user.may(verb.role) and verb.fits(state)]

    def verb(self, words: str) -> Verb:
        return VERBS[words]

    def line(self, verb: str, name: Any, options: dict[str, Any]) -> str:
        """Return the command that does the same as a button."""
        return self.command(command_line(verb, *([name] if name else []), **options))

    def command(self, words: str, needs_app: bool = False) -> str:
        return command(words, self.app.url, needs_app=needs_app)

    @property
    def hides(self) -> bool:
        """Whether arguments and results are hidden from this user."""
        return self._is_hiding and not self.user.may("operator")

    def shown(self, value: Any) -> Any:
        """Return a decoded value as this user may see it."""
        if self.hides:
            return "(hidden from viewers)"
        return self.redact(value)

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
