"""The examples for frameworks by the commands of their READMEs: a real HTTP server and a real `sqlq work`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from sqlalchemy import create_engine, text

from tests.kit import wait_until
from tests.kit.postgresql import async_database_url

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Example:
    """How an example is run; each command stands in its README."""

    folder: str
    app: str
    set_up: tuple[str, ...]
    serve: str
    good: tuple[str, dict[str, Any]]
    declined: tuple[str, dict[str, Any]]
    receipt: str
    is_async: bool = False

    def server(self, directory: Path) -> list[str]:
        """Return what starts the server, on a port that is free."""
        program, *arguments = shlex.split(self.serve)
        module = {"pserve": "pyramid.scripts.pserve"}.get(program, program)
        if program == "pserve":
            ini = directory / arguments[0]
            ini.write_text(ini.read_text().replace("127.0.0.1:6543", "127.0.0.1:0"))
        else:
            arguments += ["--port", "0"]
        return [sys.executable, "-m", module, *arguments]


TEAPOT = {"item": "Blue teapot", "cents": 2400}
RED = {"item": "Red teapot", "cents": 2400}
FLASK = Example(
    "flask",
    "worker:queue",
    ("flask init-db",),
    "flask run",
    ("/orders", TEAPOT),
    ("/orders", RED | {"card": "declined"}),
    "1 × Blue teapot, 24.00 €",
)
FASTAPI = Example(
    "fastapi",
    "shop:queue",
    ("sqlq -a shop:queue migrate",),
    "uvicorn shop:web",
    ("/orders", {"email": "ann@example.org", "item": "Blue teapot"}),
    ("/orders", {"email": "bob@example.org", "item": "Red teapot", "card": "declined"}),
    "sent",
    is_async=True,
)
PYRAMID = Example(
    "pyramid",
    "worker:queue",
    ("python initialize_db.py",),
    "pserve development.ini",
    ("/orders", TEAPOT),
    ("/orders", RED | {"card": "declined"}),
    "1 × Blue teapot: 24.00 €",
)
SQLMODEL = Example(
    "sqlmodel",
    "shop:queue",
    ("sqlq -a shop:queue migrate",),
    "uvicorn shop:web",
    ("/orders", TEAPOT),
    ("/orders?card=declined", RED),
    "1 × Blue teapot: 24.00 €",
)


Taken: TypeAlias = "list[tuple[str | None, Any]]"
"""The idempotency keys and mails that a mail service received."""
MailService: TypeAlias = "tuple[str, Taken]"
"""Its address, and what it was sent."""


class Mails(BaseHTTPRequestHandler):
    """A mail service: it takes what it is sent, the first time with an error of its own."""

    taken: Taken

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.taken.append((self.headers["Idempotency-Key"], sent))
        self.send_response(503 if len(self.taken) == 1 else 202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Running:
    """An example in a directory of its own, on a database of its own, with its server and its worker."""

    def __init__(self, example: Example, directory: Path, database_url: str, mail_url: str) -> None:
        self.example = example
        self.directory = directory
        self.url = ""
        """Where the server is."""
        self.environment = os.environ | {
            "DATABASE_URL": async_database_url(database_url) if example.is_async else database_url,
            "FLASK_APP": "shop",
            "MAIL_URL": mail_url,
            "PYTHONPATH": os.pathsep.join([str(ROOT), "."]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",  # what Pyramid imports is deprecated
        }

    def run(self, command: str) -> str:
        program, *arguments = shlex.split(command)
        python = [sys.executable] if program == "python" else [sys.executable, "-m", program]
        done = subprocess.run(
            [*python, *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    @contextmanager
    def process(self, name: str, command: list[str]) -> Iterator[None]:
        """Run a process meanwhile; at the end it is interrupted, as by Ctrl-C, and must end well."""
        with (self.directory / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        try:
            yield
            assert process.poll() is None, self.log(name)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            print(self.log(name))

    @contextmanager
    def serving(self) -> Iterator[None]:
        def port() -> str | None:
            found = re.search(r"http://127\.0\.0\.1:([1-9]\d*)", self.log("server"))
            return found and found[1]

        with self.process("server", self.example.server(self.directory)):
            self.url = f"http://127.0.0.1:{wait_until(port, what='the address of the server')}"
            yield

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request to the server, and return the status and the JSON of its answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None


@pytest.fixture
def mails() -> Iterator[MailService]:
    taken: Taken = []
    handler = type("Handler", (Mails,), {"taken": taken})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()


@pytest.mark.parametrize(
    "example",
    [FLASK, FASTAPI, *(pytest.param(example, marks=pytest.mark.slow) for example in (PYRAMID, SQLMODEL))],
    ids=lambda example: example.folder,
)
# its own tables have texts without a length, which MariaDB does not take
@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql"], indirect=True)
def test_an_order_is_made_and_its_job_runs_and_one_that_fails_leaves_none(
    example: Example,
    empty_database_url: str,
    tmp_path: Path,
    mails: MailService,
) -> None:
    directory = tmp_path / "example"
    shutil.copytree(EXAMPLES / example.folder, directory, ignore=shutil.ignore_patterns("__pycache__"))
    mail_url, taken = mails
    running = Running(example, directory, empty_database_url, mail_url)
    for command in example.set_up:
        running.run(command)
    with ExitStack() as stack:
        stack.enter_context(running.serving())
        # the one that fails comes first: its job would run first
        assert running.ask(*example.declined)[0] == 409
        stack.enter_context(
            running.process("worker", [sys.executable, "-m", "sqlq", "-a", example.app, "work"])
        )
        status, order = running.ask(*example.good)
        assert status == 201
        page = f"/orders/{order['id']}"
        wait_until(lambda: running.ask(page)[1]["receipt"], what="the receipt")
        assert running.ask(page)[1]["receipt"].endswith(example.receipt)
    engine = create_engine(empty_database_url)
    with engine.connect() as conn:
        assert conn.execute(text("SELECT count(*) FROM orders")).scalar_one() == 1
        ((job, state),) = conn.execute(text("SELECT id, state FROM job_states"))
    engine.dispose()
    assert state == "finished"
    sent = (f"job-{job}", {"to": "ann@example.org", "subject": f"Your order {order['id']}: Blue teapot"})
    assert taken == ([sent] * 2 if example is FASTAPI else []), "an attempt that fails, and one that does not"


@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_the_tests_of_the_asynchronous_example_pass(empty_database_url: str, tmp_path: Path) -> None:
    """With drivers of each database that refuse the connections of another event loop."""
    directory = tmp_path / "example"
    shutil.copytree(EXAMPLES / "fastapi", directory, ignore=shutil.ignore_patterns("__pycache__"))
    running = Running(FASTAPI, directory, empty_database_url, mail_url="http://none.invalid")
    for name in [name for name in running.environment if name.startswith("PYTEST_")]:
        del running.environment[name]
    running.environment |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "SQLQ_TEST_DATABASE_URL": empty_database_url,
    }
    passed = running.run("pytest -q -p sqlq.testing.fixtures -p anyio -p no:cacheprovider")
    assert "4 passed" in passed


@pytest.mark.parametrize("example", [FLASK, FASTAPI, PYRAMID, SQLMODEL], ids=lambda example: example.folder)
def test_the_readme_of_an_example_has_the_tested_commands(example: Example) -> None:
    readme = (EXAMPLES / example.folder / "README.md").read_text()
    for command in (*example.set_up, example.serve, f"sqlq -a {example.app} work"):
        assert f"    {command}" in readme
    for path, body in (example.good, example.declined):
        assert f"'{json.dumps(body)}'" in readme
        assert path in readme


def test_nightly_reports_over_the_nights_on_which_clocks_are_changed(database_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "reports.py"],
        cwd=EXAMPLES / "reports",
        env={**os.environ, "SQLQ_DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    quarters = "    of 96 quarters of an hour that nobody ticked, 1 was caught up"
    assert done.stdout.splitlines() == [
        "clocks go forward",
        "Sat 28 March 02:30 CET  report about Fri 27 March",
        quarters,
        "Sun 29 March 03:00 CEST  report about Sat 28 March",
        quarters,
        "Mon 30 March 02:30 CEST  report about Sun 29 March",
        quarters,
        "clocks go back",
        "Sat 24 October 02:30 CEST  report about Fri 23 October",
        quarters,
        "Sun 25 October 02:30 CEST  report about Sat 24 October",
        quarters,
        "Mon 26 October 02:30 CET  report about Sun 25 October",
        quarters,
    ]
