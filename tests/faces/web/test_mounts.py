"""The dashboard in applications of other frameworks, under their prefixes and their own logins."""

from __future__ import annotations

import asyncio
import html
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from werkzeug import Request

import sqlq
import sqlq.web
from sqlq.errors import ConfigurationError
from sqlq.web import User
from tests.faces.web.mounts import (
    ASGI,
    HOSTS,
    Make,
    by_asgi,
    by_wsgi,
    of_the_session,
    on_fastapi,
    on_starlette,
)
from tests.kit import end, failed
from tests.kit.visitor import HOST

# -- hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def failed_job(app: sqlq.App) -> int:
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    app.enqueue(app.named("send").new(1))
    return end(app, failed())[0]


@pytest.fixture
def prefix() -> str:
    """A part of two names; other tests below mount at /sqlq."""
    return "/ops/sqlq"


@pytest.fixture(params=HOSTS, ids=lambda make: make.__name__)
def browser(request: pytest.FixtureRequest, app: sqlq.App, prefix: str) -> Iterator[httpx.Client]:
    make: Make = request.param
    host = make(app, prefix)
    with by_asgi(host) if make in ASGI else by_wsgi(host) as browser:
        yield browser


# -- what holds in each --------------------------------------------------------------------------------------


def links(address: str, answer: httpx.Response) -> list[str]:
    found = re.findall(r'(?:href|src|action|formaction)="([^"#]+)"', answer.text)
    return [urljoin(address, html.unescape(link)) for link in found]


def check_that_all_stays_under(prefix: str, browser: httpx.Client, job: int) -> None:
    """Look at each page, and send a form."""
    asked, seen = [f"{prefix}/"], set()
    while asked:
        address = asked.pop()
        answer = browser.get(address)
        assert answer.status_code == 200, (address, answer.text)
        assert "sqlq_message" not in answer.headers.get("set-cookie", "") or "Max-Age=0" in str(
            answer.headers
        )
        for cookie in answer.headers.get_list("set-cookie"):
            assert cookie.startswith("session=") or f"Path={prefix}/" in cookie, cookie
        for link in links(address, answer):
            assert link.startswith(f"{prefix}/"), (address, link)
            if "/act/" not in link and "?" not in link and link not in seen:
                seen.add(link)
                asked.append(link)
    assert {f"{prefix}/static/style.css", f"{prefix}/jobs/{job}", f"{prefix}/schedules"} <= seen


def retry(prefix: str, browser: httpx.Client, job: int) -> httpx.Response:
    page = browser.get(f"{prefix}/jobs/{job}?from=here").text
    form = re.search(rf'action="({prefix}/act/retry)">(.*?)</form>', page, re.DOTALL)
    assert form is not None
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[2]))
    assert fields["back"] == f"{prefix}/jobs/{job}?from=here"
    return browser.post(form[1], data=fields, headers={"Origin": HOST, "Sec-Fetch-Site": "same-origin"})


def test_every_url_stays_under_the_prefix_of_a_mount(
    app: sqlq.App, prefix: str, browser: httpx.Client, failed_job: int
) -> None:
    assert browser.get(f"{prefix}/").status_code == 403, "the host says that nobody is logged in"
    assert "welcome" in browser.get("/login/ada").text
    assert browser.get("/nowhere").status_code == 404, "the host's own"
    check_that_all_stays_under(prefix, browser, failed_job)
    answer = browser.get(prefix)
    assert answer.status_code in (301, 307, 308)
    assert answer.headers["location"].removeprefix(HOST) == f"{prefix}/"
    answer = retry(prefix, browser, failed_job)
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"].removeprefix(HOST) == f"{prefix}/jobs/{failed_job}?from=here"
    assert "retried 1 job" in browser.get(answer.headers["location"]).text
    assert app.jobs.get(failed_job).state == "available"


@pytest.mark.parametrize("forwards", [True, False])
def test_every_url_stays_under_the_root_path_of_fastapi(
    app: sqlq.App, failed_job: int, forwards: bool
) -> None:
    """A proxy answers for /shop, and forwards that part of the path or not."""
    given = "/shop" if forwards else ""
    with by_asgi(on_fastapi(app, "/sqlq"), root_path="/shop") as browser:
        browser.get(f"{given}/login/ada")
        page = browser.get(f"{given}/sqlq/jobs/{failed_job}")
        assert page.status_code == 200, page.text
        assert {link[:11] for link in links("/", page)} == {"/shop/sqlq/"}
        assert "Path=/shop/sqlq/" in page.headers["set-cookie"]


class AsyncCallable:
    async def __call__(self, request: Request) -> User | None:
        return await of_the_session_awaited(request)


async def of_the_session_awaited(request: Request) -> User | None:
    await asyncio.sleep(0)  # on the loop of the host
    return of_the_session(request)


@pytest.mark.parametrize(
    "authorize", [of_the_session_awaited, AsyncCallable(), partial(AsyncCallable().__call__)]
)
def test_an_async_authorize_is_awaited_when_the_mount_is_asynchronous(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, failed_job: int, authorize: Any
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "of_the_session", authorize)
    host = on_starlette(app, "/sqlq")
    monkeypatch.undo()
    with by_asgi(host) as browser:
        for path in ("/sqlq/", "/sqlq/jobs", "/sqlq/api/v1/jobs", "/sqlq/api/v1/audit"):
            assert browser.get(path).status_code == (401 if "/api/" in path else 403)
        browser.get("/login/ada")
        assert retry("/sqlq", browser, failed_job).status_code == 303
    assert app.jobs.get(failed_job).state == "available"


def test_an_error_of_an_async_authorize_reaches_the_host(app: sqlq.App) -> None:
    async def broken(request: Request) -> User:
        raise RuntimeError("the host's session is away")

    with (
        by_asgi(sqlq.web.asgi(app, authorize=broken)) as browser,
        pytest.raises(RuntimeError, match="away"),
    ):
        browser.get("/")


def test_an_asynchronous_mount_is_refused_when_it_has_no_authorize(app: sqlq.App) -> None:
    with pytest.raises(ConfigurationError, match="authorize says who may look and act"):
        sqlq.web.asgi(app, authorize=None)  # type: ignore[arg-type]
