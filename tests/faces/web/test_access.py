"""Access to the dashboard and to its actions, and the attacks that other dashboards have met."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from werkzeug.test import Client

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.web import User, wsgi
from sqlq.web.access import LOGINS_A_MINUTE, Logins, digest
from sqlq.web.actions import ACTIONS
from sqlq.web.serve import Server, logins_of, new_token, new_user
from sqlq.web.site import POLICY
from tests.faces.web.visitor import HOST, Visitor, end, failed

PAGES = [
    "/",
    "/jobs",
    "/failures",
    "/queues",
    "/workers",
    "/flows",
    "/schedules",
    "/limits",
    "/database",
    "/api/v1/jobs",
]


@pytest.fixture
def failed_job(app: sqlq.App) -> int:
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    app.enqueue(app.named("send").new(1))
    return end(app, failed())[0]


# -- closed by default ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_refused_when_nobody_is_authorized(app: sqlq.App, page: str) -> None:
    answer = Visitor(app, None).get(page)
    assert answer.status_code in (401, 403)
    assert "queue" not in answer.text


def test_the_dashboard_is_refused_when_it_has_no_authorize(app: sqlq.App) -> None:
    with pytest.raises(TypeError, match="authorize"):
        wsgi(app)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="authorize says who may look and act"):
        wsgi(app, authorize=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_another_address_is_refused_when_nobody_can_log_in(app: sqlq.App, host: str) -> None:
    with pytest.raises(ConfigurationError, match="can be reached from other machines"):
        Server(app, host=host, port=0, logins=Logins(), link=lambda url: None)


# -- roles ---------------------------------------------------------------------------------------------------


def test_a_viewer_sees_no_buttons_and_can_do_nothing(app: sqlq.App, failed_job: int) -> None:
    viewer = Visitor(app, "viewer")
    assert "/act/" not in viewer.page(f"/jobs/{failed_job}") + viewer.page("/queues")
    viewer.page()
    token = viewer.client.get_cookie("sqlq_form")
    assert token is not None
    for verb in ACTIONS:
        form = {"token": token.value, "id": failed_job, "name": "default"}
        answer = viewer.client.post(f"/act/{verb}", data=form, headers={"Origin": HOST})
        assert answer.status_code == 403, verb
    assert app.jobs.get(failed_job).state == "failed"


def test_an_operator_cannot_delete_but_retry(app: sqlq.App, failed_job: int) -> None:
    operator = Visitor(app, "operator")
    assert operator.send("delete", id=failed_job, confirmed="yes").status_code == 403
    assert "Retried 1 job of 1." in operator.done("retry", id=failed_job)


# -- forms of other sites ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": HOST, "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": HOST},
        {"Referer": "http://evil.example/http://localhost"},
    ],
)
def test_a_form_is_refused_when_another_site_sends_it(
    app: sqlq.App, failed_job: int, headers: dict[str, str]
) -> None:
    answer = Visitor(app).send("retry", headers=headers, id=failed_job)
    assert answer.status_code == 403
    assert "nothing was done" in answer.text
    assert app.jobs.get(failed_job).state == "failed"


@pytest.mark.parametrize("token", ["", "guessed", "ä"])
def test_a_form_is_refused_when_its_token_is_wrong(app: sqlq.App, failed_job: int, token: str) -> None:
    answer = Visitor(app).send("retry", id=failed_job, token=token)
    assert answer.status_code == 403
    assert app.jobs.get(failed_job).state == "failed"


def test_a_get_request_changes_nothing(app: sqlq.App, failed_job: int) -> None:
    assert Visitor(app).get(f"/act/retry?id={failed_job}").status_code == 405
    assert app.jobs.get(failed_job).state == "failed"


def test_cookies_are_for_this_site_and_no_script(app: sqlq.App) -> None:
    answer = Visitor(app).get("/", base_url="https://localhost/")
    (cookie,) = answer.headers.getlist("Set-Cookie")
    assert {"Secure", "HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))


@pytest.mark.parametrize(
    "back", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:x", "/\r\nX: y"]
)
def test_the_login_does_not_redirect_to_another_site(app: sqlq.App, failed_job: int, back: str) -> None:
    answer = Visitor(app).send("retry", id=failed_job, back=back)
    assert answer.location == "/"


# -- the answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, "/no/such", "/static/style.css"])
def test_each_answer_has_the_strict_policy(app: sqlq.App, page: str) -> None:
    headers = Visitor(app).get(page).headers
    assert headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("page", PAGES[:-1])
def test_pages_have_no_inline_script_or_style(app: sqlq.App, page: str) -> None:
    text = Visitor(app).page(page)
    assert not re.search(r"<style|style=|<script(?! src=)|\son\w+=|https?://(?!www.w3.org)", text)


@pytest.mark.parametrize("name", ["../site.py", "..%2fsite.py", "nope.css"])
def test_no_other_file_is_served(app: sqlq.App, name: str) -> None:
    assert Visitor(app).get(f"/static/{name}").status_code == 404


def test_another_host_name_is_refused(app: sqlq.App) -> None:
    visitor = Visitor(app, hosts=["localhost"])
    assert visitor.get("/").status_code == 200
    answer = visitor.get("/", base_url="http://rebound.example/")
    assert answer.status_code == 421
    assert "--allow-host" in answer.text


# -- secrets -------------------------------------------------------------------------------------------------

SECRETS = {
    "password": "s3cr3t-1",
    "nested": [{"api_key": "s3cr3t-2"}],
    "Authorization": "s3cr3t-3",
    "plain": "seen",
}


CALLBACK = {"task": "alarm", "args": ["teapot-7"], "token": "s3cr3t-5"}


@pytest.fixture
def secret(app: sqlq.App, engine: Engine) -> list[str]:
    """The pages of a job with secrets, in its callbacks, too, and of a schedule that makes such jobs."""
    new = app.task(name="send")(lambda order, **more: None).new("teapot-7", **SECRETS)
    id = app.enqueue(new.set(headers={"session_token": "s3cr3t-4"})).id
    app.schedules.add("nightly", new, sqlq.Schedule(every="1h"))
    with engine.begin() as conn:
        written = text("UPDATE jobs SET on_success = :callback, on_failure = :callback")
        conn.execute(written, {"callback": json.dumps(CALLBACK)})
    return [f"/jobs/{id}", "/schedules/nightly", f"/api/v1/jobs/{id}", "/api/v1/jobs", "/api/v1/schedules"]


def test_values_of_secret_names_are_never_shown(app: sqlq.App, secret: list[str]) -> None:
    for page in secret:
        said = Visitor(app).page(page)
        assert "seen" in said
        assert "teapot-7" in said
        assert "s3cr3t" not in said, page
    job = Visitor(app).read(secret[2].removeprefix("/api/v1/"))
    assert job["on_success"] == job["on_failure"] == {**CALLBACK, "token": "(hidden)"}


def test_arguments_are_hidden_from_viewers_with_hide_from_viewers(app: sqlq.App, secret: list[str]) -> None:
    for page in secret:
        said = Visitor(app, "viewer", hide_from_viewers=True).page(page)
        assert not re.search("teapot-7|alarm|seen", said), page
        assert "teapot-7" in Visitor(app, "operator", hide_from_viewers=True).page(page)


def test_a_viewer_cannot_search_hidden_arguments(app: sqlq.App) -> None:
    app.task(name="send")(lambda **more: None)
    app.enqueue(app.named("send").new(order=4711))
    for query in ("jobs?text=4711", "jobs?header=tenant", "api/v1/jobs?text=4711"):
        assert Visitor(app, "viewer", hide_from_viewers=True).get(f"/{query}").status_code == 403
        assert Visitor(app, "operator", hide_from_viewers=True).get(f"/{query}").status_code == 200


# -- logging in ----------------------------------------------------------------------------------------------


def served(app: sqlq.App, logins: Logins) -> tuple[Client, list[str]]:
    """A browser without a session, and the login URLs that the terminal has shown."""
    links: list[str] = []
    server = Server(app, host="127.0.0.1", port=0, logins=logins, link=links.append)
    server.close()
    return Client(server.site), links


def test_a_login_url_works_once(app: sqlq.App) -> None:
    browser, links = served(app, Logins())
    assert browser.get("/jobs").location == "/login"
    path = links[0].partition("/login")[2]
    assert browser.get(f"/login{path}").location == "/"
    assert browser.get("/jobs").status_code == 200
    again = Client(browser.application).get(f"/login{path}")
    assert again.status_code == 401
    assert "works once" in again.text
    assert len(links) == 2, "the terminal shows the next one"


def test_logging_out_ends_the_session(app: sqlq.App) -> None:
    browser, links = served(app, Logins())
    browser.get(f"/login{links[0].partition('/login')[2]}")
    page = browser.get("/queues").text
    (token,) = set(re.findall(r'name="token" value="([^"]+)"', page))
    browser.post("/logout", data={"token": token}, headers={"Origin": HOST})
    assert browser.get("/jobs").location == "/login"


def test_frequent_guesses_of_tokens_are_refused(app: sqlq.App) -> None:
    browser, _ = served(app, Logins())
    answers = [browser.get(f"/login?token=guess{i}").status_code for i in range(LOGINS_A_MINUTE + 3)]
    assert answers == [401] * LOGINS_A_MINUTE + [429] * 3


def test_a_user_of_the_file_logs_in_by_password(app: sqlq.App, tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.write_text(new_user("ada", "operator", "right") + "\n")
    browser, links = served(app, logins_of(file))
    assert links == []
    page = browser.get("/login").text
    (token,) = re.findall(r'name="token" value="([^"]+)"', page)

    def log_in(name: str, password: str) -> Any:
        form = {"token": token, "name": name, "password": password}
        return browser.post("/login", data=form, headers={"Origin": HOST})

    assert log_in("ada", "wrong").status_code == log_in("eve", "right").status_code == 401
    assert log_in("ada", "right").location == "/"
    assert "role: operator" in browser.get("/").text


def test_a_token_reads_the_api_alone(app: sqlq.App, tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.write_text(new_token("grafana", "viewer", "t0ken"))
    browser, _ = served(app, logins_of(file))
    told = {"Authorization": "Bearer t0ken"}
    assert browser.get("/api/v1/queues", headers=told).json == {"queues": []}
    assert browser.get("/api/v1/queues").status_code == 401
    assert (
        browser.get("/api/v1/queues", headers={"Authorization": f"Bearer {digest('t0ken')}"}).status_code
        == 401
    )
    assert browser.post("/api/v1/queues", headers=told).status_code == 405


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not toml", "cannot be read"),
        ("", "has to have tables"),
        ('[users.ada]\nrole = "root"\npassword = "scrypt:x"', "the role of ada is 'root'"),
        ('[users.ada]\nrole = "admin"\npassword = "plain"', "ada has no password"),
        ('[tokens.x]\nrole = "viewer"', "x has no sha256"),
        ("[users]\nada = 1", "the role of ada is None"),
    ],
)
def test_a_wrong_users_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "users.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        logins_of(file)


def test_an_error_of_authorize_reaches_the_host(app: sqlq.App) -> None:
    def broken(request: object) -> User:
        raise RuntimeError("the host's session is away")

    with pytest.raises(RuntimeError, match="away"):
        Visitor(app, authorize=broken).get("/")
