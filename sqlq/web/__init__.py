"""The dashboard: to mount in an application, or to serve by `sqlq web`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sqlq.web.access import ROLES, AsyncAuthorize, Authorize, Role, User

if TYPE_CHECKING:
    from werkzeug import Request

    from sqlq.app.app import App
    from sqlq.web.site import Site

THREADS = 8
"""How many requests run at a time."""

_LOOP = "sqlq.loop"

__all__ = ["ROLES", "Authorize", "Role", "User", "asgi", "wsgi"]


def wsgi(app: App, *, authorize: Authorize, **options: Any) -> Site:
    """Return the dashboard of an App as a WSGI application, under whatever prefix it is mounted.

    `authorize` is called for each request, a `werkzeug.Request`. It returns a `User` with a role. None, and
    anything else, refuses. The host's session is in `request.environ` or `request.cookies`. Further options:
    `hide_from_viewers` hides arguments and results from the role viewer. `redact` is a regular expression for
    names of keys whose values are never shown. `read_url` (else SQLQ_READ_URL) is a replica to read from.
    Raises `ConfigurationError` without the packages of `sqlq-jobs[web]`.

    >>> from werkzeug.middleware.dispatcher import DispatcherMiddleware  # doctest: +SKIP
    >>> site = sqlq.web.wsgi(app, authorize=staff_only)  # doctest: +SKIP
    >>> flask_app.wsgi_app = DispatcherMiddleware(flask_app.wsgi_app, {"/sqlq": site})  # doctest: +SKIP
    """
    from sqlq.web.site import Site

    return Site(app, authorize, **options)


def asgi(app: App, *, authorize: Authorize | AsyncAuthorize, **options: Any) -> Any:
    """Return the dashboard as an ASGI application, for `mount` of FastAPI, Starlette or Litestar; as `wsgi`.

    Requests run in threads. `request.environ["asgi.scope"]` is the scope, with the host's `session` and
    `user`. `authorize` may be an async def, which runs on the host's event loop.

    >>> api.mount("/sqlq", sqlq.web.asgi(app, authorize=staff_only))  # doctest: +SKIP
    """
    from sqlq.web.site import required

    def authorize_awaited(request: Request) -> Any:
        user: Any = authorize(request)
        if not inspect.iscoroutine(user):
            return user
        return asyncio.run_coroutine_threadsafe(user, request.environ["asgi.scope"][_LOOP]).result()

    # what is no function is refused
    site = wsgi(app, authorize=authorize_awaited if callable(authorize) else authorize, **options)
    answer = required("a2wsgi").WSGIMiddleware(site, workers=THREADS)

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**_under_its_prefix(scope), _LOOP: asyncio.get_running_loop()}
        await answer(scope, receive, send)

    return mounted


def _under_its_prefix(scope: Any) -> Any:
    """Return a scope whose path begins with its root_path, as ASGI has it, whatever the host made of both."""
    root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
    whole = unquote(scope.get("raw_path") or b"") or path
    rest = path.rstrip("/")
    if whole.rstrip("/") != rest and whole.rstrip("/").endswith(rest):  # Litestar cuts its mount's path off
        root += whole.rstrip("/").removesuffix(rest)
        path = root + whole.removeprefix(root)
    elif not f"{path}/".startswith(f"{root}/"):  # behind a proxy that cut the application's own prefix off
        path = scope.get("app_root_path", "").rstrip("/") + path
    return {**scope, "root_path": root, "path": path}
