"""Access to the dashboard and to its actions, and the attacks that other dashboards have met."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from sqlalchemy import Engine, text
from werkzeug.security import generate_password_hash
from werkzeug.test import Client

import sqlq
from sqlq.admin.verbs import VERBS
from sqlq.errors import ConfigurationError
from sqlq.payload.encryption import new_key
from sqlq.web import User, asgi, pages, wsgi
from sqlq.web.access import ROLES, Role
from sqlq.web.serve import LOGINS_A_MINUTE, Server
from sqlq.web.site import HEADERS, Site
from tests.kit import end, failed, needs
from tests.kit.visitor import HOST, Visitor

ROOT = Path(__file__).parents[3]
PAGES = [
    *("", "jobs", "failures", "queues", "workers", "flows", "schedules", "limits", "database"),
    "api/v1/jobs",
]


@pytest.fixture
def failed_job(app: sqlq.App) -> int:
    app.task(name="send", max_attempts=1)(lambda n=0: None)
    app.enqueue(app.named("send").new(1))
    return end(app, failed())[0]


async def nobody() -> None:
    return None


NOBODIES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "False": lambda: False,
    "True": lambda: True,
    "empty text": lambda: "",
    "name": lambda: "ada",
    "tuple": lambda: ("ada", "admin"),
    "dictionary": lambda: {"name": "ada", "role": "admin"},
    "class": lambda: User,
    "impostor": lambda: SimpleNamespace(name="eve", role="admin", may=lambda role: True),
    "coroutine": nobody,
}
"""Makes each answer of `authorize` that names no user."""


def requests_of(site: Site) -> Iterator[tuple[str, str]]:
    """Yield each method and path of the router, but those for everybody."""
    urls = site._map.bind("localhost")
    for rule in site._map.iter_rules():
        if rule.endpoint == "static":
            continue
        for verb in VERBS if "verb" in rule.arguments else [""]:
            values = dict.fromkeys(rule.arguments, 1) | ({"verb": verb} if verb else {})
            for method in {"GET", "POST"} & set(rule.methods or ()):
                yield method, urls.build(rule.endpoint, values, method=method)


@pytest.mark.parametrize("kind", NOBODIES)
def test_every_request_is_refused_when_authorize_returns_no_user(
    app: sqlq.App, failed_job: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    visitor = Visitor(app, authorize=lambda request: NOBODIES[kind]())
    visitor.client.set_cookie("sqlq_form", "known")
    paths = set()
    for method, path in requests_of(visitor.site):
        form = {"token": "known", "id": failed_job, "name": "default", "confirmed": "yes"}
        sent: dict[str, Any] = {"data": form, "headers": {"Origin": HOST}} if method == "POST" else {}
        answer = visitor.client.open(path, method=method, **sent)
        assert answer.status_code == (401 if path.startswith("/api/") else 403), (method, path)
        assert not re.search(r"send|default|ValueError|<nav", answer.text), (method, path)
        paths.add(path)
    assert len(paths) == len(pages.PAGES) + len(pages.API) + len(VERBS)
    assert app.jobs.get(failed_job).state == "failed"
    lines = [each.getMessage() for each in caplog.records if each.name == "sqlq.web"]
    assert bool(lines) == (kind != "None"), "with the mend"
    assert all("return sqlq.web.User(name, role), or None for nobody" in line for line in lines)


@pytest.mark.parametrize("given", [("x", "root"), ("", "admin"), (None, "viewer"), ("x", None), (b"x",)])
def test_a_user_is_refused_when_it_has_no_name_or_role(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="give a name, and one of the roles viewer, operator, admin"):
        User(*given)


@pytest.mark.parametrize("mount", [wsgi, asgi])
def test_the_dashboard_is_refused_when_it_has_no_authorize(app: sqlq.App, mount: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="authorize"):
        mount(app)
    with pytest.raises(ConfigurationError, match="authorize says who may look and act"):
        mount(app, authorize=None)


def test_silent_connections_do_not_hold_up_the_dashboard(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.web.serve.SILENT_SECONDS", 2)
    server = Server(app, host="127.0.0.1", port=0, link=lambda url: None)
    thread = threading.Thread(target=server.server.run, daemon=True)
    thread.start()
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1].rstrip("/")))
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(120)]
        for each in silent:
            each.sendall(b"GET / HT")
        assert httpx.get(f"{server.url}jobs", timeout=20).status_code == 403
        silent[0].settimeout(20)
        assert silent[0].recv(1) == b"", "it is closed"
    # in the thread of the loop, which would else read descriptors that are closed by now, or another's
    server.server.trigger.pull_trigger(server.server.close)
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_another_address_is_refused_when_nobody_can_log_in(app: sqlq.App, host: str) -> None:
    with pytest.raises(ConfigurationError, match="can be reached from other machines"):
        Server(app, host=host, port=0, link=lambda url: None)


def test_a_viewer_sees_no_buttons(app: sqlq.App, failed_job: int) -> None:
    viewer = Visitor(app, "viewer")
    assert "/act/" not in viewer.page(f"/jobs/{failed_job}") + viewer.page("/queues")


def sent(visitor: Visitor, id: int, verb: str) -> int:
    """Send the form of a verb, and return the status of the answer."""
    visitor.client.set_cookie("sqlq_form", "known")
    form = {"token": "known", "id": id, "name": "default"}
    return visitor.client.post(f"/act/{verb}", data=form, headers={"Origin": HOST}).status_code


def may_send(role: Role) -> Callable[[Visitor, int], bool]:
    """Return whether a visitor may send all forms for this role; none of them, or all."""
    verbs = [verb for verb, action in VERBS.items() if action.role == role]
    return lambda visitor, id: one_of(sent(visitor, id, verb) != 403 for verb in verbs)


def may_read(*paths: str) -> Callable[[Visitor, int], bool]:
    """Return whether a visitor may read these pages; none of them, or all."""
    return lambda visitor, id: one_of(visitor.get(path).status_code == 200 for path in paths)


def one_of(answers: Iterable[bool]) -> bool:
    (answer,) = {*answers}
    return answer


OF_OPERATORS = (
    "retry, cancel, reschedule, replay, skip a step, pause and resume, close and open a limit, "
    "run a schedule now"
)
CAN: dict[str, Callable[[Visitor, int], bool]] = {
    "see pages, and read the JSON API": may_read("/", "/jobs", "/api/v1/jobs", "/api/v1/audit"),
    "see what `--hide-from-viewers` hides, or search in it": lambda visitor, id: (
        may_read("/jobs?text=args", "/jobs?header=tenant", "/api/v1/jobs?text=args")(visitor, id)
        and "(hidden)" not in visitor.page(f"/jobs/{id}")
    ),
    OF_OPERATORS: may_send("operator"),
    "delete, stop and restart workers, remove schedules, set limits": may_send("admin"),
    "enqueue a job of their own choice": lambda visitor, id: sent(visitor, id, "enqueue") < 400,
}
"""Each row of the page's table as what a visitor does."""


def cells() -> list[tuple[str, str, bool]]:
    """Return the cells of the page's table: what is done, by whom, and whether they can."""
    page = (ROOT / "docs" / "dashboard.md").read_text()
    table = page[page.index("| who is … can |") :].partition("\n\n")[0]
    header, _, *rows = ([word.strip() for word in row.strip("|").split("|")] for row in table.splitlines())
    cells = ((what, *cell) for what, *says in rows for cell in zip(header[1:], says, strict=True))
    return [(what, who, {"yes": True, "no": False}[said]) for what, who, said in cells]


def test_each_row_of_the_table_is_tried() -> None:
    assert {what for what, _, _ in cells()} == CAN.keys()
    assert [who for _, who, _ in cells()][:4] == ["nobody", *ROLES]


@pytest.mark.parametrize("who", ["nobody", "viewer", "operator", "admin"])
def test_a_visitor_can_do_what_the_table_allows(app: sqlq.App, failed_job: int, who: Any) -> None:
    for what, of, may in cells():
        if of == who:
            visitor = Visitor(app, None if who == "nobody" else who, hide_from_viewers=True)
            assert CAN[what](visitor, failed_job) is may, what


OF_OTHERS: list[dict[str, str]] = [
    {},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": HOST, "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": HOST},
    {"Referer": "http://evil.example/http://localhost"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Referer": f"{HOST}/jobs"},
    {"Sec-Fetch-Site": "none", "Origin": "http://evil.example"},
    {"Sec-Fetch-Site": "same-origin, cross-site", "Origin": HOST},
    {"Sec-Fetch-Site": "", "Origin": HOST},
    {"Origin": f"{HOST}:8443"},
    {"Origin": HOST, "Host": "jobs.example.com"},
    {"Origin": "http://evil.example", "Referer": f"{HOST}/jobs"},
]
BEHIND_A_PROXY = {"Origin": "https://jobs.example.com:8443", "Host": "jobs.example.com"}
"""One that cuts the port off the host."""
OF_THIS_SITE: list[dict[str, str]] = [
    *({"Origin": HOST}, {"Referer": f"{HOST}/jobs"}, {"Sec-Fetch-Site": "none"}),
    *({"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "same-origin", **BEHIND_A_PROXY}),
]


@pytest.mark.parametrize("headers", [*OF_OTHERS, *OF_THIS_SITE])
def test_a_form_is_refused_when_another_site_sends_it(
    app: sqlq.App, failed_job: int, headers: dict[str, str]
) -> None:
    visitor = Visitor(app)
    for host in ("localhost", "jobs.example.com"):
        visitor.client.set_cookie("sqlq_form", "a-token", domain=host)
    answer = visitor.send("retry", headers=headers, id=failed_job)
    assert answer.status_code == (303 if headers in OF_THIS_SITE else 403), answer.text
    assert ("nothing was done" in answer.text) is (headers in OF_OTHERS)
    assert app.jobs.get(failed_job).state == ("available" if headers in OF_THIS_SITE else "failed")


@pytest.mark.parametrize("token", ["", "guessed", "ä"])
def test_a_form_is_refused_when_its_token_is_wrong(app: sqlq.App, failed_job: int, token: str) -> None:
    assert Visitor(app).get(f"/act/retry?id={failed_job}").status_code == 405
    answer = Visitor(app).send("retry", id=failed_job, token=token)
    assert answer.status_code == 403
    assert app.jobs.get(failed_job).state == "failed"


@pytest.mark.parametrize(
    "back", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:x", "/\r\nX: y"]
)
def test_a_form_does_not_redirect_to_another_site(app: sqlq.App, failed_job: int, back: str) -> None:
    answer = Visitor(app).send("retry", id=failed_job, back=back)
    assert answer.location == "/"


def test_answers_have_the_strict_policy_no_inline_script_or_style_and_strict_cookies(app: sqlq.App) -> None:
    (cookie,) = Visitor(app).get("/", base_url="https://localhost/").headers.getlist("Set-Cookie")
    assert {"Secure", "HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    for name in ("../site.py", "..%2fsite.py", "nope.css"):
        assert Visitor(app).get(f"/static/{name}").status_code == 404
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    for path in (*PAGES, "no/such", "static/style.css"):
        answer = Visitor(app).get(f"/{path}")
        assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"], path
        assert answer.headers["X-Frame-Options"] == "DENY", path
        assert answer.headers["X-Content-Type-Options"] == "nosniff", path
        if answer.mimetype == "text/html":
            inline = r"<style|style=|<script(?! src=)|\son\w+=|https?://(?!www.w3.org)"
            assert not re.search(inline, answer.text), path


def test_another_host_name_is_refused(app: sqlq.App) -> None:
    visitor = Visitor(app, hosts=["localhost"])
    assert visitor.get("/").status_code == 200
    answer = visitor.get("/", base_url="http://rebound.example/")
    assert answer.status_code == 421
    assert "--allow-host" in answer.text


SECRETS = {"password": "s3cr3t-1", "nested": [{"api_key": "s3cr3t-2"}], "Authorization": "s3cr3t-3"}
CALLBACK = {"task": "alarm", "args": ["teapot-7"], "token": "s3cr3t-5"}


def test_values_of_secret_names_are_never_shown_and_arguments_can_be_hidden_from_viewers(
    app: sqlq.App, engine: Engine
) -> None:
    new = app.task(name="send")(lambda order, **more: None).new("teapot-7", plain="seen", **SECRETS)
    id = app.enqueue(new.set(headers={"session_token": "s3cr3t-4"})).id
    app.schedules.add("nightly", new, sqlq.Schedule(every="1h"))
    with engine.begin() as conn:
        written = text("UPDATE jobs SET on_success = :callback, on_failure = :callback")
        conn.execute(written, {"callback": json.dumps(CALLBACK)})
    api = [f"/api/v1/{path}" for path in (f"jobs/{id}", "jobs", "schedules")]
    for page in (f"/jobs/{id}", "/schedules/nightly", *api):
        said = Visitor(app).page(page)
        assert ("seen" in said) is (page != "/api/v1/jobs")  # a list has no arguments
        assert "teapot-7" in said
        assert "s3cr3t" not in said, page
        hidden = Visitor(app, "viewer", hide_from_viewers=True).page(page)
        assert not re.search("teapot-7|alarm|seen", hidden), page
        assert "teapot-7" in Visitor(app, "operator", hide_from_viewers=True).page(page)
    job = Visitor(app).read(f"jobs/{id}")
    assert job["on_success"] == job["on_failure"] == {**CALLBACK, "token": "(hidden)"}


def ids_found(app: sqlq.App, **query: Any) -> list[set[int]]:
    """The jobs that a search finds: on the page, in the API, and as those that its buttons act on."""
    visitor, address = Visitor(app), urlencode(query)
    page = visitor.page(f"/jobs?{address}")
    assert "Only the newest" not in page
    assert "Older" not in page
    answer = visitor.get(f"/api/v1/jobs?{address}")
    assert "Sqlq-Complete" not in answer.headers
    asked = visitor.send("cancel", matching="yes", **query)
    named = re.search(r"sqlq .*?cancel ([\d ]+)", asked.text)
    return [
        {int(id) for id in re.findall(r'name="id" value="(\d+)"', page)},
        {job["id"] for job in answer.json or ()},
        set(map(int, named[1].split())) if named else set(),
    ]


HIDDEN = {"password": "Zebra-7", "order": 4711}


@pytest.mark.parametrize("written", ["by sqlq", "compactly", "signed", "signed with a lost key"])
def test_no_search_finds_a_job_by_what_is_hidden_of_it(app: sqlq.App, engine: Engine, written: str) -> None:
    """Sixty jobs have the secrets, so that a full page or its pager would reveal them as well."""
    keys = [new_key()] if written.startswith("signed") else None
    producer = sqlq.App(app.url, keys=keys)
    producer.use(engine=engine)
    send = producer.task(name="send")(lambda **more: None)
    animal = send.new(animal="Zebra-7").set(headers={"tenant": "Quagga-9"})
    shown = producer.enqueue(animal).id
    hidden = send.new(**HIDDEN).set(headers={"tenant": "t1", "api_key": "Quagga-9"})
    ids = {job.id for job in producer.enqueue_many([hidden] * 60)}
    if written == "compactly":
        compact = json.dumps({"args": [], "kwargs": HIDDEN}, separators=(",", ":"))
        with engine.begin() as conn:
            update = text(f"UPDATE jobs SET payload = :text WHERE id <> {shown}")
            conn.execute(update, {"text": compact})
    reader = app if "lost" in written else producer
    for query in ({"text": "Zebra"}, {"text": '"Zebra-7"'}, {"header": "tenant=Quagga"}):
        readable = "lost" not in written or "header" in query
        assert ids_found(reader, **query) == [{shown} if readable else set()] * 3, query
    for query in ({"text": 'word": "Z'}, {"text": 'word":"Z'}, {"header": "api_key=Quagga"}):
        assert ids_found(reader, **query) == [set()] * 3, query
    api = {job["id"] for job in Visitor(reader).read("jobs?text=4711")}
    assert api == (set() if "lost" in written else ids), "what is shown is found beside what is hidden"
    assert {job["id"] for job in Visitor(reader).read("jobs?header=api_key")} == ids


def served(app: sqlq.App, users: Path | None = None) -> tuple[Client, list[str]]:
    """A browser that nobody knows, and the URLs that the terminal has shown."""
    links: list[str] = []
    server = Server(app, host="127.0.0.1", port=0, users=users, link=links.append)
    server.server.close()
    return Client(server.site), links


def test_a_login_url_works_once(app: sqlq.App) -> None:
    browser, links = served(app)
    assert browser.get("/jobs").status_code == 403
    query = links[0].partition("/?")[2]
    assert browser.get(f"/?{query}").location == "/"
    assert browser.get("/jobs").status_code == browser.get("/api/v1/jobs").status_code == 200
    again = Client(browser.application).get(f"/?{query}")
    assert again.status_code == 403
    assert "it works once" in again.text
    assert len(links) == 2, "the terminal shows the next one"


@needs("cheap")
def test_health_needs_no_login_and_names_no_more_than_the_database(
    app: sqlq.App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.config.listen.HEALTH_SECONDS", 0.0)
    server = Server(app, host="127.0.0.1", port=0, link=lambda _: None)
    server.server.close()
    probe = Client(server.server.application)
    # as a probe of Kubernetes names it
    at: Any = {"base_url": "http://10.0.0.7:8787", "environ_base": {"REMOTE_ADDR": "10.0.0.1"}}
    assert probe.get("/", **at).status_code == 421
    well = probe.get("/healthz", **at)
    assert (well.status_code, well.text) == (200, "ok")
    file = Path(str(app.database.engine.url.database))
    file.rename(tmp_path / "away")
    away = probe.get("/healthz", **at)
    assert (away.status_code, away.text) == (503, "database")
    (tmp_path / "away").rename(file)
    assert probe.get("/healthz", **at).status_code == 200


@pytest.fixture
def users(tmp_path: Path) -> Path:
    file = tmp_path / "users"
    file.write_text(f"ada:operator:{generate_password_hash('right', 'pbkdf2:sha256:1000')}\n")
    return file


def test_a_user_of_the_file_is_known_by_password(app: sqlq.App, users: Path) -> None:
    browser, links = served(app, users)
    assert links == []
    nobody = browser.get("/")
    assert nobody.status_code == browser.get("/api/v1/queues").status_code == 401
    assert nobody.headers["WWW-Authenticate"].startswith("Basic realm=")
    assert nobody.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
    wrong = [("ada", "wrong"), ("eve", "right"), ("ada", ""), ("", "right")]
    assert {browser.get("/", auth=each).status_code for each in wrong} == {401}
    for header in ("Bearer right", "Basic", "Basic !", "Basic YWRh", f"Basic {users.read_text()}".strip()):
        assert browser.get("/", headers={"Authorization": header}).status_code == 401
    assert "role: operator" in browser.get("/", auth=("ada", "right")).text
    assert browser.get("/api/v1/queues", auth=("ada", "right")).json == []


def test_the_users_are_read_anew_when_the_file_changes(
    app: sqlq.App, users: Path, caplog: pytest.LogCaptureFixture
) -> None:
    browser, _ = served(app, users)

    def status(password: str) -> int:
        return browser.get("/", auth=("ada", password)).status_code

    assert status("right") == 200
    users.write_text(f"ada:viewer:{generate_password_hash('better')}\n")
    assert (status("right"), status("better")) == (401, 200)
    assert "role: viewer" in browser.get("/", auth=("ada", "better")).text
    users.write_text("ada:admin:plain\n")
    assert status("better") == status("plain") == 503
    assert "is not name:role:hash" in caplog.text
    users.unlink()
    assert status("better") == 503


def test_frequent_guesses_of_passwords_are_refused(app: sqlq.App, users: Path) -> None:
    browser, _ = served(app, users)
    assert browser.get("/", auth=("ada", "right")).status_code == 200
    answers = [browser.get("/", auth=("ada", f"guess{i}")).status_code for i in range(LOGINS_A_MINUTE + 3)]
    assert answers == [401] * LOGINS_A_MINUTE + [429] * 3
    assert browser.get("/", auth=("ada", "right")).status_code == 200, "who is known already may go on"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("ada", "the line of 'ada' is not name:role:hash"),
        ("ada:root:scrypt:x$y$z", "the line of 'ada' is not name:role:hash"),
        ("ada:admin:plain", "a hash of werkzeug.security.generate_password_hash"),
        (":admin:scrypt:x$y$z", "the line of '' is not"),
    ],
)
def test_a_wrong_users_file_is_refused(app: sqlq.App, tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "users"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        Server(app, host="0.0.0.0", port=0, users=file, link=lambda url: None)
