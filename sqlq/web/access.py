"""Decides who may look and who may act: roles, logins, tokens, and the checks of each request."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from werkzeug import Request

Role: TypeAlias = Literal["viewer", "operator", "admin"]
"""A viewer looks. An operator also retries, cancels, reschedules, replays, pauses and resumes. An admin also
deletes, stops workers, and changes schedules and limits."""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class User:
    """A user of the dashboard. The name stands in the audit."""

    name: str
    role: Role = "viewer"

    def may(self, role: Role) -> bool:
        """Whether the user has at least this role."""
        return ROLES.index(self.role) >= ROLES.index(role)


Authorize: TypeAlias = "Callable[[Request], User | None]"

SECRET_NAMES = (
    r"(?i)pass(word|wd|phrase)?$|secret|token|api_?key|authorization|cookie|credential|private_?key"
)
"""Keys of arguments, headers and results whose values are not shown to anyone."""
REDACTED = "(hidden)"


class Redaction:
    """Replaces values whose keys are named like secrets."""

    def __init__(self, names: str = SECRET_NAMES) -> None:
        self._names = re.compile(names)

    def __call__(self, value: Any) -> Any:
        """Return a decoded JSON value without its secrets."""
        if isinstance(value, Mapping):
            return {
                key: REDACTED if self._names.search(str(key)) else self(inner) for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        return value


class RefusedError(Exception):
    """A request that is not answered, with the reason."""

    def __init__(self, why: str, status: int = 403) -> None:
        super().__init__(why)
        self.status = status


def check_host(request: Request, hosts: Collection[str] | None) -> None:
    """Refuse a request for another host name: a page elsewhere may have pointed its own name here."""
    if hosts is None:  # the host application checks its names
        return
    name = urlsplit(f"//{request.host}").hostname or ""
    if name not in hosts:  # guard: another-name-is-refused
        raise RefusedError(
            f"this dashboard does not answer for the host {name!r}; name it with --allow-host if it is yours",
            421,
        )


def check_origin(request: Request) -> None:
    """Refuse a form that another site has sent. Browsers name the sender in one of these headers."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None and site not in ("same-origin", "none"):  # guard: another-site-posts-nothing
        raise RefusedError("the form was sent by another site: nothing was done")
    sender = request.headers.get("Origin") or request.headers.get("Referer")
    if sender is None:
        if site is None:
            raise RefusedError("the browser did not say which site has sent the form: nothing was done")
        return
    if urlsplit(sender).netloc != request.host:
        raise RefusedError("the form was sent by another site: nothing was done")


def same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def digest(token: str) -> str:
    """Return the form in which a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


LOGINS_A_MINUTE = 10
SESSION_SECONDS = 12 * 3600.0


@dataclass
class Logins:
    """The sessions of `sqlq web`. A login needs a token that works once, or name and password."""

    passwords: Mapping[str, tuple[Role, str]] = field(default_factory=dict)
    """The role and the hash of the password of each user."""
    tokens: Mapping[str, User] = field(default_factory=dict)
    """The users of the JSON API, by the digests of their tokens."""
    owner: User = field(default_factory=lambda: User("local", "admin"))
    """The user who logs in by the token."""
    cookie: str = "sqlq_session"

    links: Callable[[str], None] = lambda token: None
    """Called with the next token, when one has been used."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._link: str | None = None
        self._sessions: dict[str, tuple[User, float]] = {}
        self._failures: deque[float] = deque()

    def new_link(self) -> str:
        """Return a token that logs in once."""
        self._link = secrets.token_urlsafe(24)
        return self._link

    def by_link(self, token: str) -> str | None:
        """Take the token that logs in once, and return a new session; None for another token."""
        self._check_rate()
        with self._lock:
            if self._link is None or not same(token, self._link):
                self._failures.append(time.monotonic())
                return None
            self._link = None  # guard: a-link-works-once
        self.links(self.new_link())
        return self._begin(self.owner)

    def by_password(self, name: str, password: str) -> str | None:
        """Return a new session of a user; None for a wrong name or password."""
        from werkzeug.security import check_password_hash

        self._check_rate()
        role, known = self.passwords.get(name, ("viewer", _NOBODY))
        if not check_password_hash(known, password) or name not in self.passwords:
            with self._lock:
                self._failures.append(time.monotonic())
            return None
        return self._begin(User(name, role))

    def _check_rate(self) -> None:
        moment = time.monotonic()
        with self._lock:
            while self._failures and self._failures[0] < moment - 60:
                self._failures.popleft()
            if len(self._failures) >= LOGINS_A_MINUTE:  # guard: guesses-are-slow
                raise RefusedError("too many failed logins: try again in a minute", 429)

    def _begin(self, user: User) -> str:
        key = secrets.token_urlsafe(32)
        moment = time.monotonic()
        with self._lock:
            self._sessions = {
                old: (who, until) for old, (who, until) in self._sessions.items() if until > moment
            }
            self._sessions[digest(key)] = (user, moment + SESSION_SECONDS)
        return key

    def end(self, request: Request) -> None:
        with self._lock:
            self._sessions.pop(digest(request.cookies.get(self.cookie, "")), None)

    def __call__(self, request: Request) -> User | None:
        """Return the user of a session or of an API token."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.tokens.get(digest(token.strip()))
        user, until = self._sessions.get(digest(request.cookies.get(self.cookie, "")), (None, 0.0))
        return user if until > time.monotonic() else None


_NOBODY = "scrypt:32768:8:1$KpSJ0OcUlnTxlzxm$" + "0" * 128
"""The hash of no password: a wrong name takes as long as a wrong password."""
