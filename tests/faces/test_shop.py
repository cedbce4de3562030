"""examples/shop by the commands of its README: real `sqlq work` processes, and a mail server on loopback."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from sqlalchemy import select
from sqlalchemy.orm import Session

import sqlq
from tests.kit import wait_until

pytestmark = [
    pytest.mark.integration,
    # its own tables have texts without a length, which MariaDB does not take
    pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql"], indirect=True),
]

ROOT = Path(__file__).parents[2]


class Mailbox(MessageHandler):
    """Keeps what a mail server is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mails: list[Message] = []

    def handle_message(self, message: Message) -> None:
        self.mails.append(message)

    def receivers(self) -> list[str]:
        return sorted(mail["To"] for mail in self.mails)


class MailServer:
    """A mail server on a port of its own, which may be down."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]

    @contextmanager
    def up(self) -> Iterator[Mailbox]:
        controller = Controller(self.mailbox, hostname="127.0.0.1", port=self.port)
        controller.start()
        try:
            yield self.mailbox
        finally:
            controller.stop()


class Shop:
    """The example, on the test's database: its functions in this process, its commands and workers in
    others."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.models: Any = importlib.import_module("shop.models")
        self.orders: Any = importlib.import_module("shop.orders")
        self.app: sqlq.App = importlib.import_module("shop.tasks").app

    def place(self, email: str, **options: Any) -> int:
        with Session(self.models.engine) as session, session.begin():
            return int(self.orders.place_order(session, email, "Blue teapot", 2400, **options).id)

    def orders_of(self) -> list[str]:
        with Session(self.models.engine) as session:
            return sorted(session.scalars(select(self.models.Order.email)))

    def states(self) -> list[tuple[str, int]]:
        return [(job.state.value, job.attempts) for job in reversed(self.app.jobs.list())]

    def run(self, *command: str, ends_with: int = 0) -> str:
        """Run `python -m …` to its end and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT / "examples",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == ends_with, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[str]]:
        """A `sqlq work` in a process of its own. A signal stops it at the end, and it must end well."""
        process = subprocess.Popen(
            [sys.executable, "-m", "sqlq", "--app", "shop.tasks:app", "work"],
            cwd=ROOT / "examples",
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
            assert process.poll() is None, "the worker has left"
        finally:
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
            print(output)
        assert process.returncode == 0


@pytest.fixture
def mail() -> MailServer:
    return MailServer()


@pytest.fixture
def shop(empty_database_url: str, mail: MailServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("SQLQ_DATABASE_URL", empty_database_url)
    monkeypatch.setenv("SHOP_SMTP", f"127.0.0.1:{mail.port}")
    monkeypatch.setenv("SHOP_MAIL_ATTEMPTS", "3")
    monkeypatch.setenv("SHOP_MAIL_BACKOFF", "20ms")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "examples")]))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    _forget_modules()
    shop = Shop(dict(os.environ))
    shop.run("shop", "setup")
    yield shop
    shop.app.close()
    shop.models.engine.dispose()
    _forget_modules()


def _forget_modules() -> None:
    """The shop's engine is made at import, once for each of the two databases."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def _has(mailbox: Mailbox, *receivers: str) -> Callable[[], bool]:
    return lambda: mailbox.receivers() == sorted(receivers)


def test_order_and_receipt_commit_together(shop: Shop, mail: MailServer) -> None:
    with mail.up() as mailbox, shop.worker():
        number = shop.place("ann@example.org")
        wait_until(_has(mailbox, "ann@example.org"), 30, "Ann's receipt")
        wait_until(lambda: shop.states() == [("finished", 1)], what="the job to be finished")
    (job,) = shop.app.jobs.list()
    (receipt,) = mailbox.mails
    assert receipt["Subject"] == f"Your order {number}: Blue teapot"
    assert receipt["Message-ID"] == f"<job-{job.id}@shop.example.org>"
    assert job.result == "sent to ann@example.org"
    assert shop.orders_of() == ["ann@example.org"]


def test_a_rolled_back_order_sends_nothing(shop: Shop, mail: MailServer) -> None:
    with mail.up() as mailbox, shop.worker():
        with pytest.raises(shop.orders.PaymentDeclinedError):
            shop.place("bob@example.org", card_is_good=False)
        # ids grow in the order of enqueueing: when a later job is done, the worker has looked past where
        # Bob's would be
        shop.place("ann@example.org")
        wait_until(lambda: shop.states() == [("finished", 1)], 30, "Ann's job, and no other, to be finished")
    assert mailbox.receivers() == ["ann@example.org"]
    assert shop.orders_of() == ["ann@example.org"]


def test_a_mail_server_that_is_down_means_retries_then_failed_jobs_and_failed_retry_delivers(
    shop: Shop, mail: MailServer
) -> None:
    with shop.worker():
        shop.place("ann@example.org")
        shop.place("bob@example.org")
        wait_until(lambda: shop.states() == [("failed", 3)] * 2, 30, "both jobs to fail after three attempts")
        for job in shop.app.jobs.list():
            assert (job.exception, job.reason, len(job.errors)) == ("ConnectionRefusedError", "error", 2)
        with mail.up() as mailbox:
            shop.run("sqlq", "--app", "shop.tasks:app", "retry", "--all")
            wait_until(_has(mailbox, "ann@example.org", "bob@example.org"), 30, "both receipts")
            wait_until(lambda: shop.states() == [("finished", 1)] * 2, what="both jobs to be finished")
    assert mailbox.receivers() == ["ann@example.org", "bob@example.org"]


def test_a_mail_server_that_comes_back_in_time_gets_the_next_attempt(shop: Shop, mail: MailServer) -> None:
    shop.environment["SHOP_MAIL_ATTEMPTS"] = "1000"
    shop.run("shop", "order", "ann@example.org", "Blue teapot", "2400")
    with shop.worker():
        wait_until(lambda: shop.states()[0][1] >= 2, 30, "a second attempt")
        with mail.up() as mailbox:
            wait_until(_has(mailbox, "ann@example.org"), 30, "Ann's receipt")
            wait_until(lambda: shop.states()[0][0] == "finished", what="the job to be finished")
    assert shop.states()[0][1] >= 2  # counted when it is claimed, so the second may be the one that arrives


def test_the_commands_of_its_readme(shop: Shop, mail: MailServer) -> None:
    assert "receipt will follow" in shop.run("shop", "order", "ann@example.org", "Blue teapot", "2400")
    assert "no mail will be sent" in shop.run(
        "shop", "order", "bob@example.org", "Red teapot", "2400", "--declined", ends_with=1
    )
    with mail.up() as mailbox:
        shop.run("sqlq", "--app", "shop.tasks:app", "work", "--drain")
    assert mailbox.receivers() == ["ann@example.org"]
    assert shop.orders_of() == ["ann@example.org"]
    readme = (ROOT / "examples" / "shop" / "README.md").read_text()
    for said in (
        "python -m shop setup",
        "python -m shop order ann@example.org",
        "--declined",
        "--app shop.tasks:app work",
        "retry --all",
    ):
        assert said in readme
