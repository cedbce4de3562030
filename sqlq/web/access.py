"""Decides who may look and who may act: roles, and the checks of each request."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from sqlq.errors import ConfigurationError

if TYPE_CHECKING:
    from werkzeug import Request

Role = Literal["viewer", "operator", "admin"]
"""A viewer looks. An operator also retries, cancels, reschedules, replays, pauses and resumes. An admin also
deletes, stops workers, and changes schedules and limits."""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class User:
    """A user of the dashboard. The name stands in the audit."""

    name: str
    role: Role = "viewer"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.role not in ROLES:
            raise ConfigurationError(
                f"User({self.name!r}, {self.role!r}): give a name, and one of the roles {', '.join(ROLES)}; "
                "for nobody, authorize returns None"
            )

    def may(self, role: Role) -> bool:
        """Whether the user has at least this role."""
        return ROLES.index(self.role) >= ROLES.index(role)


Authorize: TypeAlias = "Callable[[Request], User | None]"
AsyncAuthorize: TypeAlias = "Callable[[Request], Awaitable[User | None]]"

SECRET_NAMES = (
    r"(?i)pass(word|wd|phrase)?$|secret|token|api_?key|authorization|cookie|credential|private_?key"
)
"""Keys of arguments, headers and results whose values are not shown to anyone."""
FORM_COOKIE = "sqlq_form"
"""The cookie with the token of a browser's forms."""


def redacted(value: Any, names: str | re.Pattern[str] = SECRET_NAMES) -> Any:
    """Return a decoded JSON value without those whose keys are named like secrets."""
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if re.search(names, str(key)) else redacted(part, names)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(part, names) for part in value]
    return value


class RefusedError(Exception):
    """A request that is not answered, with the reason."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


def check_host(request: Request, hosts: Collection[str] | None) -> None:
    """Refuse a request for another host name: a page elsewhere may have pointed its own name here."""
    if hosts is None:  # the host application checks its names
        return
    name = urlsplit(f"//{request.host}").hostname or ""
    if name not in hosts:  # guard: host-name-is-checked
        raise RefusedError(
            f"this dashboard does not answer for the host {name!r}; name it with --allow-host if it is yours",
            421,
        )


def check_form(request: Request) -> None:
    """Refuse a form that another site has sent, or that does not have the token of this browser's pages."""
    site = request.headers.get("Sec-Fetch-Site")
    if site != "same-origin":  # which no page can set; a proxy may have cut the port off the host
        sender = request.headers.get("Origin") or request.headers.get("Referer")
        if site is None and sender is None:
            raise RefusedError("the browser did not name the site of the form: nothing was done")
        is_other = sender is not None and urlsplit(sender).netloc != request.host
        if is_other or site not in (None, "none"):  # guard: form-origin-is-checked
            raise RefusedError("the form was sent by another site: nothing was done")
    token = request.cookies.get(FORM_COOKIE, "")
    if not token or not same(token, request.form.get("token", "")):  # guard: forms-have-their-token
        raise RefusedError("the form has expired: go back, load the page anew and send it again")


def same(secret: str, text: str) -> bool:
    return hmac.compare_digest(secret.encode(), text.encode())
