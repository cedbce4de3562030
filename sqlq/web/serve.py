"""Serves the dashboard by itself, for `sqlq web`."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlq.app.app import App
from sqlq.errors import ConfigurationError
from sqlq.web.access import ROLES, Logins, Role, User, digest
from sqlq.web.site import Site, required

THREADS = 8


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def logins_of(file: Path | None) -> Logins:
    """Return the users and tokens of a file in TOML; without one, a token that works once is the only
    login. Raises `ConfigurationError` for a file that cannot be read, or has something else in it."""
    if file is None:
        return Logins()
    try:
        said = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--users {file} cannot be read: {error}") from None
    users, tokens = said.pop("users", {}), said.pop("tokens", {})
    if said or not isinstance(users, dict) or not isinstance(tokens, dict) or not (users or tokens):
        raise ConfigurationError(
            f"--users {file} has to have tables [users.NAME] with role and password, or [tokens.NAME] with "
            "role and sha256, and nothing else: sqlq web --new-user NAME prints one"
        )
    passwords = {
        name: (_role(file, name, each), _text(file, name, each, "password")) for name, each in users.items()
    }
    known = {
        _text(file, name, each, "sha256"): User(name, _role(file, name, each))
        for name, each in tokens.items()
    }
    return Logins(passwords, known)


def _role(file: Path, name: str, said: Any) -> Role:
    role = said.get("role") if isinstance(said, Mapping) else None
    for known in ROLES:
        if role == known:
            return known
    raise ConfigurationError(
        f"--users {file}: the role of {name} is {role!r}: it is one of {', '.join(ROLES)}"
    )


def _text(file: Path, name: str, said: Mapping[str, Any], key: str) -> str:
    text = said.get(key)
    if not isinstance(text, str) or (key == "password" and ":" not in text):
        raise ConfigurationError(
            f"--users {file}: {name} has no {key} of sqlq web --new-user, which is a hash and never plain"
        )
    return text


def new_user(name: str, role: Role, password: str) -> str:
    """Return the lines of a user for the file."""
    made = required("werkzeug.security").generate_password_hash(password)
    return f'[users.{_key(name)}]\nrole = "{role}"\npassword = "{made}"'


def new_token(name: str, role: Role, token: str) -> str:
    """Return the lines of a token for the file."""
    return f'[tokens.{_key(name)}]\nrole = "{role}"\nsha256 = "{digest(token)}"'


def _key(name: str) -> str:
    if not name.isprintable() or '"' in name or "\\" in name or not name:
        raise ConfigurationError(f"the name {name!r} has to be printable, without quotes and backslashes")
    return f'"{name}"'


class Server:
    """The dashboard at an address of its own, from its making on."""

    def __init__(
        self,
        app: App,
        *,
        host: str,
        port: int,
        logins: Logins,
        hosts: Sequence[str] = (),
        link: Callable[[str], None],
        **options: Any,
    ) -> None:
        """`link` is called with each URL that logs in once. Raises `ConfigurationError` for an address that
        is taken, or that others can reach without a login."""
        waitress = required("waitress")
        if not is_loopback(host) and not logins.passwords and not logins.tokens:
            # guard: strangers-need-a-login
            raise ConfigurationError(
                f"--host {host} can be reached from other machines: name who may log in with --users FILE "
                "(sqlq web --new-user NAME makes its lines), or leave --host out"
            )
        names = {host, "localhost", "127.0.0.1", "::1", *hosts} if is_loopback(host) else {host, *hosts}
        anywhere = host in ("0.0.0.0", "::")
        self.site = Site(app, logins, hosts=None if anywhere and not hosts else names, **options)
        try:
            self._server = waitress.create_server(
                self.site, host=host, port=port, threads=THREADS, ident=None, max_request_body_size=1 << 20
            )
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}, port {port}: {error.strerror or error}"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.effective_port}/"
        if is_loopback(host) and not logins.passwords:
            logins.links = lambda token: link(f"{self.url}login?token={token}")
            logins.links(logins.new_link())

    def run(self) -> None:
        """Serve until the process is stopped."""
        self._server.run()

    def close(self) -> None:
        self._server.close()
