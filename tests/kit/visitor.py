"""A visitor of the dashboard, without a browser: the answers of its WSGI application."""

from __future__ import annotations

import html
import re
from typing import Any

from werkzeug.test import Client, TestResponse

import sqlq
from sqlq.web import Role, User, wsgi
from sqlq.web.access import Authorize

HOST = "http://localhost"


class Visitor:
    """Someone with a role, who looks at pages and sends their forms."""

    def __init__(self, app: sqlq.App, role: Role | None = "admin", **options: Any) -> None:
        user = None if role is None else User("ada", role)
        authorize: Authorize = options.pop("authorize", lambda request: user)
        self.site = wsgi(app, authorize=authorize, **options)
        self.client = Client(self.site)

    def get(self, path: str = "/", **options: Any) -> TestResponse:
        return self.client.get(path, **options)

    def page(self, path: str = "/", status: int = 200) -> str:
        answer = self.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def read(self, path: str) -> Any:
        """Return an answer of the JSON API."""
        answer = self.get(f"/api/v1/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json

    def token(self) -> str:
        """The token of this visitor's forms, as each page has it."""
        (token,) = set(re.findall(r'name="token" value="([^"]+)"', self.page("/queues"))) or {""}
        cookie = self.client.get_cookie("sqlq_form")
        return token or (cookie.value if cookie else "")

    def send(self, verb: str, *, headers: dict[str, str] | None = None, **form: Any) -> TestResponse:
        """Send the form of a verb, as a browser does."""
        told = {"Origin": HOST, "Sec-Fetch-Site": "same-origin"} if headers is None else headers
        return self.client.post(f"/act/{verb}", data={"token": self.token(), **form}, headers=told)

    def asked(self, verb: str, **form: Any) -> tuple[str, dict[str, Any]]:
        """Send a form that is confirmed, and return the question and the form that answers it."""
        page = html.unescape(self.send(verb, **form).text)
        answer: dict[str, Any] = {}
        for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page):
            answer.setdefault(name, []).append(value)
        return page, {**answer, "confirmed": "yes"}

    def done(self, verb: str, **form: Any) -> str:
        """Send a form, and return the sentence that the next page shows."""
        answer = self.send(verb, **form)
        assert answer.status_code == 303, answer.text
        said = re.search(r'<p class="said" role="status">(.*?)</p>', self.page(answer.location))
        assert said is not None
        return said[1]
