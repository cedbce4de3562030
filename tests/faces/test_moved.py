"""The applications of the pages "Coming from …": sqlq's side, and the peer's own where it needs no server."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.environments import Environments, variables
from tests.kit.pages import Desk, block

MOVED = {
    # the code before, the code after, how it is called, and what its jobs print
    "celery.py": ("from_celery.py", "[1, 2]", ["how was order 1?", "shipped with receipt 1, receipt 2"]),
    "rq.py": ("from_rq.py", "[7]", ["how was order 7?", "receipt of order 7"]),
    "dramatiq.py": ("from_huey.py", "", ["exported 2030-05", "it costs 600"]),
    "huey.py": ("from_huey.py", "", ["exported 2030-05", "it costs 600"]),
    "laravel.php": ("from_laravel.py", "7", ["receipt of order 7"]),
    "sidekiq.rb": ("from_laravel.py", "7", ["receipt of order 7"]),
}
QUEUE_OF_DJANGO = "SECRET_KEY = 'x'\nQ_CLUSTER = {'orm': 'default', 'sync': True}\n"
DJANGO = ("from_django_q.py", "[7]", ["receipt of order 7", "sent"])


def tasks_of(source: str, *, all_functions: bool = False) -> set[str]:
    """Return the names of the functions that have decorators, or of the job classes of another language."""
    if found := re.findall(r"^class (\w+)", source, re.MULTILINE):
        return {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in found}
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {each.name for each in functions if each.decorator_list or all_functions} - {"place"}


@pytest.mark.parametrize("before", MOVED)
def test_an_application_that_moved(desk: Desk, before: str) -> None:
    after, arguments, printed = MOVED[before]
    source = block("moved", after)
    assert tasks_of(block("peer", before), all_functions=before == "rq.py") == tasks_of(source)
    (desk.directory / "shop.py").write_text(source)
    desk.run("sqlq migrate -a shop:app")
    desk.run(f"python -c 'import shop; shop.place({arguments})'")
    if "delay=" in source:
        desk.run("sqlq reschedule --queue default -a shop:app")  # now, for a test
    assert sorted(desk.run("sqlq work -a shop:app --drain").splitlines()) == printed


def test_a_django_application_that_moved(desk: Desk) -> None:
    after, arguments, printed = DJANGO
    source = block("moved", after)
    assert tasks_of(block("peer", "django_q.py"), all_functions=True) == tasks_of(source)
    write_django(desk.directory, source, "'sqlq.django'")
    desk.environment["DJANGO_SETTINGS_MODULE"] = "settings_of_shop"
    desk.run("python -m django migrate")
    desk.run(f"python -c 'import django; django.setup(); from shop import tasks; tasks.place({arguments})'")
    assert desk.run("python -m django sqlq work --drain").splitlines() == printed


def write_django(directory: Path, tasks: str, queue: str, more: str = "") -> None:
    """Write a project with the app `shop`, beside the one of a queue."""
    (directory / "shop.py").unlink()
    (directory / "shop").mkdir()
    for name, content in {
        "shop/__init__.py": "",
        "shop/tasks.py": tasks,
        "settings_of_shop.py": f"INSTALLED_APPS = [{queue}, 'shop']\nUSE_TZ = True\n{more}"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'shop.sqlite3'}}\n",
    }.items():
        (directory / name).write_text(content)


class Peer(NamedTuple):
    """A peer without a server. Laravel and Sidekiq are not here: they need PHP and Ruby."""

    requirements: tuple[str, ...]
    program: str
    """Enqueues by `shop.place`, and runs the jobs."""
    replaced: tuple[str, str] = ("", "")
    """The server in the page's code, and its stand-in."""


PEERS = {
    "celery.py": Peer(
        ("celery",),
        """\
from threading import Event

from celery.contrib.testing.worker import start_worker
from celery.signals import task_success

import shop

ended = {shop.ship.name: Event(), shop.remind.name: Event()}


@task_success.connect
def note(sender, **_):
    if sender.name in ended:
        ended[sender.name].set()


with start_worker(shop.app, perform_ping_check=False):
    shop.place([1, 2])
    for each in ended.values():
        assert each.wait(60)
""",
        (
            'broker="redis://localhost", backend="redis://localhost"',
            'broker="memory://", backend="cache+memory://"',
        ),
    ),
    "rq.py": Peer(
        ("rq", "fakeredis"),
        """\
from rq import SimpleWorker

import shop

shop.place([7])
SimpleWorker([shop.mail], connection=shop.mail.connection).work(burst=True, logging_level="WARNING")
""",
        ("from redis import Redis", "from fakeredis import FakeStrictRedis as Redis"),
    ),
    "dramatiq.py": Peer(
        ("dramatiq",),
        """\
import dramatiq
from dramatiq.brokers.stub import StubBroker

broker = StubBroker()
dramatiq.set_broker(broker)

import shop

worker = dramatiq.Worker(broker)
worker.start()
shop.place()
for actor in (shop.fetch_price, shop.show_price, shop.export):
    broker.join(actor.queue_name)
    worker.join()
worker.stop()
""",
        ("RedisBackend", "StubBackend"),
    ),
    "huey.py": Peer(
        ("huey",),
        """\
import shop

shop.place()
while task := shop.huey.dequeue():
    shop.huey.execute(task)
""",
    ),
    "django_q.py": Peer(
        ("django-q2",),
        """\
import os

import django
from django.core.management import call_command

os.environ["DJANGO_SETTINGS_MODULE"] = "settings_of_shop"
django.setup()
call_command("migrate", verbosity=0)

from shop.tasks import place

place([7])
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("before", PEERS)
def test_an_application_prints_the_same_with_its_peer(desk: Desk, tmp_path: Path, before: str) -> None:
    peer = PEERS[before]
    try:
        programs = Environments(tmp_path).installed("peer", peer.requirements)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        pytest.skip(f"pip could not install {peer.requirements[0]}, which needs the package index: {reason}")
    source, (there, here) = block("peer", before), peer.replaced
    assert there in source
    source = source.replace(there, here)
    if before == "django_q.py":
        write_django(desk.directory, source, "'django_q'", QUEUE_OF_DJANGO)
        printed = DJANGO[2]
    else:
        (desk.directory / "shop.py").write_text(source)
        printed = MOVED[before][2]
    (desk.directory / "program.py").write_text(peer.program)
    done = desk.process(str(programs / "python"), "program.py", env=variables({}))
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == printed
