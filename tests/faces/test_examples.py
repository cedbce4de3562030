"""The examples by the commands of their READMEs: real servers for HTTP and mail, and a real `sqlq work`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from sqlalchemy import Engine, create_engine, text

import sqlq
from tests.kit import wait_until
from tests.kit.pages import Desk
from tests.kit.postgresql import async_database_url
from tests.kit.preloaded import preloaded
from tests.kit.processes import worker_process
from tests.kit.service import Service

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


class Example:
    """How an example is run, by the commands of its README."""

    def __init__(self, name: str) -> None:
        self.folder, self.is_async = EXAMPLES / name, name == "fastapi"
        written = re.findall(r"^    (\S.*)$", (self.folder / "README.md").read_text(), re.MULTILINE)
        lines = [words for line in written if (words := shlex.split(line, comments=True))]
        lines = [words for words in lines if words[0] not in ("export", "pytest")]
        self.set_up, self.serve, self.work, *orders, _ = lines
        paths = ("/" + words[-1].partition("/")[2] for words in orders)
        self.good, self.declined = zip(paths, (json.loads(words[2]) for words in orders), strict=True)

    def server(self, directory: Path) -> list[str]:
        """Return what starts the server, on a port that is free."""
        program, *arguments = self.serve
        module = {"pserve": "pyramid.scripts.pserve"}.get(program, program)
        if program == "pserve":
            ini = directory / arguments[0]
            ini.write_text(ini.read_text().replace("127.0.0.1:6543", "127.0.0.1:0"))
        else:
            arguments += ["--port", "0"]
        return [sys.executable, "-m", module, *arguments]


RECEIPTS = dict.fromkeys(("pyramid", "sqlmodel"), "1 × Blue teapot: 24.00 €")
RECEIPTS |= {"flask": "1 × Blue teapot, 24.00 €", "fastapi": "sent"}


class Running:
    """An example in a directory of its own, on a database of its own, with its server and its worker."""

    def __init__(self, example: Example, directory: Path, database_url: str, mail_url: str) -> None:
        self.example, self.directory = example, directory / "example"
        shutil.copytree(example.folder, self.directory, ignore=shutil.ignore_patterns("__pycache__"))
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

    def run(self, program: str, *arguments: str) -> str:
        python = ["python"] if program == "python" else ["python", "-m", program]
        done = preloaded().run([*python, *arguments], self.directory, self.environment, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    @contextmanager
    def process(self, name: str, command: list[str]) -> Iterator[None]:
        """Run a process meanwhile; at the end it is interrupted, as by Ctrl-C, and must end well."""
        with (self.directory / f"{name}.log").open("w") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, cwd=self.directory, env=self.environment, **streams)
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


@pytest.mark.parametrize(
    "name",
    ["flask", "fastapi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pyramid", "sqlmodel"))],
)
# its own tables have texts without a length, which MariaDB does not take
@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql"], indirect=True)
def test_an_order_is_made_and_its_job_runs_and_one_that_fails_leaves_none(
    name: str, empty_database_url: str, tmp_path: Path
) -> None:
    example, mails = Example(name), Service(503)
    running = Running(example, tmp_path, empty_database_url, mails.url)
    running.run(*example.set_up)
    with ExitStack() as stack:
        stack.enter_context(mails.serving())
        stack.enter_context(running.serving())
        # the one that fails comes first: its job would run first
        assert running.ask(*example.declined)[0] == 409
        stack.enter_context(running.process("worker", [sys.executable, "-m", *example.work]))
        status, order = running.ask(*example.good)
        assert status == 201
        page = f"/orders/{order['id']}"
        wait_until(lambda: running.ask(page)[1]["receipt"], what="the receipt")
        assert running.ask(page)[1]["receipt"].endswith(RECEIPTS[name])
    engine = create_engine(empty_database_url)
    with engine.connect() as conn:
        assert conn.execute(text("SELECT count(*) FROM orders")).scalar_one() == 1
        ((job, state),) = conn.execute(text("SELECT id, state FROM job_states"))
    engine.dispose()
    assert state == "finished"
    taken = [(headers["idempotency-key"], json.loads(body)) for _, headers, body in mails.requests]
    sent = (f"job-{job}", {"to": "ann@example.org", "subject": f"Your order {order['id']}: Blue teapot"})
    assert taken == ([sent] * 2 if example.is_async else []), "an attempt that fails, and one that does not"


@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_the_tests_of_the_asynchronous_example_pass(empty_database_url: str, tmp_path: Path) -> None:
    running = Running(Example("fastapi"), tmp_path, empty_database_url, mail_url="http://none.invalid")
    for name in [name for name in running.environment if name.startswith("PYTEST_")]:
        del running.environment[name]
    running.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    running.environment["SQLQ_TEST_DATABASE_URL"] = empty_database_url
    plugins = ("-p", "sqlq.testing.fixtures", "-p", "anyio", "-p", "no:cacheprovider")
    assert "4 passed" in running.run("pytest", "-q", *plugins)


def copy(name: str, desk: Desk) -> None:
    """Copy an example into the directory of the test."""
    (desk.directory / "shop.py").unlink()
    shutil.copytree(EXAMPLES / name, desk.directory, dirs_exist_ok=True)


def test_nightly_reports_over_the_nights_on_which_clocks_are_changed(desk: Desk, database_url: str) -> None:
    copy("reports", desk)
    said = desk.run("python reports.py", SQLQ_DATABASE_URL=database_url).splitlines()
    quarters = "    of 96 quarters of an hour that nobody ticked, 1 was caught up"
    assert said.count(quarters) == 6
    assert [line for line in said if line != quarters] == [
        "clocks go forward",
        "Sat 28 March 02:30 CET  report about Fri 27 March",
        "Sun 29 March 03:00 CEST  report about Sat 28 March",
        "Mon 30 March 02:30 CEST  report about Sun 29 March",
        "clocks go back",
        "Sat 24 October 02:30 CEST  report about Fri 23 October",
        "Sun 25 October 02:30 CEST  report about Sat 24 October",
        "Mon 26 October 02:30 CET  report about Sun 25 October",
    ]


# its own tables have texts without a length, which MariaDB does not take
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_an_order_goes_well_and_one_is_repaired(desk: Desk, database_url: str, engine: Engine) -> None:
    copy("orders_flow", desk)
    readme = (EXAMPLES / "orders_flow" / "README.md").read_text()
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)).splitlines()
    said = [desk.run(line, SQLQ_DATABASE_URL=database_url) for line in lines if line]
    _, placed, _, shown, _, again, _, alarms, stopped, _, retried, _, listed = said
    assert "flow 1: 5 steps" in placed
    assert "4 finished, 1 cancelled" in shown
    assert "flow 2: 5 steps" in again
    assert alarms == "order 8 was not paid\n"
    assert "DeclinedError: the card for order 8 was declined" in stopped
    assert re.search(r"sqlq .*retry --flow 2", stopped)
    assert "retried 1 job of flow 2" in retried
    assert "5 finished" in listed
    with engine.connect() as conn:
        orders = conn.execute(text("SELECT id, state FROM orders ORDER BY id")).all()
        assert orders == [(7, "shipped"), (8, "shipped")]
        packed = "SELECT count(*) FROM finished_jobs WHERE task = 'shop.pack' AND attempts = 1"
        assert conn.scalar(text(packed)) == 4
        parcel = "SELECT result FROM finished_jobs WHERE task = 'shop.ship' ORDER BY id LIMIT 1"
        assert conn.scalar(text(parcel)) == '"order 7: box with teapot, box with cup, receipt 7"'


def test_two_workers_together_keep_the_limits_of_a_server(
    desk: Desk,
    database_url: str,
    app: sqlq.App,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy("api_client", desk)
    number, folder = 30, desk.directory
    desk.environment |= {"API_PORT": "0", "SQLQ_DATABASE_URL": database_url}
    with (folder / "server.log").open("w") as log, Path(os.devnull).open("w") as nothing:
        server = preloaded().start(["python", "server.py"], folder, desk.environment, log, nothing)
    try:
        wait_until(lambda: (folder / "server.log").read_text().endswith("\n"), what="the server")
        port = (folder / "server.log").read_text().rsplit(maxsplit=1)[-1]
        monkeypatch.setenv("API_URL", f"http://127.0.0.1:{port}")
        said = desk.run(f"python client.py {number}")
        assert f"{number} requests wait" in said
        workers = [worker_process(folder, "client:app", database_url, "-c", "10") for _ in range(2)]
        with workers[0], workers[1]:
            wait_until(lambda: len(app.jobs.list(state="finished", limit=100)) == number, 120, what="answers")
    finally:
        server.terminate()
        server.wait()
    (known,) = app.limits.list()
    assert known.says == "3 running, 19/1s"
    asked = [line.split() for line in (folder / "asked.txt").read_text().splitlines()]
    assert max(int(row[1]) for row in asked) <= 3, "never more at a time, over both workers"
    moments = [float(row[0]) for row in asked]
    asked_again = sum(row[2] == "503" for row in asked)
    assert len(moments) == number + asked_again
    assert asked_again > 0
    # of starts that are spread evenly a busy machine may bring some together, but it starts none early
    assert moments[-1] - moments[0] >= (len(moments) - 1) / 19 - 1
    assert f"{number} answered, {asked_again} asked again" in desk.run("python server.py --check")


class Mailbox(MessageHandler):
    """Keeps what a mail server is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mails: list[Message] = []

    def handle_message(self, message: Message) -> None:
        self.mails.append(message)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_the_shop_mails_the_receipts_of_committed_orders_once_the_mail_server_is_up(
    desk: Desk, database_url: str, app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk.directory / "shop.py").unlink()
    shutil.copytree(EXAMPLES / "shop", desk.directory / "shop")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = {"SQLQ_DATABASE_URL": database_url, "SHOP_SMTP": f"127.0.0.1:{port}"}
    settings |= {"SHOP_MAIL_ATTEMPTS": "3", "SHOP_MAIL_BACKOFF": "20ms"}
    desk.environment |= settings
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    readme = (EXAMPLES / "shop" / "README.md").read_text()
    lines = re.findall(r"^    (python -m shop .+?|sqlq .+?)(?:  .*)?$", readme, re.MULTILINE)
    set_up, order, declined, work, retry = lines
    assert work == "sqlq --app shop.tasks:app work"
    desk.run(set_up)
    assert "receipt will follow" in desk.run(order)
    refused = desk.end_of(declined)
    assert refused.returncode == 1
    assert "no mail will be sent" in refused.stderr
    mailbox = Mailbox()
    with worker_process(desk.directory, "shop.tasks:app", database_url):
        (job,) = app.jobs.list()
        wait_until(lambda: app.jobs.get(job.id).state == "failed", 30, what="the last attempt")
        failed = app.jobs.get(job.id)
        assert (failed.exception, failed.attempts, len(failed.errors)) == ("ConnectionRefusedError", 3, 2)
        server = Controller(mailbox, hostname="127.0.0.1", port=port)
        server.start()
        try:
            desk.run(retry)
            wait_until(lambda: app.jobs.get(job.id).state == "finished", 30, what="the receipt")
        finally:
            server.stop()
    (receipt,) = mailbox.mails
    assert (receipt["To"], receipt["Subject"]) == ("ann@example.org", "Your order 1: Blue teapot")
    assert receipt["Message-ID"] == f"<job-{job.id}@shop.example.org>"
    assert app.jobs.get(job.id).result == "sent to ann@example.org"
    with engine.connect() as conn:
        assert conn.execute(text("SELECT email FROM orders")).all() == [("ann@example.org",)]
