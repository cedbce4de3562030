"""The dashboard in applications of other frameworks, under their prefixes and their own logins."""

from __future__ import annotations

import asyncio
import html
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urljoin

import fastapi
import flask
import httpx
import pytest
from starlette.middleware.sessions import SessionMiddleware
from werkzeug import Request
from werkzeug.middleware.dispatcher import DispatcherMiddleware

import sqlq
import sqlq.web
from sqlq.web import User
from tests.kit import end, failed
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


def on_fastapi(app: sqlq.App, prefix: str, authorize: Any = of_the_session) -> Any:
    host = fastapi.FastAPI()
    host.add_middleware(SessionMiddleware, secret_key="of a test")

    @host.get("/login/{name}")
    def log_in(name: str, request: fastapi.Request) -> str:
        request.session["name"] = name
        return "welcome"

    host.mount(prefix, sqlq.web.asgi(app, authorize=authorize))
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
    with warnings.catch_warnings(action="ignore"):  # of Python's cgi, and of setuptools
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


ASGI: list[Make] = [on_fastapi, on_litestar]
HOSTS: list[Make] = [*ASGI, on_flask, on_pyramid]


@pytest.fixture
def failed_job(app: sqlq.App) -> int:
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    app.enqueue(app.named("send").new(1))
    return end(app, failed())[0]


PREFIX = "/ops/sqlq"


@pytest.fixture(params=HOSTS, ids=lambda make: make.__name__)
def browser(request: pytest.FixtureRequest, app: sqlq.App) -> Iterator[httpx.Client]:
    make: Make = request.param
    host = make(app, PREFIX)
    with by_asgi(host) if make in ASGI else by_wsgi(host) as browser:
        yield browser


def links(address: str, answer: httpx.Response) -> list[str]:
    found = re.findall(r'(?:href|src|action|formaction)="([^"#]+)"', answer.text)
    return [urljoin(address, html.unescape(link)) for link in found]


def retry(prefix: str, browser: httpx.Client, job: int) -> httpx.Response:
    page = browser.get(f"{prefix}/jobs/{job}?from=here").text
    form = re.search(rf'action="({prefix}/act/retry)">(.*?)</form>', page, re.DOTALL)
    assert form is not None
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[2]))
    assert fields["back"] == f"{prefix}/jobs/{job}?from=here"
    return browser.post(form[1], data=fields, headers={"Origin": HOST, "Sec-Fetch-Site": "same-origin"})


def test_every_url_stays_under_the_prefix_of_a_mount(
    app: sqlq.App, browser: httpx.Client, failed_job: int
) -> None:
    assert browser.get(f"{PREFIX}/").status_code == 403, "the host says that nobody is logged in"
    assert "welcome" in browser.get("/login/ada").text
    assert browser.get("/nowhere").status_code == 404, "the host's own"
    ahead, seen = [f"{PREFIX}/"], set()
    while ahead:
        address = ahead.pop()
        answer = browser.get(address)
        assert answer.status_code == 200, (address, answer.text)
        for cookie in answer.headers.get_list("set-cookie"):
            assert cookie.startswith("session=") or f"Path={PREFIX}/" in cookie, cookie
        for link in links(address, answer):
            assert link.startswith(f"{PREFIX}/"), (address, link)
            if "/act/" not in link and "?" not in link and link not in seen:
                seen.add(link)
                ahead.append(link)
    assert {f"{PREFIX}/static/style.css", f"{PREFIX}/jobs/{failed_job}", f"{PREFIX}/schedules"} <= seen
    answer = browser.get(PREFIX)
    assert answer.status_code in (301, 307, 308)
    assert answer.headers["location"].removeprefix(HOST) == f"{PREFIX}/"
    answer = retry(PREFIX, browser, failed_job)
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"].removeprefix(HOST) == f"{PREFIX}/jobs/{failed_job}?from=here"
    assert "retried 1 job" in browser.get(answer.headers["location"]).text
    assert app.jobs.get(failed_job).state == "available"


@pytest.mark.parametrize("forwards", [True, False])
def test_every_url_stays_under_the_root_path_of_fastapi(
    app: sqlq.App, failed_job: int, forwards: bool
) -> None:
    given = "/shop" if forwards else ""
    with by_asgi(on_fastapi(app, "/sqlq"), root_path="/shop") as browser:
        browser.get(f"{given}/login/ada")
        page = browser.get(f"{given}/sqlq/jobs/{failed_job}")
        assert page.status_code == 200, page.text
        assert {link[:11] for link in links("/", page)} == {"/shop/sqlq/"}
        assert "Path=/shop/sqlq/" in page.headers["set-cookie"]


class AsyncCallable:
    async def __call__(self, request: Request) -> User | None:
        await asyncio.sleep(0)  # on the loop of the host
        return of_the_session(request)


CALLABLE = AsyncCallable()


@pytest.mark.parametrize("authorize", [CALLABLE.__call__, CALLABLE, partial(CALLABLE.__call__)])
def test_an_async_authorize_is_awaited_when_the_mount_is_asynchronous(
    app: sqlq.App, failed_job: int, authorize: Any
) -> None:
    with by_asgi(on_fastapi(app, "/sqlq", authorize)) as browser:
        for path in ("/sqlq/", "/sqlq/jobs", "/sqlq/api/v1/jobs", "/sqlq/api/v1/audit"):
            assert browser.get(path).status_code == (401 if "/api/" in path else 403)
        browser.get("/login/ada")
        assert retry("/sqlq", browser, failed_job).status_code == 303
    assert app.jobs.get(failed_job).state == "available"


def broken(request: Request) -> User:
    raise RuntimeError("the host's session is away")


async def abroken(request: Request) -> User:
    return broken(request)


@pytest.mark.parametrize("authorize", [abroken, broken])
def test_an_error_of_authorize_reaches_the_host(app: sqlq.App, authorize: Any) -> None:
    with (
        by_asgi(sqlq.web.asgi(app, authorize=authorize)) as browser,
        pytest.raises(RuntimeError, match="away"),
    ):
        browser.get("/")
