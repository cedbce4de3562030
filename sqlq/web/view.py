"""One request for the dashboard: its user, and the means to answer it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from werkzeug import Request, Response
from werkzeug.routing import BuildError, MapAdapter

from sqlq.admin.facet import command_line
from sqlq.admin.verb import Verb
from sqlq.admin.verbs import VERBS
from sqlq.app.app import App
from sqlq.config.command_hint import command, escaped_lines, shortened
from sqlq.config.durations import about, age, ago, in_units, rate, span, until, written
from sqlq.payload.encryption import Unopened
from sqlq.web.access import FORM_COOKIE
from sqlq.web.reading import Reading

MESSAGE_COOKIE = "sqlq_message"
TEXT_LIMIT = 20_000
"""Characters of a text that a page shows; the command line and the JSON API have all of it."""


@dataclass
class View:
    """One request: its user, and the means to answer it."""

    app: App
    reading: Reading
    redact: Callable[[Any], Any]
    is_hiding: bool
    """Whether arguments and results are hidden from viewers."""
    request: Request
    urls: MapAdapter
    user: Any = None
    """A `User`; None for pages that need none."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The variable parts of the path, as the id of a job."""

    @cached_property
    def form_token(self) -> str:
        return self.request.cookies.get(FORM_COOKIE) or secrets.token_urlsafe(24)

    def url(self, endpoint: str, **values: Any) -> str:
        """Return the path of a page, under the prefix of this request."""
        try:
            return self.urls.build(endpoint, {name: value for name, value in values.items() if value != ""})
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
        return [
            verb
            for verb in VERBS.values()
            if verb.button and verb.group == group and self.user.may(verb.role) and verb.fits(state)
        ]

    def command(self, words: str, *subjects: Any, needs_app: bool = False, **options: Any) -> str:
        """Return the command that does the same as a button, or that a sentence names."""
        return command(command_line(words, *subjects, **options), self.app.url, needs_app=needs_app)

    @property
    def kind(self) -> str:
        """The kind of database role that answers this user's requests, one of those of `store.rights`."""
        return "operator" if self.user is not None and self.user.may("operator") else "reader"

    @property
    def hides(self) -> bool:
        """Whether arguments and results are hidden from this user."""
        return self.is_hiding and not self.user.may("operator")

    def shown(self, value: Any) -> Any:
        """Return a decoded value as this user may see it."""
        return "(hidden from viewers)" if self.hides else self.redact(value)

    def page(self, name: str, status: int = 200, **values: Any) -> Response:
        message = self.request.cookies.get(MESSAGE_COOKIE)
        values |= {"view": self, "user": self.user, "message": message, "endpoint": name}
        response = Response(
            templates().get_template(f"{name}.html").render(values), status, mimetype="text/html"
        )
        if message is not None:
            self.set_cookie(response, MESSAGE_COOKIE, "", max_age=0)
        if FORM_COOKIE not in self.request.cookies:
            self.set_cookie(response, FORM_COOKIE, self.form_token)
        return response

    def back(self, message: str) -> Response:
        """Return to the page from which a form was sent, with a sentence."""
        response = Response(status=303, headers={"Location": self.came_from})
        self.set_cookie(response, MESSAGE_COOKIE, message[:1000], max_age=60)
        return response

    @property
    def came_from(self) -> str:
        """The path of the page that the form names, if it is one of ours."""
        root = self.url("overview")
        path = self.request.form.get("back", "")
        is_own = path.startswith(root) and not path.startswith("//") and "\\" not in path
        return path if is_own and path.isprintable() else root  # guard: redirect-stays-on-the-site

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


# -- templates -----------------------------------------------------------------------------------------------


@cache
def templates() -> Environment:
    """Return the templates. Every value in them is escaped."""
    environment = Environment(
        loader=PackageLoader("sqlq.web"),
        autoescape=True,  # guard: rows-are-hostile
        undefined=StrictUndefined,
        finalize=_steerless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "age": partial(_time, age),
        "ago": partial(_time, ago),
        "cut": lambda value, limit=120: shortened(str(value), limit),
        "json": as_json,
        "time": partial(_time, written),
        "number": "{:,}".format,
        "rate": rate,
        "about": about,
        "span": span,
        "units": in_units,
        "until": partial(_time, until),
    }
    environment.globals |= {"command_line": command_line, "verbs": VERBS}
    environment.globals["now"] = partial(datetime.now, UTC)
    return environment


def _steerless(value: Any) -> Any:
    """Bound a text, and escape what turns the direction of a line or steers a terminal it is pasted into."""
    if isinstance(value, Markup):
        return Markup(escaped_lines(value))  # guard: joined-texts-steer-nothing
    return shortened(escaped_lines(str(value)), TEXT_LIMIT)  # guard: pages-bound-and-escape-texts


def as_json(value: Any) -> str:
    if isinstance(value, Unopened):
        return f"({value.why})"
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def _time(words: Callable[[datetime], str], time: datetime | None) -> Markup:
    """Write a time in these words, with the time itself on hover."""
    if time is None:
        return Markup("–")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        time.isoformat(), written(time), words(time)
    )
