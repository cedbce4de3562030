"""Host applications of other frameworks with the dashboard under a prefix, and their clients."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import fastapi
import flask
import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from werkzeug import Request
from werkzeug.middleware.dispatcher import DispatcherMiddleware

import sqlq
import sqlq.web
from sqlq.web import User
from tests.kit.visitor import HOST

Make = Callable[[sqlq.App, str], Any]
"""Makes a host application with the dashboard under a prefix, which logs in whom /login/NAME names."""


class OnALoop(httpx.BaseTransport):
    """Sends requests to an ASGI application, each on an event loop of its own."""

    def __init__(self, host: Any, root_path: str) -> None:
        self._transport = httpx.ASGITransport(app=host, root_path=root_path)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


def by_asgi(host: Any, root_path: str = "") -> httpx.Client:
    return httpx.Client(transport=OnALoop(host, root_path), base_url=HOST)


def by_wsgi(host: Any) -> httpx.Client:
    return httpx.Client(transport=httpx.WSGITransport(app=host), base_url=HOST)


def of_the_session(request: Request) -> User | None:
    """The user of Starlette's signed session."""
    name = request.environ["asgi.scope"]["session"].get("name")
    return User(name, "admin") if name else None


def on_starlette(app: sqlq.App, prefix: str) -> Any:
    async def log_in(request: Any) -> Any:
        request.session["name"] = request.path_params["name"]
        return PlainTextResponse("welcome")

    return Starlette(
        routes=[
            Route("/login/{name}", log_in),
            Mount(prefix, sqlq.web.asgi(app, authorize=of_the_session)),
        ],
        middleware=[Middleware(SessionMiddleware, secret_key="of a test")],
    )


def on_fastapi(app: sqlq.App, prefix: str) -> Any:
    host = fastapi.FastAPI()
    host.add_middleware(SessionMiddleware, secret_key="of a test")

    @host.get("/login/{name}")
    def log_in(name: str, request: fastapi.Request) -> str:
        request.session["name"] = name
        return "welcome"

    host.mount(prefix, sqlq.web.asgi(app, authorize=of_the_session))
    return host


def on_litestar(app: sqlq.App, prefix: str) -> Any:
    import litestar
    from litestar.middleware.session.client_side import CookieBackendConfig

    async def log_in(request: Any) -> str:
        request.session["name"] = request.path_params["name"]
        return "welcome"

    log_in.__annotations__ |= {"request": litestar.Request, "return": str}
    login = litestar.get("/login/{name:str}")(log_in)
    dashboard = litestar.handlers.asgi(prefix, is_mount=True, copy_scope=True)(
        sqlq.web.asgi(app, authorize=of_the_session)
    )
    session = CookieBackendConfig(secret=b"of a test, sixte").middleware
    return litestar.Litestar([login, dashboard], middleware=[session])


def on_flask(app: sqlq.App, prefix: str) -> Any:
    host = flask.Flask("shop")
    host.secret_key = "of a test"

    @host.get("/login/<name>")
    def log_in(name: str) -> str:
        flask.session["name"] = name
        return "welcome"

    def staff(request: Request) -> User | None:
        session = host.session_interface.open_session(host, request)  # type: ignore[arg-type]
        return User(session["name"], "admin") if session and "name" in session else None

    host.wsgi_app = DispatcherMiddleware(  # type: ignore[method-assign]
        host.wsgi_app, {prefix: sqlq.web.wsgi(app, authorize=staff)}
    )
    return host


def on_pyramid(app: sqlq.App, prefix: str) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # WebOb's, of Python's cgi
        from pyramid.config import Configurator
        from pyramid.response import Response
        from pyramid.session import SignedCookieSessionFactory
        from pyramid.wsgi import wsgiapp2

    def log_in(request: Any) -> Any:
        request.session["name"] = request.matchdict["name"]
        return Response("welcome")

    def staff(request: Request) -> User | None:
        name = request.environ["shop.user"]
        return User(name, "admin") if name else None

    dashboard = wsgiapp2(sqlq.web.wsgi(app, authorize=staff))

    def view(context: Any, request: Any) -> Any:
        request.environ["shop.user"] = request.session.get("name")
        return dashboard(context, request)

    with Configurator(session_factory=SignedCookieSessionFactory("of a test")) as config:
        config.add_route("login", "/login/{name}")
        config.add_view(log_in, route_name="login")
        config.add_route("sqlq", f"{prefix}/*subpath")
        config.add_view(view, route_name="sqlq")
        config.add_notfound_view(append_slash=True)
        return config.make_wsgi_app()


ASGI: list[Make] = [on_starlette, on_fastapi, on_litestar]


HOSTS: list[Make] = [*ASGI, on_flask, on_pyramid]
