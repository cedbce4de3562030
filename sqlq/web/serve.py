"""Serves the dashboard by itself, for `sqlq web`."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlq.app.app import App
from sqlq.config.listen import listen, with_health
from sqlq.errors import ConfigurationError
from sqlq.web import THREADS
from sqlq.web.access import ROLES, RefusedError, User, same
from sqlq.web.site import Site, required

required("waitress")

# `Site` has checked for werkzeug; waitress is checked first, so that its absence is named
from werkzeug import Request, Response  # noqa: E402
from werkzeug.exceptions import HTTPException  # noqa: E402
from werkzeug.security import check_password_hash  # noqa: E402
from werkzeug.utils import redirect  # noqa: E402

log = logging.getLogger("sqlq.web")

CONNECTIONS, SILENT_SECONDS = 500, 20
"""The most connections, and the time that one may be silent."""
LOGINS_A_MINUTE = 10
KEY_COOKIE = "sqlq_key"


class ByLink:
    """Lets in the browser that opens a URL, which works once; from then on by a cookie, until the process
    ends."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` is called with the query of each URL."""
        self._show = show
        self._key, self._token = secrets.token_urlsafe(32), ""

    def renew(self) -> None:
        """Show a URL. Until then none lets in."""
        self._token = secrets.token_urlsafe(24)
        self._show(f"?token={self._token}")

    def __call__(self, request: Request) -> User:
        if self._token and same(request.args.get("token", ""), self._token):
            self.renew()  # guard: a-link-works-once
            answer = redirect("/")
            answer.set_cookie(KEY_COOKIE, self._key, httponly=True, samesite="Strict")
            raise HTTPException(response=answer)
        if same(request.cookies.get(KEY_COOKIE, ""), self._key):
            return User("local", "admin")
        raise RefusedError(
            "open the link that sqlq web has printed: it works once, and the terminal then shows the next"
        )


class ByPassword:
    """Lets in the users of a file by HTTP Basic. It has a line `name:role:hash` for each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._salt = secrets.token_bytes(32)
        self._failures: deque[float] = deque(maxlen=LOGINS_A_MINUTE)
        self._state: tuple[str, dict[str, tuple[User, str]], set[bytes]] = "", {}, set()
        self._read()

    def _read(self) -> None:
        """Read the file. Raises `ConfigurationError` where it cannot be read, or has something else in it."""
        try:
            text = self._file.read_text()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--users {self._file} cannot be read: {error}") from None
        if text == self._state[0]:
            return
        users: dict[str, tuple[User, str]] = {}
        for line in filter(None, text.splitlines()):
            name, _, rest = line.partition(":")
            role, _, hashed = rest.partition(":")
            known = next((each for each in ROLES if each == role), None)
            if known is None or not name or "$" not in hashed:
                raise ConfigurationError(
                    f"--users {self._file}: the line of {name!r} is not name:role:hash, with a role of "
                    f"{', '.join(ROLES)} and a hash of werkzeug.security.generate_password_hash"
                )
            users[name] = User(name, known), hashed
        self._state = text, users, set()

    def __call__(self, request: Request) -> User:
        try:
            self._read()
        except ConfigurationError as error:
            log.error("nobody can log in: %s", error)
            raise RefusedError("the users cannot be read: the log of sqlq web has the reason", 503) from None
        _, users, accepted = self._state
        basic = request.authorization
        name, password = (basic and basic.username) or "", (basic and basic.password) or ""
        if name:
            # the hash is slow on purpose, and a browser sends the password with each request
            key = hmac.digest(self._salt, f"{name}:{password}".encode(), "sha256")
            if key not in accepted:
                now = time.monotonic()
                is_full = len(self._failures) == LOGINS_A_MINUTE
                if is_full and self._failures[0] > now - 60:  # guard: guesses-are-slow
                    raise RefusedError("too many failed logins: try again in a minute", 429)
                _, hashed = users.get(name, (None, _NOBODY))
                if check_password_hash(hashed, password) and name in users:
                    accepted.add(key)  # of this reading of the file
                else:
                    self._failures.append(now)
            if key in accepted:
                return users[name][0]
        raise HTTPException(
            response=Response(
                "give a name and its password",
                401,
                {"WWW-Authenticate": 'Basic realm="sqlq", charset="UTF-8"'},
            )
        )


_NOBODY = "scrypt:32768:8:1$KpSJ0OcUlnTxlzxm$" + "0" * 128
"""The hash of no password: a wrong name takes as long as a wrong password."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Server:
    """The dashboard at an address of its own: `server` of waitress answers at `url`, once it runs."""

    def __init__(
        self,
        app: App,
        *,
        host: str,
        port: int,
        users: Path | None = None,
        hosts: Sequence[str] = (),
        link: Callable[[str], None],
        **options: Any,
    ) -> None:
        """`link` is called with each URL that logs in once. Raises `ConfigurationError` for an address that
        is taken, or that others can reach without a login."""
        is_own = is_loopback(host)
        if not is_own and users is None:  # guard: strangers-need-a-login
            raise ConfigurationError(
                f"--host {host} can be reached from other machines: name who may log in with --users FILE, "
                "which has a line name:role:hash for each, or leave --host out"
            )
        names = {host, *hosts, *(("localhost", "127.0.0.1", "::1") if is_own else ())}
        login = ByLink(lambda query: link(self.url + query)) if users is None else ByPassword(users)
        self.site = Site(
            app, login, hosts=names if hosts or host not in ("0.0.0.0", "::") else None, **options
        )
        self.server, self.url = listen(
            # before the check of the host: a probe names an address
            with_health(self.site, self.site.reading.own.database.read),
            host,
            port,
            threads=THREADS,
            max_request_body_size=1 << 20,
            connection_limit=CONNECTIONS,
            channel_timeout=SILENT_SECONDS,
            cleanup_interval=SILENT_SECONDS // 4,
        )
        if isinstance(login, ByLink):
            login.renew()
